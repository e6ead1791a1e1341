"""Driver side of the queue, which runs in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from async_rl.cluster.actors import QueueActor
from async_rl.cluster.queue_host import REFUSALS, QueueUnavailable
from async_rl.cluster.rpc import BatchingClient, first_line
from async_rl.files.logs import open_log
from message_queue.contract import Admission, Batch, QueueSnapshot
from message_queue.heads import GroupHead
from message_queue.ledger import Drop, LedgerRecord, LedgerTotal
from message_queue.queue import TrajectoryQueue
from message_queue.recovery import JournalPlace, Restored
from message_queue.staleness import StalenessConfig


class QueueClient:
    """Client of a `TrajectoryQueue` in another process; see there for each call.

    A caller may wait as long as the queue gives signs of life.

    Args:
        handle: handle of a `QueueHost`.
        timeout_s: silence after which the queue counts as dead, and bound on calls outside the queue itself.

    Raises:
        QueueUnavailable: from every method, if the queue is dead or silent.
    """

    def __init__(self, handle: Any, *, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._num_received = 0  # ledger records
        self._calls: BatchingClient[TrajectoryQueue] = BatchingClient(
            handle, name="driver", server="the queue", timeout_s=timeout_s, lost=QueueUnavailable
        )

    async def open(self, place: JournalPlace, *, timeout_s: float) -> Restored:
        """Open the journal and restore the queue from it; see `message_queue.recovery.open_queue`.

        Args:
            timeout_s: bound on reading the journal.
        """
        return await self._bounded("open the journal", self._handle.open.remote(place), timeout_s)

    async def close_journal(self) -> None:
        """Store waiting records, and let other processes open the journal."""
        await self._bounded("close the journal", self._handle.close_journal.remote(), self._timeout_s)

    # ---- see TrajectoryQueue

    async def admit(self, prompt: int) -> Admission:
        return await self._calls.call(TrajectoryQueue.admit, prompt)

    async def put(self, head: GroupHead) -> Drop | None:
        return await self._calls.call(TrajectoryQueue.put, head)

    async def drop(self, group: int, *, reason: Drop, segments: int = 0, tokens: int = 0) -> bool:
        return await self._calls.call(TrajectoryQueue.drop, group, reason=reason, segments=segments, tokens=tokens)

    async def wait_expired(self, *, known: Collection[int] = ()) -> list[int]:
        return await self._calls.call(TrajectoryQueue.wait_expired, known=known)

    async def take(self) -> Batch:
        return await self._calls.call(TrajectoryQueue.take)

    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None:
        await self._calls.call(TrajectoryQueue.trained, groups, train_step=train_step, tokens=tokens)

    async def publish(self, version: int, *, update: int) -> None:
        await self._calls.call(TrajectoryQueue.publish, version, update=update)

    async def loaded(self, version: int) -> None:
        await self._calls.call(TrajectoryQueue.loaded, version)

    async def sync(self) -> None:
        await self._calls.call(TrajectoryQueue.sync)

    async def checkpointed(self, train_step: int) -> None:
        await self._calls.call(TrajectoryQueue.checkpointed, train_step)

    async def snapshot(self) -> QueueSnapshot:
        return await self._calls.call(TrajectoryQueue.snapshot)

    async def drain_records(self) -> list[LedgerRecord]:
        records = await self._calls.call(TrajectoryQueue.records_after, self._num_received)
        self._num_received += len(records)
        return records

    async def closing_records(self) -> list[LedgerRecord | LedgerTotal]:
        return await self._calls.call(TrajectoryQueue.closing_records, self._num_received)

    async def close(self) -> None:
        await self._calls.call(TrajectoryQueue.close)

    async def pid(self, *, timeout_s: float) -> int:
        """Process id, once the process runs."""
        return await self._bounded("start", self._handle.pid.remote(), timeout_s)

    def kill(self) -> None:
        """End the process."""
        ray.kill(self._handle)

    async def _bounded(self, what: str, answer: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except REFUSALS as error:
            raise getattr(error, "cause", error) from None  # Ray raises a subclass with the original as `cause`
        except TimeoutError as error:
            raise QueueUnavailable(f"the queue did not {what} within {timeout_s:g} s") from error
        except RayError as error:
            raise QueueUnavailable(f"the queue died before it could {what} ({first_line(error)})") from error


def start_queue(
    *,
    batch_groups: int,
    staleness: StalenessConfig,
    max_ready: int | None,
    updates_per_batch: int,
    timeout_s: float,
    options: dict[str, Any],
    log: Path | None = None,
) -> QueueClient:
    """Start the queue's actor; `QueueClient.open` comes first.

    Args:
        options: Ray options of the actor.
        log: file for its output; None leaves the output to Ray.
    """
    actor = QueueActor.options(**options, max_restarts=0).remote(
        batch_groups=batch_groups,
        staleness=staleness,
        max_ready=max_ready,
        updates_per_batch=updates_per_batch,
        open_log=None if log is None else partial(open_log, log),
    )
    return QueueClient(actor, timeout_s=timeout_s)
