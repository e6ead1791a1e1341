"""A replica whose engine is simulated: real gate, real life cycle, tokens that come at a constant rate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from agent_loop.engine import AnswerError, EngineError, GenerateRequest
from async_rl.engines.checks import kept_tokens
from async_rl.engines.replica import Flight, KeptKV, ReplicaStats, RequestGate
from async_rl.engines.spans import cut_into_segments
from async_rl.simulate import model
from async_rl.simulate.bad_answers import BAD_ANSWERS
from async_rl.simulate.scenario import UNAVAILABLE, Fault
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import ContractError, RoutedExperts, StopReason, TokenOutput, WeightVersion

if TYPE_CHECKING:
    from async_rl.simulate.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer as it left the engine, before it was spoiled.

    start: position of its first token. tokens: of the segments that are good. unavailable: positions without rows.
    """

    request: str
    session: str
    start: int
    segments: tuple[TokenOutput, ...]
    unavailable: range = range(0)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.segments))


@dataclass(slots=True, eq=False)
class _Decode:
    """A decode under way. nudge: look up, something changed. stuck: it never ends."""

    nudge: asyncio.Event = field(default_factory=asyncio.Event)
    stuck: bool = False


class SimulatedReplica:
    """See `async_rl.engines.replica.Replica`.

    Args:
        token_s: virtual seconds per token of one request, whatever else runs.
        edge: whether answers are checked here, or only where they are used.
    """

    def __init__(self, name: str, *, world: World, weights: WeightVersion, token_s: float, edge: bool) -> None:
        self.name = name
        self._world = world
        self._weights = weights
        self._token_s = token_s
        self._edge = edge
        self._gate = RequestGate(name)
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._decodes: dict[str, _Decode] = {}

    @property
    def weights(self) -> WeightVersion:
        return self._weights

    # ---- control

    async def pause(self) -> None:
        self._gate.pause()

    async def abort(self) -> int:
        flights = self._gate.request_abort()
        self._thawed.set()
        self._nudge_all()
        await self._gate.wait_landed(flights)
        return len(flights)

    async def drain(self) -> None:
        self._gate.require_moving("drain")
        await self._gate.wait_landed(self._gate.in_flight())

    async def freeze(self) -> int:
        frozen = self._gate.freeze()
        self._thawed.clear()
        self._nudge_all()
        return frozen

    async def load(self, update: WeightUpdate, *, kv: KeptKV = "recompute") -> WeightVersion:
        self._gate.require_quiet("load")
        self._gate.suspect(f"version {update.weights.version} was not loaded whole")
        fault, takes_s = self._world.fault(f"load/{self.name}"), self._world.scenario.load_s
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind == "late weights":
            takes_s += fault.amount
        await asyncio.sleep(takes_s)
        match kind:
            case "weights never loaded":
                await asyncio.Event().wait()
            case "weights that did not arrive":
                return self._weights
            case "weights refused":
                raise EngineError(f"{self.name}: the update is incomplete")
            case "weights of another version":
                return WeightVersion(update.weights.version, "0bad")
            case "engine dies":
                self._fail("its engine died in a load")
            case "process dies":
                self._world.kill(self.name)
            case _:
                pass
        self._gate.require_quiet("load")
        self._weights = update.weights
        self._gate.suspect(None)
        self._world.loaded_by(self.name, update.weights)
        return self._weights

    async def checksum(self) -> str:
        return self._weights.digest

    async def resume(self) -> None:
        self._gate.resume()
        self._thawed.set()

    async def stats(self) -> ReplicaStats:
        self._gate.check_alive()
        return self._gate.stats()

    async def close(self) -> None:
        self._fail("closed")

    # ---- decoding

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        async with self._gate.admit(request.request_id) as flight:
            decode = self._decodes[request.request_id] = _Decode()
            try:
                return self._gate.landed(flight, await self._decode(request, flight, decode))
            finally:
                del self._decodes[request.request_id]

    async def _decode(self, request: GenerateRequest, flight: Flight, decode: _Decode) -> list[TokenOutput]:
        self._world.forced(request)
        fault, most = self._world.fault(f"generate/{self.name}"), request.max_new_tokens
        kind = fault.kind if fault is not None else ""
        match kind:
            case "late answer":
                assert fault is not None
                await self._wait(decode, fault.amount)
            case "no answer":
                decode.stuck = True
            case "engine dies":
                self._fail("its engine died in a decode")
            case "gives up" | "aborts by itself":
                assert fault is not None
                most = min(most, int(fault.amount))
            case _:
                pass
        context = model.contexts(request.token_ids.tolist())
        samplers = list[WeightVersion]()
        tokens = list[int]()
        reason = await self._sample(request, flight, decode, most, context, tokens, samplers)
        if reason is StopReason.LENGTH and most < request.max_new_tokens:
            reason = StopReason.ERROR if kind == "gives up" else StopReason.ABORT
        return self._answer(request, context, tokens, samplers, reason)

    async def _sample(
        self,
        request: GenerateRequest,
        flight: Flight,
        decode: _Decode,
        most: int,
        context: list[int],
        tokens: list[int],
        samplers: list[WeightVersion],
    ) -> StopReason:
        """Append tokens until the decode ends; returns why it does. New weights may come in between."""
        loop, calls = asyncio.get_running_loop(), self._world.scenario.max_turns > 1
        session = model.session_number(request.session)
        while len(tokens) < most:
            await self._thawed.wait()
            self._gate.check_alive()
            if flight.abort_requested and not decode.stuck:
                return StopReason.ABORT
            begun, weights, planned = loop.time(), self._world.weights(self._weights.digest), list[int]()
            ahead = context[-1]
            while len(tokens) + len(planned) < most and (not planned or planned[-1] != model.END):
                planned.append(weights.token(ahead, session, calls=calls))
                ahead = model.after(ahead, planned[-1])
            by, whole = self._weights, await self._wait(decode, None if decode.stuck else len(planned) * self._token_s)
            self._gate.check_alive()
            count = len(planned) if whole else min(len(planned), int((loop.time() - begun) / self._token_s))
            for token in planned[: 0 if decode.stuck else count]:
                tokens.append(token)
                samplers.append(by)
                context.append(model.after(context[-1], token))
            if tokens and tokens[-1] in request.stop_token_ids:
                return StopReason.STOP
        return StopReason.LENGTH

    def _answer(
        self,
        request: GenerateRequest,
        context: list[int],
        tokens: list[int],
        samplers: list[WeightVersion],
        reason: StopReason,
    ) -> list[TokenOutput]:
        start, rows = len(request.token_ids), None
        spans = [(by, samplers.count(by)) for by in dict.fromkeys(samplers)] or [(self._weights, 0)]
        if tokens:
            owners = [samplers[max(0, p + 1 - start)] for p in range(request.rows_held, len(context) - 1)]
            held = context[request.rows_held : -1]
            experts = [self._world.weights(o.digest).row(c) for o, c in zip(owners, held, strict=True)]
            shape = (len(experts), *model.ROUTING.row_shape)
            rows = RoutedExperts(
                first_position=request.rows_held, experts=np.array(experts, model.ROUTING.dtype).reshape(shape)
            )
        logprobs = [
            self._world.weights(by.digest).logprob(context[start + i - 1], token)
            for i, (token, by) in enumerate(zip(tokens, samplers, strict=True))
        ]
        support = None
        if request.sampling.is_cut:
            kept = [
                self._world.weights(by.digest).kept(context[start + i - 1], token)
                for i, (token, by) in enumerate(zip(tokens, samplers, strict=True))
            ]
            support = kept_tokens(kept, "kept tokens")
        segments = cut_into_segments(
            request,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            routed_experts=rows,
            spans=spans,
            stop_reason=reason,
            replica=self.name,
            support=support,
        )
        return self._sent(request, segments)

    def _sent(self, request: GenerateRequest, segments: list[TokenOutput]) -> list[TokenOutput]:
        """The answer as it arrives: spoiled if that is its turn, and checked if there is an edge."""
        fault, start = self._world.fault(f"answer/{self.name}"), len(request.token_ids)
        answer = Answered(
            request=request.request_id, session=request.session, start=start, segments=tuple(filter(len, segments))
        )
        if fault is None or not len(segments[-1]) or self._is_no_fault(fault):
            self._world.answered(answer)
            return segments
        if fault.kind == UNAVAILABLE:
            segments, missing = _without_rows(segments, int(fault.amount))
            self._world.answered(replace(answer, unavailable=missing))
            return segments
        try:
            spoiled = BAD_ANSWERS[fault.kind](request, segments)
            if self._edge:
                _check_at_edge(request, spoiled)
        except ContractError as error:
            raise AnswerError(f"{self.name}: request {request.request_id}: {error}") from error
        self._world.answered(replace(answer, segments=tuple(segments[:-1])))
        return spoiled

    # ---- inside

    def _is_no_fault(self, fault: Fault) -> bool:
        """Rows that are asked for again may start late: those held stand."""
        late = fault.kind in (UNAVAILABLE, "rows that start late")
        return late and self._world.scenario.resume_routing in ("replace", "split")

    async def _wait(self, decode: _Decode, seconds: float | None) -> bool:
        """Wait, or less where something changes; whether it was the whole time."""
        decode.nudge.clear()
        try:
            async with asyncio.timeout(seconds):
                await decode.nudge.wait()
        except TimeoutError:
            return True
        return False

    def _fail(self, reason: str) -> None:
        self._gate.fail(reason)
        self._thawed.set()
        self._nudge_all()

    def _nudge_all(self) -> None:
        for decode in self._decodes.values():
            decode.nudge.set()


def _without_rows(segments: list[TokenOutput], count: int) -> tuple[list[TokenOutput], range]:
    """The answer without up to `count` of its first rows, and their positions."""
    first, *rest = segments
    rows = first.routed_experts
    assert rows is not None
    count = min(count, len(rows.experts))
    start = rows.first_position + count
    less = RoutedExperts(first_position=start, experts=rows.experts[count:], unavailable=count)
    return [replace(first, routed_experts=less), *rest], range(rows.first_position, start)


def _check_at_edge(request: GenerateRequest, answer: list[TokenOutput]) -> None:
    """What a replica checks: every segment, and the extent of its rows."""
    row, end = request.rows_held, len(request.token_ids)
    for segment in answer:
        segment.check(vocab_size=model.VOCAB, routing=model.ROUTING, cut=request.sampling.is_cut)
        end += len(segment)
        given = segment.routed_experts
        if given is not None and (given.first_position, given.end_position) != (row, end - 1):
            raise ContractError(f"rows {given.first_position}..{given.end_position - 1}; need {row}..{end - 2}")
        row = max(row, end - 1)
