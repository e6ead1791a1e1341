"""The queue's process: its host, and the driver's client."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from async_rl.cluster.batching import BatchingClient, BatchingServer
from async_rl.cluster.rpc import ActorClient
from message_queue.errors import AsyncRLError, ContractError, JournalError, QueueError, StalenessError
from message_queue.journal import EventJournal
from message_queue.ledger import LedgerRecord, LedgerTotal
from message_queue.policies import build_policy
from message_queue.queue import TrajectoryQueue
from message_queue.recovery import JournalPlace, Restored, open_queue

if TYPE_CHECKING:
    from async_rl.config import RunConfig

P = ParamSpec("P")
R = TypeVar("R")
REFUSALS = (QueueError, ContractError, StalenessError, JournalError)
"""Errors that reach a caller of the queue unchanged."""


class QueueUnavailable(AsyncRLError):
    """The process of the queue is dead or silent; names the waiting call and the bound."""


class QueueHost(BatchingServer):
    """A queue with its journal, called through `BatchingClient`. Runs in one event loop."""

    def __init__(self, config: RunConfig, *, log: Path | None = None) -> None:
        super().__init__(log=log)
        groups, per_batch = config.rollout.groups_per_batch, config.trainer.updates_per_batch
        self._policy = build_policy(config.staleness, batch_groups=groups, updates_per_batch=per_batch)
        self._max_ready = config.queue.max_ready
        self._journal: EventJournal | None = None
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
        self.serve(self.queue, refusals=REFUSALS)
        return restored

    async def close_journal(self) -> None:
        """Store waiting records and release the journal; nothing is recorded afterwards. Idempotent."""
        if self._journal is not None:
            await self._journal.close()


QueueActor = cast(Any, ray.remote)(QueueHost)


class QueueClient(ActorClient):
    """Client of a `TrajectoryQueue` in another process; `open` restores it before any other call.

    Args:
        actor: handle of a `QueueHost`.
        timeout_s: silence after which the queue counts as dead, and bound on calls outside the queue itself.

    Raises:
        QueueUnavailable: from every method, if the queue is dead or silent.
    """

    def __init__(self, actor: Any, *, timeout_s: float) -> None:
        super().__init__(actor, name="the queue", lost=QueueUnavailable, refusals=REFUSALS)
        self._timeout_s = timeout_s
        self._num_received = 0  # ledger records
        self._calls: BatchingClient[TrajectoryQueue] = BatchingClient(
            actor, name="driver", server=self.name, timeout_s=timeout_s, lost=QueueUnavailable
        )

    @classmethod
    def start(cls, config: RunConfig, *, options: dict[str, Any], log: Path | None = None) -> QueueClient:
        """Start the process.

        Args:
            options: Ray's options of the actor.
            log: file for its output; None leaves the output to Ray.
        """
        actor = QueueActor.options(**options, max_restarts=0).remote(config, log=log)
        return cls(actor, timeout_s=config.queue.timeout_s)

    async def open(self, place: JournalPlace, *, timeout_s: float) -> Restored:
        """Open the journal and restore the queue from it; see `message_queue.recovery.open_queue`.

        Args:
            timeout_s: bound on reading the journal.
        """
        return await self.ask("open", place, timeout_s=timeout_s)

    async def close_journal(self) -> None:
        """Store waiting records, and let other processes open the journal."""
        await self.ask("close_journal", timeout_s=self._timeout_s)

    async def call(
        self,
        method: Callable[Concatenate[TrajectoryQueue, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call the queue. A caller may wait as long as the queue gives signs of life."""
        return await self._calls.call(method, *args, **kwargs)

    async def drain_records(self) -> list[LedgerRecord]:
        """Ledger records since the last call."""
        records = await self.call(TrajectoryQueue.records_after, self._num_received)
        self._num_received += len(records)
        return records

    async def closing_records(self) -> list[LedgerRecord | LedgerTotal]:
        """Ledger records since the last call of `drain_records`, the groups that are open, and the total."""
        return await self.call(TrajectoryQueue.closing_records, self._num_received)
