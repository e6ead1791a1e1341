"""Stand-ins for engines, tools and rewards. They honour the contracts, so that what passes here is worth something."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_loop.engine import EngineError, GenerateRequest
from agent_loop.loop import Prompt
from agent_loop.reward import Completion
from message_queue.tokens import Int32Array, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
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
    """What ends one decode early: after `after` tokens of it, load `load` if given, and abort."""

    after: int
    load: int | None = None


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
    """A decode under way. interrupt: it is to end now. landed: its caller has the result."""

    interrupt: asyncio.Event = field(default_factory=asyncio.Event)
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """An Engine with the life cycle of a replica: pause, abort, resume, load; one event loop, no threads.

    Args:
        script: next token given the tokens so far.
        token_s: seconds per token on the event loop's clock; 0 gives way to other tasks after each token.
        interruptions: consumed one per `generate` call; None lets that call run through.
        context_length: a decode that reaches it ends with LENGTH.
        fail: called with each request before it decodes; what it returns is raised.
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
        name: str = "fake-0",
        version: int = 0,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.weights = fake_weights(version)
        self.num_tokens = 0
        self._script = script
        self._routing = routing
        self._token_s = token_s
        self._interruptions = iter(interruptions)
        self._context_length = context_length
        self._fail = fail
        self._name = name
        self._dead: EngineError | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._running: dict[str, _Flight] = {}
        self._idle = asyncio.Event()  # set while nothing runs
        self._idle.set()

    # ---- life cycle

    @property
    def in_flight(self) -> int:
        """Requests that decode now; those that wait at the pause are not among them."""
        return len(self._running)

    async def pause(self) -> None:
        """New decodes wait; running ones go on."""
        self._open.clear()

    async def resume(self) -> None:
        self._open.set()

    async def abort(self) -> int:
        """End every running decode with what it has; returns their number once all have answered."""
        flights = list(self._running.values())
        for flight in flights:
            flight.interrupt.set()
        for flight in flights:
            await flight.landed.wait()
        return len(flights)

    async def drain(self) -> None:
        """Return when nothing runs. Pause first, or new decodes may prolong it."""
        await self._idle.wait()

    async def load(self, weights: WeightVersion) -> WeightVersion:
        """Serve `weights` from now on.

        Raises:
            EngineError: not paused, or a decode is in flight.
        """
        if self._open.is_set() or self._running:
            raise EngineError(f"{self._name}: load with {len(self._running)} decodes in flight; pause and abort first")
        self.weights = weights
        return weights

    def die(self, cause: str = "killed") -> None:
        """Fail every request, running or new."""
        self._dead = EngineError(f"replica {self._name} is dead: {cause}")
        self._open.set()
        for flight in self._running.values():
            flight.interrupt.set()

    # ---- decoding

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        self._refuse_bad_ids(request)
        self.requests.append(request)
        while not self._open.is_set():  # a pause may follow a resume before this task runs
            await self._open.wait()
        if (failure := self._dead or self._fail(request)) is not None:
            raise failure
        flight = self._running[request.request_id] = _Flight()
        self._idle.clear()
        try:
            return await self._decode(request, flight, next(self._interruptions, None))
        finally:
            del self._running[request.request_id]
            flight.landed.set()
            if not self._running:
                self._idle.set()

    async def _decode(
        self, request: GenerateRequest, flight: _Flight, interruption: Interruption | None
    ) -> TokenOutput:
        weights = self.weights
        ids = request.token_ids.tolist()
        prompt = len(ids)
        reason = StopReason.LENGTH
        while len(ids) - prompt < request.max_new_tokens and len(ids) < self._context_length:
            await self._wait_for_token(flight)
            if self._dead is not None:
                raise self._dead
            interrupted = interruption is not None and len(ids) - prompt == interruption.after
            if interrupted or flight.interrupt.is_set():
                reason = StopReason.ABORT
                if interruption is not None and interrupted and interruption.load is not None:
                    self.weights = fake_weights(interruption.load)
                break
            ids.append(self._script(np.asarray(ids, np.int32)))
            if ids[-1] in request.stop_token_ids:
                reason = StopReason.STOP
                break
        self.num_tokens += len(ids) - prompt
        return self._output(request, ids, weights, reason)

    def _output(
        self, request: GenerateRequest, ids: list[int], weights: WeightVersion, reason: StopReason
    ) -> TokenOutput:
        sampled = ids[len(request.token_ids) :]
        rows = None
        if self._routing is not None and sampled:
            held = range(request.rows_held, len(ids) - 1)
            experts = [fake_row(ids[p], p, weights.version, self._routing) for p in held]
            stacked = np.zeros((len(experts), *self._routing.row_shape), np.uint8)
            if experts:
                stacked[:] = experts
            rows = RoutedExperts(first_position=request.rows_held, experts=stacked)
        start = len(request.token_ids)
        logprobs = [fake_logprob(token, start + i, weights.version) for i, token in enumerate(sampled)]
        return TokenOutput(
            token_ids=np.asarray(sampled, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            routed_experts=rows,
            weights=weights,
            stop_reason=reason,
            replica=self._name,
        )

    async def _wait_for_token(self, flight: _Flight) -> None:
        if not self._token_s:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._token_s):
                await flight.interrupt.wait()

    def _refuse_bad_ids(self, request: GenerateRequest) -> None:
        for other in self._running:
            if other.startswith(request.request_id) or request.request_id.startswith(other):
                raise EngineError(f"request id {request.request_id!r} and {other!r}: one is a prefix of the other")


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
