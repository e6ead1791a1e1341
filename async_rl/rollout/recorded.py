"""Rollouts that are written down as they grow, so that a restart goes on in the middle of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from async_rl.rollout.bell import Bell
from message_queue.progress import CallBegun, RolloutRecord, RolloutStep, Sampled, TrajectoryClosed
from message_queue.tokens import Int32Array, StopReason, TokenOutput
from message_queue.trajectory import Trajectory


class RolloutLogError(RuntimeError):
    """Rollouts cannot be written down any more, which is no fault of theirs; the cause is chained."""


class RolloutLog(Protocol):
    """Where rollouts are written down."""

    def append(self, record: RolloutRecord) -> None:
        """Write it down soon, after all before it."""
        ...

    async def flush(self) -> None:
        """Return once all that was appended before is written down.

        Raises:
            RolloutLogError: writing failed; nothing is written any more.
        """
        ...


class NoRolloutLog:
    """Writes nothing down."""

    def append(self, record: RolloutRecord) -> None:
        return

    async def flush(self) -> None:
        return


class StoresRecords(Protocol):
    async def append(self, records: Sequence[RolloutRecord]) -> None: ...


class StoredRolloutLog:
    """Stores records in order; those that come while a call is under way travel together in the next."""

    def __init__(self, store: StoresRecords) -> None:
        self._store = store
        self._waiting: list[RolloutRecord] = []
        self._num_appended = self._num_written = 0
        self._progress = Bell()
        self._sending: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def append(self, record: RolloutRecord) -> None:
        """See RolloutLog."""
        if self._failure is not None:
            return
        self._num_appended += 1
        self._waiting.append(record)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="rollout-log")

    async def flush(self) -> None:
        """See RolloutLog."""
        wanted = self._num_appended
        while self._failure is None and self._num_written < wanted:
            await self._progress.wait()
        if self._failure is not None:
            raise RolloutLogError(f"rollouts cannot be written down any more: {self._failure}") from self._failure

    async def _send(self) -> None:
        try:
            while self._waiting:
                records, self._waiting = self._waiting, []
                await self._store.append(records)
                self._num_written += len(records)
                self._progress.ring()
        except Exception as error:  # noqa: BLE001 - it is raised by every flush from now on
            self._failure = error
        finally:
            self._sending = None
            self._progress.ring()


class CountedTrajectory(Trajectory):
    """A trajectory that tells how many tokens are sampled for it.

    Args:
        held: what it begins with, which it takes over.
        count: is told the tokens of each segment.
    """

    def __init__(self, held: Trajectory, *, count: Callable[[int], None]) -> None:
        vars(self).update(vars(held))
        self._count = count

    def extend(self, segment: TokenOutput) -> None:
        """See Trajectory."""
        super().extend(segment)
        self._count(len(segment))


class RecordedTrajectory(CountedTrajectory):
    """A trajectory that tells what is appended to it.

    Args:
        held, count: as of CountedTrajectory.
        record: is told each thing that was appended, and the number of tokens before it.
        flush: returns once all that it was told is written down.
    """

    def __init__(
        self,
        held: Trajectory,
        *,
        record: Callable[[int, RolloutStep], None],
        flush: Callable[[], Awaitable[None]] | None = None,
        count: Callable[[int], None] = lambda _tokens: None,
    ) -> None:
        super().__init__(held, count=count)
        self._record = record
        self._flush = flush

    async def begin_call(self, call: str) -> None:
        """See Trajectory. It is written down when this returns."""
        self._record(len(self), CallBegun(call))
        if self._flush is not None:
            await self._flush()

    def observe(self, token_ids: Int32Array) -> None:
        """See Trajectory."""
        at = len(self)
        super().observe(token_ids)
        self._record(at, token_ids)

    def extend(self, segment: TokenOutput) -> None:
        """See Trajectory."""
        at = len(self)
        super().extend(segment)
        self._record(at, Sampled(segment))

    def close(self, *, stop_reason: StopReason, reward: float, info: dict[str, float] | None = None) -> None:
        """See Trajectory."""
        super().close(stop_reason=stop_reason, reward=reward, info=info)
        self._record(len(self), TrajectoryClosed(stop_reason=stop_reason, reward=float(reward), info=self.info))
