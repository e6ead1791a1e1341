"""Which engine a run uses: the one place that knows all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from async_rl.engines import sglang_config, vllm_config
from async_rl.engines.replica import Replica
from async_rl.engines.sglang_config import SglangConfig
from async_rl.engines.vllm_config import VllmConfig

EngineConfig = Annotated[VllmConfig | SglangConfig, Field(discriminator="name")]


def check_engine(
    config: VllmConfig | SglangConfig, *, checkpoint: Path, capture: bool, force: bool, on_this_machine: bool = True
) -> None:
    """Refuse what the engine would accept and then do wrong, before any process starts.

    capture: whether routing rows are returned. force: whether requests bring experts to be used.
    on_this_machine: whether the engine runs here; if not, `engine.device=auto` is checked by the replica's process.

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
        on_this_machine=on_this_machine,
    )


def actor_environment(config: VllmConfig | SglangConfig) -> dict[str, str]:
    """Variables that the process of a replica must have from its start, whatever its device."""
    return vllm_config.process_environment(config) if isinstance(config, VllmConfig) else {}


def own_variables(config: VllmConfig | SglangConfig) -> frozenset[str]:
    """Names of the variables that a replica sets itself."""
    return vllm_config.OWN_VARIABLES if isinstance(config, VllmConfig) else sglang_config.OWN_VARIABLES


async def start_replica(
    config: VllmConfig | SglangConfig,
    *,
    name: str,
    checkpoint: Path,
    capture_routing: bool,
    force_routing: bool = False,
    capture_support: bool = False,
) -> Replica:
    """Start an engine on a Hugging Face checkpoint folder, in a process that has `actor_environment`.

    The variables that depend on the device are set here: only the process that serves knows its device.

    capture_support: whether requests may sample from a part of the vocabulary; vLLM has to know at its start.

    Raises:
        ValueError: the configuration does not suit the checkpoint.
        EngineError: the engine failed to start in time.
    """
    check_engine(config, checkpoint=checkpoint, capture=capture_routing, force=force_routing)
    if isinstance(config, VllmConfig):
        os.environ.update(vllm_config.device_environment(config))
    if isinstance(config, VllmConfig):
        from async_rl.engines.vllm import VllmReplica

        return await VllmReplica.start(
            config,
            name=name,
            checkpoint=checkpoint,
            capture_routing=capture_routing,
            capture_support=capture_support,
        )
    from async_rl.engines.sglang import SglangReplica

    return await SglangReplica.start(config, name=name, checkpoint=checkpoint, capture_routing=capture_routing)
