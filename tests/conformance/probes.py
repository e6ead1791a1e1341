"""Probes into each engine, and references of the models that it serves."""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from async_rl.inference.sglang.engine import SglangReplica
from async_rl.inference.vllm import engine as vllm_engine
from async_rl.inference.vllm.engine import VllmReplica
from message_queue.tokens import Int32Array, RoutingSpec, TokenOutput
from tests.conformance.reference import Reference, reference_of_parts
from tests.conformance.sglang_support import loads
from tests.helpers import numerics
from tests.helpers.fakes import FakeEngine, fake_logprob, fake_row


class TransformersTruth:
    """Transformers models; versions take them in turn."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models

    def __call__(self, parts: Sequence[tuple[int, int]], token_ids: Any, *, forced: Any) -> Reference:
        models = [(self._models[version % len(self._models)], end) for version, end in parts]
        return reference_of_parts(models, token_ids, forced=forced)


class FakeTruth:
    """Tokens and rows of the fake engine. They follow from token, position and version alone.

    Forced rows are used unchanged; they change no logprob.
    """

    def __init__(self, routing: RoutingSpec, *, vocab_size: int) -> None:
        self._routing = routing
        self._vocab_size = vocab_size

    def __call__(self, parts: Sequence[tuple[int, int]], token_ids: Any, *, forced: Any) -> Reference:
        ids = token_ids.tolist()
        owners = [next(version for version, end in parts if position < end) for position in range(len(ids))]
        logprobs = np.full((len(ids) - 1, self._vocab_size), np.nan)
        experts = np.stack([fake_row(*at, self._routing) for at in zip(ids, range(len(ids)), owners, strict=True)])
        experts = experts.astype(np.int64)
        for position, (token, version) in enumerate(zip(ids[1:], owners, strict=False), start=1):
            logprobs[position - 1, token] = fake_logprob(token, position, version)
        if forced is not None:
            given = np.asarray(forced)[: len(ids)].astype(np.int64)
            experts[: len(given)] = np.where(given < 0, experts[: len(given)], given)
        margins = np.full(experts.shape[:2], np.inf)
        bound = numerics.EPSILON * np.nanmax(np.abs(logprobs), initial=0.0)  # it writes logprobs in float32
        return Reference(
            logprobs=logprobs,
            experts=np.sort(experts, -1),
            margins=margins,
            logprob_bound=bound,
            score_errors=np.zeros(margins.shape),
        )


class CountingScript:
    """A random walk over all ids; calls: tokens written so far."""

    def __init__(self, *, vocab_size: int) -> None:
        self.calls = 0
        self._vocab_size = vocab_size

    def __call__(self, token_ids: Int32Array) -> int:
        self.calls += 1
        return zlib.crc32(token_ids.tobytes()) % self._vocab_size


class FakeProbe:
    """The fake has no K/V: no prefix cache, no chunks of a prefill, nothing to preempt."""

    kv_tokens: int | None = None

    def __init__(self, engine: FakeEngine, *, script: CountingScript) -> None:
        self.cached_tokens: list[int] = []
        self.retractions: list[int] = []
        self._engine = engine
        self._script = script

    async def sampled(self, running: Sequence[GenerateRequest]) -> int:
        return self._script.calls - self._engine.num_tokens if running else 0

    async def all_at_work(self, running: Sequence[GenerateRequest]) -> bool:
        return self._engine.in_flight == len(running)

    async def idle(self) -> bool:
        return not self._engine.in_flight

    async def slow_down(self, step_s: float | None) -> None:
        """Nothing: the fake runs on the event loop of the test."""


class VllmProbe:
    """Looks into vLLM's client, of one replica or of those behind a router."""

    def __init__(self, *replicas: VllmReplica, kv_tokens: int, patch: pytest.MonkeyPatch) -> None:
        self.kv_tokens: int | None = kv_tokens
        self.cached_tokens: list[int] = []
        self.retractions: list[int] = []
        self._engines = [replica.backend.engine for replica in replicas]
        translate = vllm_engine.to_segments

        def spy(output: Any, **context: Any) -> list[TokenOutput]:
            self.cached_tokens.append(output.num_cached_tokens)
            return translate(output, **context)

        patch.setattr(vllm_engine, "to_segments", spy)

    async def sampled(self, running: Sequence[GenerateRequest]) -> int:
        held = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in self._states())
        return held - sum(len(request.token_ids) for request in running)

    async def all_at_work(self, running: Sequence[GenerateRequest]) -> bool:
        return len(self._states()) == len(running)

    async def idle(self) -> bool:
        return all(engine.output_processor.get_num_unfinished_requests() == 0 for engine in self._engines)

    async def slow_down(self, step_s: float | None) -> None:
        """Needs the worker of `tests.conformance.planted_vllm`."""
        for engine in self._engines:
            await engine.collective_rpc("slow_down", args=(step_s,))

    def _states(self) -> list[Any]:
        """Requests that are in an engine."""
        return [state for engine in self._engines for state in engine.output_processor.request_states.values()]


class SglangProbe:
    """Listens to SGLang's answers and asks for its load."""

    def __init__(self, replica: SglangReplica, *, kv_tokens: int, patch: pytest.MonkeyPatch) -> None:
        self.kv_tokens: int | None = kv_tokens
        self.cached_tokens: list[int] = []
        self.retractions: list[int] = []
        self._replica = replica
        post = replica.backend.server.post

        async def spy(path: str, body: Any) -> Any:
            answer = await post(path, body)
            if path == "/generate":
                self.cached_tokens.append(answer["meta_info"].get("cached_tokens", 0))
                self.retractions.append(answer["meta_info"].get("num_retractions", 0))
            return answer

        patch.setattr(replica.backend.server, "post", spy)

    async def sampled(self, running: Sequence[GenerateRequest]) -> int:
        figures = await loads(self._replica)
        if not figures["num_running_reqs"]:
            return 0
        started = running[: len(running) - figures["num_waiting_reqs"]]  # decoded, prefilled or on their way
        return figures["num_used_tokens"] - sum(len(request.token_ids) for request in started)

    async def all_at_work(self, running: Sequence[GenerateRequest]) -> bool:
        return (await loads(self._replica))["num_running_reqs"] == len(running)

    async def idle(self) -> bool:
        """SGLang hears of a cancellation by a call, and answers before it counts."""
        for _ in range(100):
            figures = await loads(self._replica)
            if not figures["num_running_reqs"] and not figures["num_waiting_reqs"]:
                return True
            await asyncio.sleep(0.05)
        return False

    async def slow_down(self, step_s: float | None) -> None:
        await self._replica.backend.server.post("/slow_down", {"forward_sleep_time": step_s})
