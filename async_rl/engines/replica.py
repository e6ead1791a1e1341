"""The life cycle that every engine replica has, whatever engine is behind it.

    serving --pause--> paused --(abort | drain)--> quiet  --load--> quiet  --resume--> serving
                              --freeze-----------> frozen --load--> frozen --resume-->

While paused, new `generate` calls wait at a gate. Weights are only loaded when nothing runs: all ended, or held inside
the engine. What is held goes on under the new weights as a further segment, so none mixes two versions. A dead engine
fails every call; weights of unknown content keep the gate shut until a load mends them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from agent_loop.engine import EngineError, GenerateRequest, ReplicaLostError
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import StopReason, TokenOutput, WeightVersion

T = TypeVar("T")
KeptKV = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """in_flight: requests in the engine now. tokens_sampled: since the start, partial segments included.

    busy_seconds: time since the start with at least one request in flight.
    """

    in_flight: int
    tokens_sampled: int
    busy_seconds: float


class Replica(Protocol):
    """One engine instance: `agent_loop.engine.Engine` plus the control calls of the publisher."""

    name: str

    @property
    def weights(self) -> WeightVersion:
        """What the engine has loaded and stamps on every segment."""
        ...

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """See `agent_loop.engine.Engine.generate`. Cancelling the caller aborts the request in the engine."""
        ...

    async def pause(self) -> None:
        """Hold new `generate` calls until `resume`; what is in flight goes on."""
        ...

    async def abort(self) -> int:
        """End every request in flight as a partial segment; return how many, once each caller's result stands."""
        ...

    async def drain(self) -> None:
        """Return when every request that is in flight now has ended by itself."""
        ...

    async def freeze(self) -> int:
        """Hold every request in flight inside the engine, unfinished, until `resume`; return how many.

        Raises:
            EngineError: not paused, or the engine is dead.
        """
        ...

    async def load(self, update: WeightUpdate, *, kv: KeptKV = "recompute") -> WeightVersion:
        """Take new weights; needs a pause, and nothing in flight that is not frozen.

        kv: of frozen requests. recompute: their K/V is computed again by the new weights, under the experts that were
            recorded; keep: it stays as the old weights left it, and so does the prefix cache. Rows and logprobs of
            what was sampled before stay as they are in both.

        Raises:
            EngineError: not paused, something in flight, an incomplete update, a digest that is not the published
                one, or parameters that did not change though they were published with other values. After a failed
                load the replica serves nothing until a load succeeds.
        """
        ...

    async def checksum(self) -> str:
        """Checksum of the parameters that the engine's model holds, on all its ranks, since the last load."""
        ...

    async def resume(self) -> None:
        """Let held `generate` calls pass.

        Raises:
            EngineError: the last load failed, or the engine is dead.
        """
        ...

    async def stats(self) -> ReplicaStats:
        """Counters since the start."""
        ...

    async def close(self) -> None:
        """Stop the engine. Held and running `generate` calls end with EngineError. May be called twice."""
        ...


def not_loaded(unchanged: Sequence[str], *, replica: str, version: int) -> EngineError:
    """The error of an engine that read a version, but still holds other parameters; see `LiveWeights.replace`."""
    return EngineError(
        f"{replica}: version {version} was read with the published digest, but the model's parameters are still those "
        f"of the load before in {len(unchanged)} modules that were published with other values "
        f"({', '.join(unchanged[:3])}, ...); the engine does not serve what was published"
    )


@dataclass(slots=True, eq=False)
class Flight:
    """A request between the gate and its result.

    recalled: it is to leave the engine and to be held at the gate, where it waits to go on in the engine.
    """

    request_id: str
    abort_requested: bool = False
    recalled: bool = False
    held: bool = False
    stop_reason: StopReason | None = None
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    outside: asyncio.Event = field(default_factory=asyncio.Event)  # held or landed
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # the gate opened, or an abort was requested


class RequestGate:
    """Admits requests, holds them while paused, knows what is in flight, and fails everyone when the engine dies.

    Args:
        name: of the replica, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._open = asyncio.Event()
        self._open.set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._suspect: str | None = None
        self._frozen = False
        self._flights: dict[str, Flight] = {}
        self._tokens_sampled = 0
        self._busy_seconds = 0.0
        self._busy_since = 0.0

    @asynccontextmanager
    async def admit(self, request_id: str) -> AsyncGenerator[Flight, None]:
        """Wait for the gate, then count the request as in flight until the block ends.

        Raises:
            EngineError: the engine failed, or the id is already in flight.
        """
        while not self._open.is_set():  # a pause may follow a resume before this task runs again
            await self._open.wait()
        self.check_alive()
        if request_id in self._flights:
            raise EngineError(
                f"{self._name}: request {request_id} is already in flight; ids are unique while in flight"
            )
        if not self._flights:
            self._busy_since = time.monotonic()
        flight = self._flights[request_id] = Flight(request_id)
        try:
            yield flight
        finally:
            del self._flights[request_id]
            flight.landed.set()
            flight.outside.set()
            if not self._flights:
                self._busy_seconds += time.monotonic() - self._busy_since

    def landed(self, flight: Flight, segments: list[TokenOutput]) -> list[TokenOutput]:
        """Note the result of a flight."""
        flight.stop_reason = segments[-1].stop_reason
        self._tokens_sampled += sum(map(len, segments))
        return segments

    def pause(self) -> None:
        """Hold requests from now on."""
        self.check_alive()
        self._open.clear()

    def require_resumable(self) -> None:
        """Raise EngineError while the engine is dead or its weights are of unknown content."""
        self.check_alive()
        if self._suspect is not None:
            raise EngineError(f"{self._name}: cannot resume, {self._suspect}; load a good version first")

    def resume(self) -> None:
        """Let requests pass, held ones too."""
        self.require_resumable()
        self._frozen = False
        self._open.set()
        for flight in self._flights.values():
            flight.moved.set()

    def request_abort(self) -> list[Flight]:
        """Mark everything in flight for abort and return it."""
        self.check_alive()
        for flight in self._flights.values():
            flight.abort_requested = True
            flight.moved.set()
        return list(self._flights.values())

    def freeze(self) -> int:
        """Note that the engine holds still until `resume`; return how many are in flight."""
        self.require_paused("freeze")
        self._frozen = True
        return len(self._flights)

    def recall(self) -> list[Flight]:
        """Mark everything that is in the engine to leave it and return it; what is held already stays held."""
        self.check_alive()
        flights = [flight for flight in self._flights.values() if not flight.held]
        for flight in flights:
            flight.recalled = True
        return flights

    async def hold(self, flight: Flight) -> None:
        """Keep a recalled flight out of the engine until `resume`; returns at once when it is to be aborted.

        Raises:
            ReplicaLostError: the engine failed meanwhile.
        """
        flight.recalled, flight.held = False, True
        flight.outside.set()
        try:
            while not self._open.is_set() and not flight.abort_requested:
                flight.moved.clear()
                await flight.moved.wait()
        finally:
            flight.held = False
            flight.outside.clear()
        self.check_alive()

    def in_flight(self) -> list[Flight]:
        """Everything in flight."""
        return list(self._flights.values())

    async def wait_landed(self, flights: Iterable[Flight]) -> None:
        """Return when each of `flights` has ended, in whatever way."""
        for flight in flights:
            await flight.landed.wait()

    async def wait_outside(self, flights: Iterable[Flight]) -> None:
        """Return when each of `flights` is held at the gate or has ended."""
        for flight in flights:
            await flight.outside.wait()

    def require_paused(self, action: str) -> None:
        """Raise EngineError unless the gate is closed."""
        self.check_alive()
        if self._open.is_set():
            raise EngineError(f"{self._name}: {action} while serving; call pause and abort (or drain, freeze) first")

    def require_quiet(self, action: str) -> None:
        """Raise EngineError unless the gate is closed and nothing is in flight that is not frozen."""
        self.require_paused(action)
        if self._flights and not self._frozen:
            raise EngineError(
                f"{self._name}: {action} with {len(self._flights)} requests in flight "
                f"({', '.join(list(self._flights)[:3])}, ...); call abort, drain or freeze first"
            )

    def require_moving(self, action: str) -> None:
        """Raise EngineError when what is in flight is frozen, so that it cannot end by itself."""
        self.check_alive()
        if self._frozen and self._flights:
            raise EngineError(
                f"{self._name}: {action} with {len(self._flights)} frozen requests; call resume or abort first"
            )

    def suspect(self, reason: str | None) -> None:
        """Say that the engine's weights are of unknown content, or (None) that they are good again."""
        self._suspect = reason

    def fail(self, reason: str) -> None:
        """Fail everyone who waits now or asks later; the first reason stands."""
        if not self._failed.done():
            self._failed.set_exception(ReplicaLostError(f"{self._name}: {reason}"))
            self._failed.exception()  # nobody may be waiting; without this the loop logs it as never retrieved
        self._open.set()
        for flight in self._flights.values():
            flight.moved.set()

    def check_alive(self) -> None:
        """Raise the reason given to `fail`."""
        if self._failed.done():
            raise ReplicaLostError(str(self._failed.exception()))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`, or the reason given to `fail` when that comes first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check_alive()
            return await task
        finally:
            task.cancel()

    def stats(self) -> ReplicaStats:
        """Counters since the start."""
        running = time.monotonic() - self._busy_since if self._flights else 0.0
        return ReplicaStats(
            in_flight=len(self._flights),
            tokens_sampled=self._tokens_sampled,
            busy_seconds=self._busy_seconds + running,
        )
