"""The gate of one replica: it admits requests, holds them during a pause, and fails them if the engine dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from message_queue.errors import EngineError, ReplicaLostError
from message_queue.tokens import StopReason, TokenOutput

T = TypeVar("T")
KVPolicy = Literal["keep", "recompute"]
"""K/V of frozen requests at a load; see `async_rl.inference.replica.EngineReplica.load`."""
NODE_NOTICE_S = 2.0  # from the death of an engine to the report of another node that may be the cause


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of decodes that ended by themselves; the engine does not count those of aborted ones."""

    proposed: int = 0
    """Drafts that the model verified."""
    accepted: int = 0
    """Drafts that became tokens."""

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.proposed + other.proposed, self.accepted + other.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """Counters of one replica since its start."""

    in_flight: int
    """Requests admitted and not finished, now."""
    busy_seconds: float
    """Time with at least one request in flight, in seconds."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Draft tokens so far."""


@dataclass(slots=True, eq=False)
class InflightRequest:
    """A request that passed the gate and has no result yet."""

    request_id: str
    """Id of the request, unique while in flight."""
    abort_requested: bool = False
    """Whether the request must end with a partial segment."""
    evicted: bool = False
    """Whether the request must leave the engine and park; `resume` sends it back to the engine."""
    parked: bool = False
    """Whether the request waits outside the engine after an eviction."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Draft tokens of its decodes so far."""
    result: list[TokenOutput] | None = None
    """Segments of the request; None until it has a result."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request has ended, with a result or an error."""
    outside: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the request is not in the engine: parked or finished."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the gate is open, and when an abort is requested: a parked request then leaves."""

    @property
    def aborted(self) -> bool:
        """Whether the request ended with a partial segment."""
        return bool(self.result) and self.result[-1].stop_reason is StopReason.ABORT

    async def park(self) -> None:
        """Wait outside the engine until the gate opens or an abort is requested."""
        self.evicted, self.parked = False, True
        self.outside.set()
        try:
            while not (self.released.is_set() or self.abort_requested):  # a pause may follow a resume at once
                await self.released.wait()
        finally:
            self.parked = False
            self.outside.clear()


class RequestGate:
    """Admits requests, holds them during a pause, tracks those in flight, and fails them all if the engine dies.

    Args:
        name: name of the replica, for error messages.
    """

    def __init__(self, name: str) -> None:
        self.weights_unverified: str | None = None
        """Reason why the content of the engine's weights is unknown; None if they are verified."""
        self._name = name
        self._open = asyncio.Event()
        self._open.set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fails_soon = False
        self._frozen = False
        self._requests: dict[str, InflightRequest] = {}
        self._busy_seconds = 0.0
        self._drafts = DraftCounts()
        self._busy_since = 0.0

    @property
    def in_flight(self) -> list[InflightRequest]:
        """All requests in flight."""
        return list(self._requests.values())

    @asynccontextmanager
    async def admit(self, request_id: str) -> AsyncGenerator[InflightRequest, None]:
        """Wait until the gate is open, then count the request as in flight until the block ends.

        Raises:
            EngineError: the engine failed, or the id is already in flight.
        """
        while not self._open.is_set():  # a pause may follow a resume before this task runs
            await self._open.wait()
        self.check_alive()
        if request_id in self._requests:
            raise EngineError(
                f"{self._name}: request {request_id} is already in flight; ids are unique while in flight"
            )
        if not self._requests:
            self._busy_since = time.monotonic()
        request = self._requests[request_id] = InflightRequest(request_id)
        request.released.set()
        try:
            yield request
        finally:
            del self._requests[request_id]
            self._drafts += request.drafts
            request.finished.set()
            request.outside.set()
            if not self._requests:
                self._busy_seconds += time.monotonic() - self._busy_since

    def pause(self) -> None:
        """Close the gate."""
        self.check_alive()
        self._open.clear()
        for request in self._requests.values():
            request.released.clear()

    def require_resumable(self) -> None:
        """Raise EngineError if the engine is dead or the content of its weights is unknown."""
        self.check_alive()
        if self.weights_unverified is not None:
            raise EngineError(f"{self._name}: cannot resume, {self.weights_unverified}; load a good version first")

    def resume(self) -> None:
        """Open the gate and release parked requests."""
        self.require_resumable()
        self._frozen = False
        self._open.set()
        for request in self._requests.values():
            request.released.set()

    def request_abort(self) -> list[InflightRequest]:
        """Mark all requests in flight for abort and return them."""
        self.check_alive()
        for request in self._requests.values():
            request.abort_requested = True
            request.released.set()
        return self.in_flight

    def freeze(self) -> int:
        """Record that the engine is frozen until `resume`; return the number of requests in flight."""
        self.require_paused("freeze")
        self._frozen = True
        return len(self._requests)

    async def drain(self) -> None:
        """Return when all requests that are in flight now have ended by themselves.

        Raises:
            EngineError: requests in flight are frozen, or the engine is dead.
        """
        self.check_alive()
        if self._frozen and self._requests:
            raise EngineError(
                f"{self._name}: drain with {len(self._requests)} frozen requests; call resume or abort first"
            )
        await self.unless_failed(until_finished(self.in_flight))

    def require_paused(self, action: str) -> None:
        """Raise EngineError unless the gate is closed."""
        self.check_alive()
        if self._open.is_set():
            raise EngineError(f"{self._name}: {action} while serving; call pause and abort (or drain, freeze) first")

    def require_quiet(self, action: str) -> None:
        """Raise EngineError unless the gate is closed and every request in flight is frozen."""
        self.require_paused(action)
        if self._requests and not self._frozen:
            raise EngineError(
                f"{self._name}: {action} with {len(self._requests)} requests in flight "
                f"({', '.join(list(self._requests)[:3])}, ...); call abort, drain or freeze first"
            )

    def fail(self, reason: str) -> None:
        """Record that the engine failed: waiting and later calls raise ReplicaLostError with the first reason."""
        if not self._failed.done():
            self._failed.set_exception(ReplicaLostError(f"{self._name}: {reason}"))
            self._failed.exception()  # retrieved here, or asyncio logs an unretrieved exception
        self._open.set()

    def fail_later(self, reason: str) -> None:
        """As `fail`, unless another reason comes within NODE_NOTICE_S."""
        self._fails_soon = True
        asyncio.get_running_loop().call_later(NODE_NOTICE_S, self.fail, reason)

    async def until_failed(self, error: EngineError) -> None:
        """If `error`, or `fail_later`, says that the engine died, return when it has failed, or after NODE_NOTICE_S."""
        if self._fails_soon or isinstance(error, ReplicaLostError):
            await asyncio.wait({self._failed}, timeout=NODE_NOTICE_S)

    def check_alive(self) -> None:
        """Raise ReplicaLostError if the engine failed."""
        if self._failed.done():
            raise ReplicaLostError(str(self._failed.exception()))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; raises ReplicaLostError if the engine fails first.

        If `work` is cancelled, its cleanup has ended when this returns.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check_alive()
            return await task
        finally:
            if task.cancel():
                await asyncio.wait({task})

    def stats(self) -> ReplicaStats:
        """Counters since the start."""
        running = time.monotonic() - self._busy_since if self._requests else 0.0
        busy_seconds = self._busy_seconds + running
        return ReplicaStats(in_flight=len(self._requests), busy_seconds=busy_seconds, drafts=self._drafts)


async def until_finished(requests: Iterable[InflightRequest]) -> None:
    """Return when each of `requests` has ended, with a result or an error."""
    for request in requests:
        await request.finished.wait()
