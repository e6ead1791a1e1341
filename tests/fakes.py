"""Stand-ins for engines, tools and rewards. They honour the contracts, so that what passes here is worth something."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_loop.engine import AnswerError, EngineError, GenerateRequest, ReplicaLostError
from agent_loop.loop import Prompt
from agent_loop.reward import Completion
from async_rl.engines.replica import ReplicaStats
from async_rl.engines.spans import cut_into_segments
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import (
    ContractError,
    Int32Array,
    RoutedExperts,
    RoutingSpec,
    StopReason,
    TokenOutput,
    WeightVersion,
)
from message_queue.trajectory import Trajectory

SPEC = RoutingSpec(layers=(1, 2, 4), num_experts=8, top_k=2)

Script = Callable[[Int32Array], int]
"""Next token, given all tokens so far. Pure, so that an interrupted decode goes on as if nothing had happened."""


def fake_weights(version: int) -> WeightVersion:
    """A version with a digest of its own."""
    return WeightVersion(version, f"digest-{version}")


def fake_logprob(token: int, position: int, version: int) -> float:
    """Logprob of the token sampled at `position` by `version`."""
    return -(1 + zlib.crc32(f"{token}/{position}/{version}".encode()) % 1000) / 1000


def fake_row(token: int, position: int, version: int, spec: RoutingSpec) -> np.ndarray:
    """Row of `token` at `position` under `version`, [moe_layers, top_k]; a test can tell which forward gave it."""
    row = np.empty(spec.row_shape, np.uint8)
    for at, layer in enumerate(spec.layers):
        first = zlib.crc32(f"{token}/{position}/{version}/{layer}".encode()) % spec.num_experts
        row[at] = (first + np.arange(spec.top_k)) % spec.num_experts
    return row


def true_rows(trajectory: Trajectory) -> np.ndarray:
    """Rows that `trajectory` must hold, int16 [T, moe_layers, top_k], from its tokens and who sampled them.

    The slow, obvious statement of the rule: row p belongs to the first decode that sampled a token after p.
    """
    spec = trajectory.routing
    assert spec is not None
    tokens, versions = trajectory.token_ids(), trajectory.param_versions()
    rows = np.full((len(tokens), *spec.row_shape), -1, np.int16)
    for position in range(len(tokens) - 1):
        owners = versions[position + 1 :][versions[position + 1 :] >= 0]
        if len(owners):
            rows[position] = fake_row(int(tokens[position]), position, int(owners[0]), spec)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """After `after` more tokens of a decode, `load` if given; then the decode ends, or with `goes_on` goes on."""

    after: int
    load: int | None = None
    goes_on: bool = False


Fault = Callable[[GenerateRequest, list[TokenOutput]], list[TokenOutput]]
"""What becomes of an answer on its way; tests/faults.py has a collection."""


class SeededScript:
    """A random walk over `vocab_size` ids; `stop_token` comes up with probability about 1 / mean_length."""

    def __init__(self, seed: int, *, vocab_size: int, stop_token: int, mean_length: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._stop_token = stop_token
        self._mean_length = mean_length

    def __call__(self, token_ids: Int32Array) -> int:
        draw = zlib.crc32(token_ids.tobytes(), self._seed)
        if draw % self._mean_length == 0:
            return self._stop_token
        return (draw // self._mean_length) % self._vocab_size


class TurnScript:
    """Writes given turns: turn k after the k-th occurrence of `opening` (the tokens that open an assistant turn)."""

    def __init__(self, turns: Sequence[Sequence[int]], *, opening: Sequence[int]) -> None:
        self._turns = [list(turn) for turn in turns]
        self._opening = list(opening)

    def __call__(self, token_ids: Int32Array) -> int:
        ids, width = token_ids.tolist(), len(self._opening)
        ends = [i + width for i in range(len(ids) - width + 1) if ids[i : i + width] == self._opening]
        return self._turns[len(ends) - 1][len(ids) - ends[-1]]


@dataclass(slots=True, eq=False)
class _Flight:
    """A decode under way. interrupt: it is to end now. moving: it is not frozen. landed: its caller has the result."""

    interrupt: asyncio.Event = field(default_factory=asyncio.Event)
    moving: asyncio.Event = field(default_factory=asyncio.Event)
    landed: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        self.interrupt.set()
        self.moving.set()


class FakeEngine:
    """An Engine with the life cycle of a replica: pause, abort, freeze, load, resume; one event loop, no threads.

    Args:
        script: next token given the tokens so far.
        token_s: seconds per token on the event loop's clock; 0 gives way to other tasks after each token.
        interruptions: consumed one per `generate` call, and one more after each that lets its decode go on; None lets
            that call run through.
        context_length: a decode that reaches it ends with LENGTH.
        fail: called with each request before it decodes; what it returns is raised.
        faults: consumed one per answer, which it spoils; None leaves it good.
        edge: whether answers are checked as a replica does, which makes bad ones AnswerError; else they are passed on.
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
        self.name = name
        self.requests: list[GenerateRequest] = []
        self.loads: list[tuple[int, str]] = []  # (version, kv)
        self.weights = fake_weights(version)
        self.num_tokens = 0
        self._script = script
        self._routing = routing
        self._token_s = token_s
        self._interruptions = iter(interruptions)
        self._context_length = context_length
        self._fail = fail
        self._faults = iter(faults)
        self._edge = edge
        self._dead: ReplicaLostError | None = None
        self._hung = False
        self._open = asyncio.Event()
        self._open.set()
        self._running: dict[str, _Flight] = {}
        self._prefixes: Counter[str] = Counter()  # of the ids that run
        self._idle = asyncio.Event()  # set while nothing runs
        self._idle.set()

    # ---- life cycle

    @property
    def in_flight(self) -> int:
        """Requests that decode now, frozen ones too; those that wait at the pause are not among them."""
        return len(self._running)

    async def pause(self) -> None:
        """New decodes wait; running ones go on."""
        await self._answering()
        self._open.clear()

    async def resume(self) -> None:
        await self._answering()
        self._open.set()
        for flight in self._running.values():
            flight.moving.set()

    async def abort(self) -> int:
        """End every running decode with what it has; returns their number once all have answered."""
        await self._answering()
        flights = list(self._running.values())
        for flight in flights:
            flight.end()
        for flight in flights:
            await flight.landed.wait()
        return len(flights)

    async def drain(self) -> None:
        """Return when nothing runs. Pause first, or new decodes may prolong it."""
        await self._answering()
        await self._idle.wait()
        await self._answering()

    async def freeze(self) -> int:
        """Hold every running decode until `resume`."""
        await self._answering()
        if self._open.is_set():
            raise EngineError(f"{self.name}: freeze while serving; call pause first")
        for flight in self._running.values():
            flight.moving.clear()
        return len(self._running)

    async def load(self, update: WeightUpdate | WeightVersion, *, kv: str = "recompute") -> WeightVersion:
        """Serve other weights from now on.

        Raises:
            EngineError: not paused, or a decode is in flight that is not frozen.
        """
        await self._answering()
        moving = sum(flight.moving.is_set() for flight in self._running.values())
        if self._open.is_set() or moving:
            raise EngineError(f"{self.name}: load with {moving} decodes in flight; pause and abort first")
        self.weights = update.weights if isinstance(update, WeightUpdate) else update
        self.loads.append((self.weights.version, kv))
        return self.weights

    async def stats(self) -> ReplicaStats:
        await self._answering()
        return ReplicaStats(in_flight=self.in_flight, tokens_sampled=self.num_tokens, busy_seconds=0.0)

    def die(self, cause: str = "killed") -> None:
        """Fail every request and every control call, running or new."""
        self._dead = ReplicaLostError(f"replica {self.name} is dead: {cause}")
        self._open.set()
        for flight in self._running.values():
            flight.end()

    def hang(self) -> None:
        """Answer nothing from now on, neither requests nor control calls."""
        self._hung = True

    # ---- decoding

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        self._refuse_bad_ids(request)
        self.requests.append(request)
        await self._answering()
        while not self._open.is_set():  # a pause may follow a resume before this task runs
            await self._open.wait()
        await self._answering()
        if (failure := self._fail(request)) is not None:
            raise failure
        flight = self._running[request.request_id] = _Flight()
        flight.moving.set()
        self._idle.clear()
        self._prefixes.update(prefixes := [request.request_id[:end] for end in range(1, len(request.request_id))])
        try:
            answer = await self._decode(request, flight)
            return self._sent(request, answer)
        finally:
            del self._running[request.request_id]
            self._prefixes.subtract(prefixes)
            flight.landed.set()
            if not self._running:
                self._idle.set()

    async def _decode(self, request: GenerateRequest, flight: _Flight) -> list[TokenOutput]:
        ids = request.token_ids.tolist()
        prompt, samplers = len(ids), list[WeightVersion]()
        interruption, since = next(self._interruptions, None), 0
        reason = StopReason.LENGTH
        while len(samplers) < request.max_new_tokens and len(ids) < self._context_length:
            await self._wait_for_token(flight)
            while interruption is not None and since == interruption.after:
                if interruption.load is not None:
                    self.weights = fake_weights(interruption.load)
                if not interruption.goes_on:
                    flight.interrupt.set()
                    break
                interruption, since = next(self._interruptions, None), 0
            if flight.interrupt.is_set():
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
            held = range(request.rows_held, len(prompt) + len(sampled) - 1)
            stacked = np.zeros((len(held), *self._routing.row_shape), np.uint8)
            for at, position in enumerate(held):
                stacked[at] = self._forward(request, [*prompt, *sampled], position, samplers)
            rows = RoutedExperts(first_position=request.rows_held, experts=stacked)
        logprobs = [
            fake_logprob(token, len(prompt) + i, weights.version)
            for i, (token, weights) in enumerate(zip(sampled, samplers, strict=True))
        ]
        spans = [(weights, len(list(run))) for weights, run in itertools.groupby(samplers)]
        return cut_into_segments(
            request,
            token_ids=np.asarray(sampled, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            routed_experts=rows,
            spans=spans or [(self.weights, 0)],
            stop_reason=reason,
            replica=self.name,
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

    async def _wait_for_token(self, flight: _Flight) -> None:
        if not self._token_s:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._token_s):
                    await flight.interrupt.wait()
        await flight.moving.wait()
        await self._answering()

    async def _answering(self) -> None:
        if self._hung:
            await asyncio.Event().wait()
        if self._dead is not None:
            raise ReplicaLostError(str(self._dead))

    def _refuse_bad_ids(self, request: GenerateRequest) -> None:
        name = request.request_id
        if self._prefixes[name] or any(name[:end] in self._running for end in range(1, len(name) + 1)):
            raise EngineError(f"request id {name!r} is a prefix of one that runs, or begins with one")


def check_at_edge(
    request: GenerateRequest, answer: list[TokenOutput], *, routing: RoutingSpec | None, vocab_size: int = 1 << 20
) -> None:
    """What a replica checks before it returns an answer: every segment, and the extent of its rows.

    Raises:
        ContractError: the first thing that is wrong.
    """
    row, end = request.rows_held, len(request.token_ids)
    for segment in answer:
        segment.check(vocab_size=vocab_size, routing=routing)
        end += len(segment)
        given = segment.routed_experts
        if given is not None and (given.first_position, given.end_position) != (row, end - 1):
            raise ContractError(
                f"routed_experts has rows {given.first_position}..{given.end_position - 1}; need {row}..{end - 2}"
            )
        row = max(row, end - 1)


@dataclass(slots=True)
class FakeTool:
    """A Tool that records its calls. `behave` gives the reply or raises; `seconds` is how long it takes."""

    behave: Callable[[Mapping[str, Any]], str] = lambda _arguments: "ok"
    seconds: float = 0.0
    name: str = "tool"
    description: str = "a tool"
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    cancelled: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        self.calls.append(arguments)
        self.started.set()
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.behave(arguments)


@dataclass(slots=True)
class FakeReward:
    """A Reward that records what it saw."""

    value: float = 1.0
    seconds: float = 0.0
    error: Exception | None = None
    seen: list[Completion] = field(default_factory=list)

    async def score(self, prompt: Prompt, *, completion: Completion) -> float:
        self.seen.append(completion)
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return self.value
