"""Server side of the queue's process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from async_rl.cluster.rpc import BatchingServer, Call, Reply
from message_queue.errors import AsyncRLError, ContractError, JournalError, QueueError, StalenessError
from message_queue.journal import EventJournal
from message_queue.policies import build_policy
from message_queue.queue import TrajectoryQueue
from message_queue.recovery import JournalPlace, Restored, open_queue
from message_queue.staleness import StalenessConfig

REFUSALS = (QueueError, ContractError, StalenessError, JournalError)
"""Errors that reach a caller of the queue unchanged."""


class QueueUnavailable(AsyncRLError):
    """The process of the queue is dead or silent; names the waiting call and the bound."""


class QueueHost:
    """A queue with its journal, called through `BatchingClient`. Runs in one event loop.

    Args:
        batch_groups, staleness, updates_per_batch: see `build_policy`.
        max_ready: see TrajectoryQueue.
        open_log: called first; sends the output of the process to its log.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        staleness: StalenessConfig,
        max_ready: int | None = None,
        updates_per_batch: int = 1,
        open_log: Callable[[], None] | None = None,
    ) -> None:
        if open_log is not None:
            open_log()
        self._policy = build_policy(staleness, batch_groups=batch_groups, updates_per_batch=updates_per_batch)
        self._max_ready = max_ready
        self._journal: EventJournal | None = None
        self._server: BatchingServer[TrajectoryQueue] | None = None
        self.queue: TrajectoryQueue | None = None

    async def open(self, place: JournalPlace) -> Restored:
        """Open the journal and restore the queue from it, before any other call.

        Raises:
            JournalError: the journal cannot be used; the message has the cause and the way out.
            QueueError: the journal was opened before.
        """
        if self._journal is not None:
            raise QueueError("the queue has opened its journal before")
        self.queue, self._journal, restored = await open_queue(place, policy=self._policy, max_ready=self._max_ready)
        self._server = BatchingServer(self.queue, refusals=REFUSALS)
        return restored

    async def close_journal(self) -> None:
        """Store waiting records and release the journal; nothing is recorded afterwards. Idempotent."""
        if self._journal is not None:
            await self._journal.close()

    async def pid(self) -> int:
        """Process id of this process."""
        return os.getpid()

    async def exchange(self, client: str, calls: Sequence[Call], cancelled: Sequence[int]) -> list[Reply]:
        """See `BatchingServer`."""
        return await self._opened().exchange(client, calls, cancelled)

    async def collect(self, client: str) -> list[Reply]:
        """See `BatchingServer`."""
        return await self._opened().collect(client)

    def _opened(self) -> BatchingServer[TrajectoryQueue]:
        if self._server is None:
            raise QueueError("the queue has no journal yet; call open first")
        return self._server
