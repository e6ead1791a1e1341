"""A vLLM replica: decodes with logprobs and routed experts, aborts to partial segments, and loads weights live.

The engine core runs in a separate process; the backend belongs to one event loop and calls it. The same class serves
CPU and GPU. The differences are in `config.py` (arguments, environment) and `async_rl.compat.vllm` (fixes for vLLM's
CPU backend).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from agent_loop.engine import GenerateRequest
from async_rl.inference.backend import EngineBackend, LoadedWeights
from async_rl.inference.checkpoint_weights import Shapes, served_shapes, weight_files
from async_rl.inference.checks import check_request, weight_label
from async_rl.inference.gate import InflightRequest, KVPolicy
from async_rl.inference.loads import RankLoad, first_weights
from async_rl.inference.nodes import NodePlace
from async_rl.inference.replica import EngineReplica
from async_rl.inference.scores import ScoreRequest, check_score
from async_rl.inference.spans import continued, joined
from async_rl.inference.vllm.config import ServedModel, VllmConfig, check_engine, engine_args, engine_environment
from async_rl.inference.vllm.process import call_ranks, describe, start_engine, stop_engine
from async_rl.inference.vllm.segment import (
    cache_salt,
    draft_counts,
    recorded_rows,
    sampling_params,
    score_params,
    to_scores,
    to_segments,
)
from async_rl.weights.digest import WeightsDigest
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import ContractError, EngineError, ReplicaLostError
from message_queue.tokens import RoutedExperts, StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import TeacherScores

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmBackend", "VllmConfig", "VllmReplica", "check_engine", "engine_environment", "start_vllm"]


class VllmBackend(EngineBackend):
    """Calls to one vLLM engine; see `EngineBackend` for the other arguments.

    Args:
        engine: running vLLM engine.
        model: the served checkpoint.
    """

    def __init__(self, engine: AsyncLLM, *, name: str, model: ServedModel, shapes: Shapes, timeout_s: float) -> None:
        super().__init__(name=name, shapes=shapes, timeout_s=timeout_s)
        self.engine = engine
        manager: Any = engine.engine_core.resources.engine_manager
        self.processes = list(manager.processes)
        self._model = model
        self._loop = asyncio.get_running_loop()

    # ---- generating

    def check_request(self, request: GenerateRequest) -> None:
        check_request(request, info=self._model.info, routing=self._model.routing)
        if request.forced_experts is not None and self._model.unforcible is not None:
            raise ContractError(
                f"GenerateRequest.forced_experts is set, but {self._model.unforcible}; "
                "use rollout.resume_routing=append"
            )

    async def decode(
        self, request: GenerateRequest, inflight: InflightRequest, *, loaded: LoadedWeights
    ) -> list[TokenOutput]:
        """Decode a request, and continue it after each load that recomputes its K/V.

        The continued request is forced to the experts that were recorded before.
        """
        segments: list[TokenOutput] = []
        while True:
            recorded = [s.routed_experts for s in segments if s.routed_experts is not None]
            segments += await self._part(continued(request, segments), inflight, recorded, loaded)
            if not inflight.evicted or segments[-1].stop_reason is not StopReason.ABORT:
                return joined(segments)
            await inflight.park()
            if inflight.abort_requested:
                return joined(segments)

    async def _part(
        self,
        request: GenerateRequest,
        inflight: InflightRequest,
        recorded: Sequence[RoutedExperts],
        loaded: LoadedWeights,
    ) -> list[TokenOutput]:
        """Segments of one request to the engine.

        Args:
            recorded: rows of earlier segments; the engine must use them.
        """
        forced = recorded if request.forced_experts is None else [request.forced_experts, *recorded]
        params = sampling_params(
            request, info=self._model.info, capture_routing=self._model.routing is not None, forced=forced
        )
        prompt: Any = {"type": "token", "prompt_token_ids": request.token_ids.tolist()}
        if salt := cache_salt(request, forced=forced):
            prompt["cache_salt"] = salt
        output = await self._output(request.request_id, inflight, prompt, params)
        inflight.drafts += draft_counts(output)
        return to_segments(
            output,
            request=request,
            info=self._model.info,
            routing=self._model.routing,
            weights=loaded.current,
            loaded=loaded.by_label,
            replica=self._name,
        )

    async def _output(
        self, request_id: str, inflight: InflightRequest, prompt: Any, params: SamplingParams
    ) -> RequestOutput:
        """vLLM's final output. An abort or eviction that came before vLLM knew the request is repeated once it does."""
        try:
            collector = await self.engine.add_request(request_id, prompt, params)
            if inflight.abort_requested or inflight.evicted:
                await self.engine.abort(request_id)
            output: Any = collector.get_nowait() or await collector.get()
            while not output.finished:
                output = collector.get_nowait() or await collector.get()
            return output
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # a dead engine has no request to abort
                await self.engine.abort(request_id)
            raise
        except Exception as error:
            raise await self.engine_error(error, f"{self._name}: request {request_id}") from error

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """See `EngineBackend.score`. vLLM samples one more token, which is left out."""
        max_model_len: int = self.engine.model_config.max_model_len
        check_score(request, info=self._model.info, max_model_len=max_model_len)
        prompt: Any = {"type": "token", "prompt_token_ids": request.token_ids.tolist()}
        inflight = InflightRequest(request.request_id)
        return to_scores(
            await self._output(request.request_id, inflight, prompt, score_params(request)), request=request
        )

    # ---- control

    async def abort(self, requests: Sequence[InflightRequest]) -> None:
        await self.engine.abort([request.request_id for request in requests])

    async def freeze(self) -> None:
        self._frozen = True
        await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        if self._frozen:
            await self.engine.resume_generation()
            self._frozen = False

    async def check_update(self, update: WeightUpdate, *, kv: KVPolicy, in_flight: bool) -> None:
        await super().check_update(update, kv=kv, in_flight=in_flight)
        recorded = in_flight and self._model.routing is not None
        if kv == "recompute" and recorded and self._model.unforcible is not None:
            raise ContractError(
                "K/V in flight cannot be computed again under the experts that were recorded, because "
                f"{self._model.unforcible}; use rollout.kv=keep, or abort first"
            )

    async def load(
        self, update: WeightUpdate, *, kv: KVPolicy, requests: Sequence[InflightRequest]
    ) -> Sequence[RankLoad]:
        """Load a version, or exchange the weights if the version is staged.

        With kv="recompute", frozen requests leave the engine. After `resume` they are sent back with all tokens so
        far and with the recorded experts forced. With kv="keep", they stay in the engine. If the engine runs out of
        K/V memory and preempts a kept request, it recomputes the K/V with the weights of that time. The routing is
        then the recorded one if routers can be forced (see `check_engine`), else the live one.
        """
        if kv == "recompute":
            await self._evict(requests)
        ranks = await super().load(update, kv=kv, requests=requests)
        if kv == "keep":
            await self._pin_routing()
        elif not await self.engine.reset_prefix_cache():
            raise EngineError(f"{self._name}: the K/V of the previous version is still in use after a drain")
        return ranks

    async def load_version(self, version: str) -> list[RankLoad]:
        return [RankLoad.of(report) for report in await call_ranks(self.engine, "load_update", version)]

    async def start_staging(self, version: str) -> None:
        await call_ranks(self.engine, "start_staging", version)

    async def staged(self) -> list[RankLoad] | None:
        reports = await call_ranks(self.engine, "staged")
        return None if None in reports else [RankLoad.of(report) for report in reports]

    async def commit_staged(self) -> None:
        await call_ranks(self.engine, "commit_staged")

    async def label(self, label: str) -> None:
        await self.engine.update_weight_version(label)

    async def _evict(self, requests: Sequence[InflightRequest]) -> None:
        """Take frozen requests out of the engine; `resume` sends them back."""
        inside = [request for request in requests if not request.parked]
        for request in inside:
            request.evicted = True
        if inside:
            await self.abort(inside)
        for request in inside:
            await request.outside.wait()

    async def _pin_routing(self) -> None:
        """Make the engine use the recorded experts of frozen requests if it preempts and recomputes them."""
        if self._model.routing is None or self._model.unforcible is not None:
            return
        if rows := recorded_rows(self.engine, self._model.routing):
            await call_ranks(self.engine, "pin_routing", rows)

    # ---- process

    def watch(self, on_death: Callable[[str], None]) -> None:
        def died(process: Any) -> None:
            self._unwatch()
            process.join(0.1)  # its pipe closes a moment before it has an exit code
            # If vLLM's own monitor has waited for the process first, the exit code is unknown.
            code = "unknown" if process.exitcode is None else process.exitcode
            on_death(f"engine process {process.pid} died, exit code {code}")

        for process in self.processes:
            self._loop.add_reader(process.sentinel, died, process)

    def _unwatch(self) -> None:
        for process in self.processes:
            self._loop.remove_reader(process.sentinel)

    async def close(self) -> None:
        """Stop the engine process; kill it if it does not stop in time."""
        self._unwatch()
        await stop_engine(self.engine)
        for process in self.processes:
            if process.is_alive():
                process.kill()

    async def engine_error(self, error: Exception, what: str) -> EngineError:
        from vllm.v1.engine.exceptions import EngineDeadError

        kind = ReplicaLostError if isinstance(error, EngineDeadError) else EngineError
        return kind(f"{what} failed: {describe(error)}")


VllmReplica: TypeAlias = EngineReplica[VllmBackend]


async def start_vllm(
    config: VllmConfig,
    *,
    name: str,
    checkpoint: Path,
    capture_routing: bool = True,
    capture_support: bool = False,
    place: NodePlace | None = None,
) -> VllmReplica:
    """Start an engine on a Hugging Face checkpoint folder; it serves version 0 with the digest of its tensors.

    For the arguments see `async_rl.inference.select.start_replica`.

    Raises:
        ValueError: the configuration does not suit the checkpoint.
        EngineError: the environment is wrong, or the engine did not start within `engine.start_timeout_s`.
    """
    model = check_engine(config, checkpoint=checkpoint, capture_routing=capture_routing)
    files = weight_files(checkpoint)
    needed = engine_environment(config)
    if wrong := [f"{k}={os.environ.get(k)!r} (needs {v!r})" for k, v in needed.items() if os.environ.get(k) != v]:
        raise EngineError(
            f"{name}: the process has {', '.join(wrong)}; set engine_environment(config) before it imports vLLM"
        )
    shapes = served_shapes(checkpoint, model.info)
    args = engine_args(config, model, capture_routing=capture_routing, capture_support=capture_support, place=place)
    try:
        async with asyncio.timeout(config.start_timeout_s):
            engine = await start_engine(args)
        async with asyncio.timeout(config.load_timeout_s):  # as of a later version
            ranks = await call_ranks(engine, "first_load", [str(file) for file in files])
            hashes = {name: found for rank in ranks for name, found in rank["hashes"].items() if name in shapes}
            weights = WeightVersion(0, WeightsDigest.of_hashes(hashes).hexdigest())
            await engine.update_weight_version(weight_label(weights))
    except TimeoutError as error:
        raise EngineError(
            f"{name}: the engine did not start within engine.start_timeout_s={config.start_timeout_s}, or its ranks "
            f"did not hash their weights within engine.load_timeout_s={config.load_timeout_s}"
        ) from error
    except Exception as error:
        raise EngineError(f"{name}: the engine did not start: {error}") from error
    return EngineReplica(
        VllmBackend(engine, name=name, model=model, shapes=shapes, timeout_s=config.load_timeout_s),
        config=config,
        name=name,
        weights=weights,
        live=first_weights(ranks),
    )
