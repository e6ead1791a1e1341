"""Selects the engine of a run; the only module that imports all engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from async_rl.inference.nodes import NODE_VARIABLES, NodePlace, NodeProcess, node_environment
from async_rl.inference.replica import EngineReplica
from async_rl.inference.sglang import config as sglang_config
from async_rl.inference.sglang.config import SglangConfig
from async_rl.inference.vllm import config as vllm_config
from async_rl.inference.vllm.config import VllmConfig

EngineConfig = Annotated[VllmConfig | SglangConfig, Field(discriminator="name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What the process of a replica needs to know, of the student or of a teacher."""

    engine: EngineConfig
    """Settings of the engine."""
    captures_routing: bool = False
    """Whether it returns routing rows."""
    forces_routing: bool = False
    """Whether requests carry forced experts."""
    captures_support: bool = False
    """Whether requests may sample from a part of the vocabulary; vLLM needs this at its start."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further environment variables of the process."""


def check_engine(config: VllmConfig | SglangConfig, *, checkpoint: Path, capture: bool, force: bool) -> None:
    """Refuse configurations that the engine accepts but handles wrongly. Call it before any process starts.

    Args:
        capture: whether the replica returns routing rows.
        force: whether requests carry forced experts.

    Raises:
        ValueError: the configuration does not suit the checkpoint; names field, value and the way out.
        CheckpointError: the checkpoint cannot be read.
    """
    module = vllm_config if isinstance(config, VllmConfig) else sglang_config
    module.check_engine(
        config,  # type: ignore[arg-type]
        checkpoint=checkpoint,
        capture_routing=capture,
        force_routing=force,
    )


def actor_environment(config: VllmConfig | SglangConfig) -> dict[str, str]:
    """Environment variables that a replica's process needs at its start, on any device."""
    return vllm_config.process_environment(config) if isinstance(config, VllmConfig) else {}


def own_variables(config: VllmConfig | SglangConfig) -> frozenset[str]:
    """Names of the environment variables that a replica sets itself."""
    own = vllm_config.OWN_VARIABLES if isinstance(config, VllmConfig) else sglang_config.OWN_VARIABLES
    return own | NODE_VARIABLES if config.nodes > 1 else own


async def start_replica(
    settings: ReplicaSettings, *, name: str, checkpoint: Path, place: NodePlace | None = None
) -> EngineReplica[Any]:
    """Start an engine on a Hugging Face checkpoint folder, in a process that has `actor_environment`.

    Variables that depend on the device are set here, because only this process knows its device.

    Args:
        name: name of the replica.
        checkpoint: Hugging Face checkpoint folder.
        place: of this node, the first of several; None if the replica has one.

    Raises:
        ValueError: the configuration does not suit the checkpoint.
        EngineError: the engine did not start, or not in time.
    """
    config, capture = settings.engine, settings.captures_routing
    check_engine(config, checkpoint=checkpoint, capture=capture, force=settings.forces_routing)
    if place is not None:
        os.environ.update(node_environment(place))
    given: dict[str, Any] = {"name": name, "checkpoint": checkpoint, "capture_routing": capture, "place": place}
    if isinstance(config, VllmConfig):
        os.environ.update(vllm_config.device_environment(config))
        from async_rl.inference.vllm.engine import start_vllm

        return await start_vllm(config, capture_support=settings.captures_support, **given)
    from async_rl.inference.sglang.engine import start_sglang

    return await start_sglang(config, **given)


async def start_node(settings: ReplicaSettings, place: NodePlace, *, checkpoint: Path) -> NodeProcess:
    """Start the ranks of an engine on a node but the first; see `start_replica` for arguments and errors."""
    config = settings.engine
    os.environ.update(node_environment(place))
    given: dict[str, Any] = {"checkpoint": checkpoint, "capture_routing": settings.captures_routing}
    if isinstance(config, VllmConfig):
        os.environ.update(vllm_config.device_environment(config))
        from async_rl.inference.vllm.process import start_node as start_vllm_node

        return start_vllm_node(config, place, capture_support=settings.captures_support, **given)
    from async_rl.inference.sglang.server import start_node as start_sglang_node

    return await start_sglang_node(config, place, **given)
