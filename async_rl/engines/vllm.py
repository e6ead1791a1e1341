"""A vLLM replica: decodes with logprobs and routed experts, aborts to partial segments, and loads weights live.

The engine core runs in a process of its own; this object lives on one event loop and talks to it. The same class serves
CPU and GPU; what differs is in `vllm_config.py` (arguments, environment) and `vllm_cpu.py` (repairs of the CPU backend).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing.connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop.engine import EngineError, GenerateRequest
from async_rl.engines.checkpoint_weights import digest_checkpoint, tensor_names, weight_files
from async_rl.engines.replica import Flight, ReplicaStats, RequestGate
from async_rl.engines.vllm_config import (
    ServedModel,
    VllmConfig,
    check_engine,
    engine_args,
    engine_environment,
    wrong_environment,
)
from async_rl.engines.vllm_segment import sampling_params, to_segment
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import ContractError, TokenOutput, WeightVersion

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmConfig", "VllmReplica", "check_engine", "engine_environment"]

STOP_TIMEOUT_S = 10.0  # an engine process that takes longer to stop is killed


class VllmReplica:
    """One vLLM engine; see `async_rl.engines.replica.Replica` for the contract of each call.

    Made by `start`. weights: what `engine` has loaded. names: the tensors every update must bring.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        config: VllmConfig,
        name: str,
        model: ServedModel,
        capture_routing: bool,
        weights: WeightVersion,
        names: frozenset[str],
    ) -> None:
        self.name = name
        self._engine = engine
        self._config = config
        self._info = model.info
        self._routing = model.info.routing if capture_routing else None
        self._weights = weights
        self._names = names
        self._gate = RequestGate(name)
        self._closed = False
        self._processes = _engine_processes(engine)
        self._watch = asyncio.get_running_loop()
        for process in self._processes:
            self._watch.add_reader(process.sentinel, self._on_death, process)

    @classmethod
    async def start(
        cls,
        config: VllmConfig,
        *,
        name: str,
        checkpoint: Path,
        weights: WeightVersion | None = None,
        capture_routing: bool = True,
    ) -> VllmReplica:
        """Start an engine on a Hugging Face checkpoint folder.

        weights: what the checkpoint is; None for version 0 with the digest of its tensors.

        Raises:
            ValueError: the configuration does not suit the checkpoint.
            EngineError: wrong environment, the engine failed to start, or took longer than `engine.start_timeout_s`.
        """
        model = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
        files = weight_files(checkpoint)
        if problem := wrong_environment(config):
            raise EngineError(f"{name}: {problem}")
        try:
            async with asyncio.timeout(config.start_timeout_s):
                engine = await _start_engine(engine_args(config, model, capture_routing=capture_routing))
                if weights is None:
                    weights = WeightVersion(0, await asyncio.to_thread(digest_checkpoint, checkpoint))
        except TimeoutError as error:
            raise EngineError(
                f"{name}: the engine did not start within engine.start_timeout_s={config.start_timeout_s}"
            ) from error
        except Exception as error:
            raise EngineError(f"{name}: the engine did not start: {error}") from error
        return cls(
            engine,
            config=config,
            name=name,
            model=model,
            capture_routing=capture_routing,
            weights=weights,
            names=tensor_names(files),
        )
