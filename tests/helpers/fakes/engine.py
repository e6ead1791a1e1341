"""A stand-in for an engine with the life cycle of a replica, held to the contract of one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from agent_loop.engine import GenerateRequest
from async_rl.inference.gate import ReplicaStats
from async_rl.inference.spans import cut_into_segments
from async_rl.simulator.standins import ScriptedReplica
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import AnswerError, ContractError
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from tests.helpers.fakes.sampled import SPEC, Script, fake_kept, fake_logprob, fake_row, fake_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """After `after` more tokens of a decode, `load` if given; then the decode ends, unless `goes_on`."""

    after: int
    load: int | None = None
    goes_on: bool = False


Fault = Callable[[GenerateRequest, list[TokenOutput]], list[TokenOutput]]
"""Changes an answer on its way; tests/helpers/faults.py has a collection."""


@dataclass(slots=True, eq=False)
class _Decode:
    """A decode under way."""

    interrupt: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the decode must end."""
    moving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the decode is not frozen."""

    def end(self) -> None:
        self.interrupt.set()
        self.moving.set()


class FakeEngine(ScriptedReplica):
    """An Engine with the life cycle of a replica: pause, abort, freeze, load, resume; one event loop, no threads.

    Args:
        script: next token given the tokens so far.
        token_s: seconds per token on the event loop's clock; 0 gives way to other tasks after each token.
        interruptions: consumed one per `generate` call, and one more after each that lets its decode continue; None
            lets that call run through.
        context_length: a decode that reaches it ends with LENGTH.
        fail: called with each request before it decodes; the exception that it returns is raised.
        faults: consumed one per answer, to spoil it; None leaves it good.
        edge: whether answers are checked as a replica does, so bad ones are AnswerError; else they are passed on.
    """

    def __init__(
        self,
        script: Script,
        *,
        routing: RoutingSpec | None = SPEC,
        token_s: float = 0.0,
        interruptions: Iterable[Interruption | None] = (),
        context_length: int = 1 << 20,
        fail: Callable[[GenerateRequest], Exception | None] = lambda _request: None,
        faults: Iterable[Fault | None] = (),
        edge: bool = True,
        name: str = "fake-0",
        version: int = 0,
    ) -> None:
        super().__init__(name, weights=fake_weights(version))
        self.requests: list[GenerateRequest] = []
        self.staged: list[int] = []
        self.loads: list[tuple[int, str]] = []  # (version, kv)
        self.num_tokens = 0
        self._script = script
        self._routing = routing
        self._token_s = token_s
        self._interruptions = iter(interruptions)
        self._context_length = context_length
        self._fail = fail
        self._faults = iter(faults)
        self._edge = edge
        self._hung = False
        self._running: dict[str, _Decode] = {}

    # ---- life cycle

    @property
    def in_flight(self) -> int:
        """Requests that decode now, frozen ones too; those that wait at the pause are not among them."""
        return len(self._running)

    async def stage(self, update: WeightUpdate) -> None:
        """Hold other weights next to those that serve."""
        await super().stage(update)
        self.staged.append(update.weights.version)

    async def _on_load(self, weights: WeightVersion, kv: str, *, seconds: float) -> None:
        await super()._on_load(weights, kv, seconds=seconds)
        self.loads.append((weights.version, kv))

    def _on_abort(self) -> None:
        for decode in self._running.values():
            decode.end()

    def _on_freeze(self) -> None:
        for decode in self._running.values():
            decode.moving.clear()

    def _on_resume(self) -> None:
        for decode in self._running.values():
            decode.moving.set()

    async def stats(self) -> ReplicaStats:
        return replace(await super().stats(), busy_seconds=0.0)

    def die(self, cause: str = "killed") -> None:
        """Fail every request and every control call, running or new."""
        self._gate.fail(cause)
        self._on_abort()

    def hang(self) -> None:
        """Answer nothing from now on, neither requests nor control calls."""
        self._hung = True
        for control in ("pause", "abort", "drain", "freeze", "resume", "fetch", "stage", "load", "stats"):
            setattr(self, control, self._never)

    async def _never(self, *_arguments: object, **_options: object) -> None:
        await asyncio.Event().wait()

    async def _answering(self) -> None:
        if self._hung:
            await self._never()
        self._gate.check_alive()

    # ---- decoding

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        self.requests.append(request)
        await self._answering()
        async with self._gate.admit(request.request_id):
            await self._answering()
            if (failure := self._fail(request)) is not None:
                raise failure
            decode = self._running[request.request_id] = _Decode()
            decode.moving.set()
            try:
                return self._sent(request, await self._decode(request, decode))
            finally:
                del self._running[request.request_id]

    async def _decode(self, request: GenerateRequest, decode: _Decode) -> list[TokenOutput]:
        ids = request.token_ids.tolist()
        prompt, samplers = len(ids), list[WeightVersion]()
        interruption, since = next(self._interruptions, None), 0
        reason = StopReason.LENGTH
        while len(samplers) < request.max_new_tokens and len(ids) < self._context_length:
            await self._wait_for_token(decode)
            while interruption is not None and since == interruption.after:
                if interruption.load is not None:
                    self.weights = fake_weights(interruption.load)
                if not interruption.goes_on:
                    decode.interrupt.set()
                    break
                interruption, since = next(self._interruptions, None), 0
            if decode.interrupt.is_set():
                reason = StopReason.ABORT
                break
            samplers.append(self.weights)
            ids.append(self._script(np.asarray(ids, np.int32)))
            since += 1
            if ids[-1] in request.stop_token_ids:
                reason = StopReason.STOP
                break
        self.num_tokens += len(samplers)
        return self._output(request, ids[:prompt], ids[prompt:], samplers, reason)

    def _output(
        self,
        request: GenerateRequest,
        prompt: list[int],
        sampled: list[int],
        samplers: list[WeightVersion],
        reason: StopReason,
    ) -> list[TokenOutput]:
        rows = None
        if self._routing is not None and sampled:
            held = range(request.existing_rows, len(prompt) + len(sampled) - 1)
            stacked = np.zeros((len(held), *self._routing.row_shape), np.uint8)
            for at, position in enumerate(held):
                stacked[at] = self._forward(request, [*prompt, *sampled], position, samplers)
            rows = RoutedExperts(first_position=request.existing_rows, experts=stacked)
        logprobs = [
            fake_logprob(token, len(prompt) + i, weights.version)
            for i, (token, weights) in enumerate(zip(sampled, samplers, strict=True))
        ]
        support = None
        if request.sampling.is_cut:
            kept = [fake_kept(token, len(prompt) + i) for i, token in enumerate(sampled)]
            support = SamplingSupport.pack(
                np.array([len(ids) for ids in kept], np.int64), np.array([t for ids in kept for t in ids], np.int64)
            )
        spans = [(weights, len(list(run))) for weights, run in itertools.groupby(samplers)]
        return cut_into_segments(
            request,
            token_ids=np.asarray(sampled, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            routed_experts=rows,
            spans=spans or [(self.weights, 0)],
            stop_reason=reason,
            replica=self.name,
            support=support,
        )

    def _forward(
        self, request: GenerateRequest, ids: list[int], position: int, samplers: list[WeightVersion]
    ) -> np.ndarray:
        """The row of `position`: forced, or by the weights that sampled the next token of this decode."""
        assert self._routing is not None
        forced = request.forced_experts
        if forced is not None and position < forced.end_position:
            return forced.experts[position]
        owner = samplers[max(0, position + 1 - len(request.token_ids))]
        return fake_row(ids[position], position, owner.version, self._routing)

    def _sent(self, request: GenerateRequest, answer: list[TokenOutput]) -> list[TokenOutput]:
        """The answer as it arrives: spoiled if that is its turn, and checked if there is an edge."""
        if (fault := next(self._faults, None)) is None:
            return answer
        try:
            answer = fault(request, answer)
            if self._edge:
                check_at_edge(request, answer, routing=self._routing)
        except ContractError as error:
            raise AnswerError(f"{self.name}: request {request.request_id}: {error}") from error
        return answer

    async def _wait_for_token(self, decode: _Decode) -> None:
        if not self._token_s:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._token_s):
                    await decode.interrupt.wait()
        await decode.moving.wait()
        await self._answering()


def check_at_edge(
    request: GenerateRequest, answer: list[TokenOutput], *, routing: RoutingSpec | None, vocab_size: int = 1 << 20
) -> None:
    """Check an answer like a replica before it returns it: every segment, and the extent of its rows.

    Raises:
        ContractError: the first thing that is wrong.
    """
    row, end = request.existing_rows, len(request.token_ids)
    for segment in answer:
        segment.check(vocab_size=vocab_size, routing=routing, cut=request.sampling.is_cut)
        end += len(segment)
        given = segment.routed_experts
        if given is not None and (given.first_position, given.end_position) != (row, end - 1):
            raise ContractError(
                f"routed_experts has rows {given.first_position}..{given.end_position - 1}; need {row}..{end - 2}"
            )
        row = max(row, end - 1)
