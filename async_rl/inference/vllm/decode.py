"""Runs one request on a vLLM engine. After a load that recomputes K/V, the request is sent to the engine again."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_loop.engine import AnswerError, EngineError, GenerateRequest, ReplicaLostError
from async_rl.inference.checks import check_request, weight_label
from async_rl.inference.replica import Flight, RequestGate
from async_rl.inference.spans import continued, joined
from async_rl.inference.vllm.config import ServedModel
from async_rl.inference.vllm.process import describe, is_engine_death
from async_rl.inference.vllm.segment import cache_salt, sampling_params, to_segments
from message_queue.tokens import ContractError, RoutedExperts, StopReason, TokenOutput, WeightVersion

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(slots=True, eq=False)
class LoadedWeights:
    """The weight versions that may have sampled tokens of the requests in flight."""

    current: WeightVersion
    """The loaded version."""
    by_label: dict[str, WeightVersion] = field(init=False)
    """`weight_label` -> version, of all versions that may have sampled a token of a request in flight."""

    def __post_init__(self) -> None:
        self.by_label = {weight_label(self.current): self.current}

    def replace(self, weights: WeightVersion, *, in_flight: bool) -> None:
        """Record a load; if no request is in flight, earlier versions are removed."""
        if not in_flight:
            self.by_label.clear()
        self.by_label[weight_label(weights)] = self.current = weights


class Decoder:
    """Decodes the requests that `gate` admits.

    Args:
        name: name of the replica, for error messages.
        weights: loaded versions; the replica updates them after a load.
    """

    def __init__(
        self, engine: AsyncLLM, *, gate: RequestGate, name: str, model: ServedModel, weights: LoadedWeights
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._name = name
        self._model = model
        self._weights = weights

    async def decode(self, request: GenerateRequest, flight: Flight) -> list[TokenOutput]:
        """Decode a request, and continue it after each load that recomputes its K/V.

        The continued request is forced to the experts that were recorded before.

        Raises:
            EngineError: the request cannot be served, or the engine failed it.
            AnswerError, ReplicaLostError: see `agent_loop.engine`.
        """
        self._check(request)
        segments: list[TokenOutput] = []
        while True:
            recorded = [s.routed_experts for s in segments if s.routed_experts is not None]
            segments += await self._part(continued(request, segments), flight, recorded)
            if not flight.recalled or segments[-1].stop_reason is not StopReason.ABORT:
                return joined(segments)
            await self._gate.hold(flight)
            if flight.abort_requested:
                return joined(segments)

    def _check(self, request: GenerateRequest) -> None:
        try:
            check_request(request, info=self._model.info, routing=self._model.routing)
        except ContractError as error:
            raise EngineError(f"{self._name}: request {request.request_id}: {error}") from error
        if request.forced_experts is not None and self._model.unforcible is not None:
            raise EngineError(
                f"{self._name}: request {request.request_id}: GenerateRequest.forced_experts is set, but "
                f"{self._model.unforcible}; use rollout.resume_routing=append"
            )

    async def _part(self, request: GenerateRequest, flight: Flight, recorded: list[RoutedExperts]) -> list[TokenOutput]:
        """Segments of one request to the engine.

        Args:
            recorded: rows of earlier segments, which the engine must use.
        """
        forced = recorded if request.forced_experts is None else [request.forced_experts, *recorded]
        params = sampling_params(
            request, info=self._model.info, capture_routing=self._model.routing is not None, forced=forced
        )
        prompt: Any = {"type": "token", "prompt_token_ids": request.token_ids.tolist()}
        if salt := cache_salt(request, forced=forced):
            prompt["cache_salt"] = salt
        output = await self._output(request.request_id, flight, prompt, params)
        try:
            return to_segments(
                output,
                request=request,
                info=self._model.info,
                routing=self._model.routing,
                weights=self._weights.current,
                loaded=self._weights.by_label,
                replica=self._name,
            )
        except ContractError as error:
            raise AnswerError(f"{self._name}: request {request.request_id}: {error}") from error

    async def _output(self, request_id: str, flight: Flight, prompt: Any, params: SamplingParams) -> RequestOutput:
        """vLLM's final output. An abort or recall that came before vLLM knew the request is repeated once it does."""
        try:
            collector = await self._engine.add_request(request_id, prompt, params)
            if flight.abort_requested or flight.recalled:
                await self._engine.abort(request_id)
            output: Any = collector.get_nowait() or await collector.get()
            while not output.finished:
                output = collector.get_nowait() or await collector.get()
            return output
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # a dead engine has no request to abort
                await self._engine.abort(request_id)
            raise
        except Exception as error:
            self._gate.check_alive()
            kind = ReplicaLostError if is_engine_death(error) else EngineError
            raise kind(f"{self._name}: request {request_id} failed: {describe(error)}") from error
