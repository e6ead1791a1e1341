"""Which engine a run uses: the one place that knows all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from async_rl.engines import sglang_config, vllm_config
from async_rl.engines.replica import Replica
from async_rl.engines.sglang_config import SglangConfig
from async_rl.engines.vllm_config import VllmConfig

EngineConfig = Annotated[VllmConfig | SglangConfig, Field(discriminator="name")]


def check_engine(config: VllmConfig | SglangConfig, *, checkpoint: Path, capture: bool, force: bool) -> None:
    """Refuse what the engine would accept and then do wrong, before any process starts.

    capture: whether routing rows are returned. force: whether requests bring experts to be used.

    Raises:
        ValueError: the configuration does not suit the checkpoint; names field, value and the way out.
        CheckpointError: the checkpoint cannot be read.
    """
    module = vllm_config if isinstance(config, VllmConfig) else sglang_config
    module.check_engine(config, checkpoint=checkpoint, capture_routing=capture, force_routing=force)  # type: ignore[arg-type]


def actor_environment(config: VllmConfig | SglangConfig) -> dict[str, str]:
    """Variables that the process of a replica must have from its start."""
    return vllm_config.engine_environment(config) if isinstance(config, VllmConfig) else {}


async def start_replica(
    config: VllmConfig | SglangConfig, *, name: str, checkpoint: Path, capture_routing: bool
) -> Replica:
    """Start an engine on a Hugging Face checkpoint folder, in a process that has `actor_environment`.

    Raises:
        ValueError: the configuration does not suit the checkpoint.
        EngineError: the engine failed to start in time.
    """
    if isinstance(config, VllmConfig):
        from async_rl.engines.vllm import VllmReplica

        return await VllmReplica.start(config, name=name, checkpoint=checkpoint, capture_routing=capture_routing)
    from async_rl.engines.sglang import SglangReplica

    return await SglangReplica.start(config, name=name, checkpoint=checkpoint, capture_routing=capture_routing)
