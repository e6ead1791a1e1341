"""The contract of an engine replica, and the request gate that all replicas use.

    serving --pause--> paused --(abort | drain)--> quiet  --load--> quiet  --resume--> serving
                              --freeze-----------> frozen --load--> frozen --resume-->

While a replica is paused, new `generate` calls wait at a gate. Weights are loaded only when no request runs: every
request has ended or is frozen inside the engine. A frozen request continues under the new weights in a new segment, so
that no segment mixes two versions. A dead engine fails every call. After a failed load the gate stays closed until a
load succeeds.
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
KVPolicy = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Counters of one replica since its start."""

    in_flight: int
    """Requests admitted and not finished, now."""
    tokens_sampled: int
    """Tokens returned so far, including partial segments."""
    busy_seconds: float
    """Time with at least one request in flight, in seconds."""


class Replica(Protocol):
    """One engine instance: `agent_loop.engine.Engine` plus the control calls of the publisher."""

    name: str
    """Name of the replica, unique in a run."""

    @property
    def weights(self) -> WeightVersion:
        """The loaded weight version."""
        ...

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """See `agent_loop.engine.Engine.generate`. If the caller is cancelled, the engine aborts the request."""
        ...

    async def pause(self) -> None:
        """Hold new `generate` calls until `resume`; requests in flight continue."""
        ...

    async def abort(self) -> int:
        """End every request in flight with a partial segment; return the number of partial segments.

        Every caller's result is complete when this returns. A request that ends by itself meanwhile is not counted.
        """
        ...

    async def drain(self) -> None:
        """Return when all requests that are in flight now have ended by themselves.

        Raises:
            EngineError: requests in flight are frozen, or the engine is dead.
        """
        ...

    async def freeze(self) -> int:
        """Stop every request in flight inside the engine until `resume`; return their number.

        Raises:
            EngineError: the replica is not paused, or the engine is dead.
        """
        ...

    async def load(self, update: WeightUpdate, *, kv: KVPolicy = "recompute") -> WeightVersion:
        """Load new weights while the replica is paused and every request in flight is frozen.

        Rows and logprobs of earlier tokens stay unchanged.

        Args:
            update: the published version.
            kv: K/V of frozen requests. recompute: the new weights compute it again, with the recorded experts. keep:
                the K/V of the old weights stays, and so does the prefix cache.

        Raises:
            EngineError: the replica is not paused, a request in flight is not frozen, the update is incomplete, the
                digest differs from the published one, or parameters did not change although other values were
                published. After a failed load the replica serves no request until a load succeeds.
        """
        ...

    async def checksum(self) -> str:
        """Checksum of the model's parameters on all ranks, taken at the last load."""
        ...

    async def resume(self) -> None:
        """Open the gate: held `generate` calls and frozen requests continue.

        Raises:
            EngineError: the last load failed, or the engine is dead.
        """
        ...

    async def stats(self) -> ReplicaStats:
        """Counters since the start."""
        ...

    async def close(self) -> None:
        """Stop the engine. Waiting and running `generate` calls end with EngineError. May be called twice."""
        ...


def not_loaded(unchanged: Sequence[str], *, replica: str, version: int) -> EngineError:
    """The error for modules whose parameters a load did not change; see `LiveWeights.replace`.

    Args:
        unchanged: names of the modules.
        replica: name of the replica.
        version: `param_version` of the load.
    """
    return EngineError(
        f"{replica}: version {version} was read with the published digest, but the model's parameters are still those "
        f"of the previous load in {len(unchanged)} modules that were published with other values "
        f"({', '.join(unchanged[:3])}, ...); the engine does not serve the published weights"
    )


@dataclass(slots=True, eq=False)
class Flight:
    """A request that passed the gate and has no result yet."""

    request_id: str
    """Id of the request, unique while in flight."""
    abort_requested: bool = False
    """Whether the request must end with a partial segment."""
    recalled: bool = False
    """Whether the request must leave the engine and wait at the gate, to be sent to the engine again on `resume`."""
    held: bool = False
    """Whether the request waits at the gate after a recall."""
    stop_reason: StopReason | None = None
    """Stop reason of the last segment; None until the request has a result."""
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request has ended, with a result or an error."""
    outside: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the request is not in the engine: held or landed."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gate opened, an abort was requested or the engine failed; a held request then checks again."""


class RequestGate:
    """Admits requests, holds them during a pause, tracks those in flight, and fails all of them if the engine dies.

    Args:
        name: name of the replica, for error messages.
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
        """Wait until the gate is open, then count the request as in flight until the block ends.

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
        """Record the result of a request and return it."""
        flight.stop_reason = segments[-1].stop_reason
        self._tokens_sampled += sum(map(len, segments))
        return segments

    def pause(self) -> None:
        """Close the gate."""
        self.check_alive()
        self._open.clear()

    def require_resumable(self) -> None:
        """Raise EngineError if the engine is dead or the content of its weights is unknown."""
        self.check_alive()
        if self._suspect is not None:
            raise EngineError(f"{self._name}: cannot resume, {self._suspect}; load a good version first")

    def resume(self) -> None:
        """Open the gate and wake held requests."""
        self.require_resumable()
        self._frozen = False
        self._open.set()
        for flight in self._flights.values():
            flight.moved.set()

    def request_abort(self) -> list[Flight]:
        """Mark all requests in flight for abort and return them."""
        self.check_alive()
        for flight in self._flights.values():
            flight.abort_requested = True
            flight.moved.set()
        return list(self._flights.values())

    def freeze(self) -> int:
        """Record that the engine is frozen until `resume`; return the number of requests in flight."""
        self.require_paused("freeze")
        self._frozen = True
        return len(self._flights)

    def recall(self) -> list[Flight]:
        """Mark all requests inside the engine as recalled and return them; held requests stay held."""
        self.check_alive()
        flights = [flight for flight in self._flights.values() if not flight.held]
        for flight in flights:
            flight.recalled = True
        return flights

    async def hold(self, flight: Flight) -> None:
        """Hold a recalled request at the gate until `resume`, or until an abort is requested.

        Raises:
            ReplicaLostError: the engine failed.
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
        """All requests in flight."""
        return list(self._flights.values())

    async def wait_landed(self, flights: Iterable[Flight]) -> None:
        """Return when each of `flights` has ended, with a result or an error."""
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
        """Raise EngineError unless the gate is closed and every request in flight is frozen."""
        self.require_paused(action)
        if self._flights and not self._frozen:
            raise EngineError(
                f"{self._name}: {action} with {len(self._flights)} requests in flight "
                f"({', '.join(list(self._flights)[:3])}, ...); call abort, drain or freeze first"
            )

    def require_moving(self, action: str) -> None:
        """Raise EngineError if frozen requests are in flight, because they cannot end by themselves."""
        self.check_alive()
        if self._frozen and self._flights:
            raise EngineError(
                f"{self._name}: {action} with {len(self._flights)} frozen requests; call resume or abort first"
            )

    def suspect(self, reason: str | None) -> None:
        """Set the reason why the content of the engine's weights is unknown; None if they are good."""
        self._suspect = reason

    def fail(self, reason: str) -> None:
        """Record that the engine failed: waiting and later calls raise ReplicaLostError with the first reason."""
        if not self._failed.done():
            self._failed.set_exception(ReplicaLostError(f"{self._name}: {reason}"))
            self._failed.exception()  # retrieved here, or asyncio logs an unretrieved exception
        self._open.set()
        for flight in self._flights.values():
            flight.moved.set()

    def check_alive(self) -> None:
        """Raise ReplicaLostError if the engine failed."""
        if self._failed.done():
            raise ReplicaLostError(str(self._failed.exception()))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises ReplicaLostError if the engine fails first."""
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
