"""What the process of the queue runs: the plain queue behind tickets and slices, with groups as bytes.

A call that waits is begun once under a ticket of the caller and goes on by itself. The caller asks for its result in
slices of bounded time, so that either side can tell a long wait from a dead peer. A result is kept until the caller
says that it has it, so an answer that was lost, or a caller that was cancelled, loses no group.

With a journal every change is written to it before its caller is answered.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from message_queue.content import Content, Contents, GroupMessage
from message_queue.contract import Admission, Batch, PutResult, QueueError, QueueSnapshot
from message_queue.journal import Journal
from message_queue.ledger import LedgerRecord, LedgerTotal
from message_queue.policies import build_policy
from message_queue.progress import RolloutRecord
from message_queue.queue import TrajectoryQueue
from message_queue.restart import JournalPlace, Restored, open_journal
from message_queue.staleness import StalenessConfig
from message_queue.tickets import EndedTickets
from message_queue.wire import EncodedGroup
from message_queue.wire.packed import Buffers, NoSharedMemory, SharedMemory


class QueueService:
    """A TrajectoryQueue and the calls under way. Runs in one event loop; give it to an async actor as it is.

    Every waiting call takes `ticket` (unique for the call), `settled` (tickets whose results have arrived) and `wait_s`
    (how long this slice may last), and returns None where there is no result yet: `resume` it then.

    Args: those of TrajectoryQueue, and
        journal: where every change is recorded; call `open` first then, and it decides what the queue goes on from.
        memory: that every client shares with this process.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        staleness: StalenessConfig,
        max_ready: int | None = None,
        updates_per_batch: int = 1,
        restored: QueueSnapshot | None = None,
        journal: JournalPlace | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        self._make: Callable[..., TrajectoryQueue[EncodedGroup]] = partial(
            TrajectoryQueue,
            batch_groups=batch_groups,
            staleness=staleness,
            max_ready=max_ready,
            updates_per_batch=updates_per_batch,
        )
        self._policy = build_policy(staleness, batch_groups=batch_groups, updates_per_batch=updates_per_batch)
        self._queue: TrajectoryQueue[EncodedGroup] = self._make(restored=restored)
        self._place = journal
        self._opened = False
        self._journal: Journal | None = None
        self._contents = Contents(memory or NoSharedMemory())
        self._handed: dict[str, list[Content]] = {}  # by the ticket of a batch that is not known to have arrived
        self._calls: dict[str, asyncio.Task[Any]] = {}
        self._withdrawn: set[str] = set()
        self._ended = EndedTickets()
        self._records: list[LedgerRecord] = []  # after the first `received`, not known to have arrived
        self._received = 0

    async def open(self) -> Restored[bytes]:
        """Open the journal, once, before any other call.

        Raises:
            JournalError: it cannot be used; the message says why and the way out.
            QueueError: it is open, or there is none.
        """
        self._journal, log, start, restored = await open_journal(self._place_to_open(), policy=self._policy)
        self._queue = self._make(restored=start, log=log)
        for admission in start.open:
            self._contents.begin(admission.group)
        return restored

    def _place_to_open(self) -> JournalPlace:
        """Of the journal. It is opened once: a message that comes twice finds it on its way."""
        if self._place is None or self._opened:
            raise QueueError("the queue has no journal to open, or opened it before")
        self._opened = True
        return self._place

    async def close_journal(self) -> None:
        """Bring everything to the disk and let go of the journal; nothing is recorded after it. Idempotent.

        Raises:
            JournalBroken: the last records may not be on the disk.
        """
        if self._journal is not None:
            await self._journal.close()

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    # ---- calls that wait

    async def admit(self, prompt: int, *, ticket: str, settled: Sequence[str], wait_s: float) -> Admission | None:
        """`TrajectoryQueue.admit`.

        Raises:
            QueueError: the ticket was withdrawn before the call arrived.
        """
        if ticket in self._withdrawn:
            self._withdrawn.remove(ticket)
            raise QueueError(f"admission {ticket} was withdrawn")
        return await self._begin(lambda: self._admit(prompt), ticket=ticket, settled=settled, wait_s=wait_s)

    async def put_bytes(
        self, message: GroupMessage, *, ticket: str, settled: Sequence[str], wait_s: float
    ) -> PutResult | None:
        """`TrajectoryQueue.put` of an encoded group.

        Raises:
            WireError: the bytes are damaged. SharedMemoryLost: its arrays are gone.
            QueueError: also where it is to be what was appended, and that is something else.
        """
        return await self._begin(lambda: self._put(message), ticket=ticket, settled=settled, wait_s=wait_s)

    async def take_bytes(self, *, ticket: str, settled: Sequence[str], wait_s: float) -> Batch[GroupMessage] | None:
        """`TrajectoryQueue.take`, its groups encoded."""
        return await self._begin(lambda: self._take(ticket), ticket=ticket, settled=settled, wait_s=wait_s)

    async def taken_arrays(self, ticket: str) -> list[Buffers]:
        """What the references of a batch are of, for who cannot read them.

        Raises:
            QueueError: no batch was taken under that ticket, or it has arrived.
        """
        if ticket not in self._handed:
            raise QueueError(f"no batch is on its way under ticket {ticket}")
        return [buffers for content in self._handed[ticket] for buffers in content.shared]

    async def wait_expired(
        self, known: Sequence[int], *, ticket: str, settled: Sequence[str], wait_s: float
    ) -> list[int] | None:
        """`TrajectoryQueue.wait_expired`."""
        return await self._begin(
            lambda: self._queue.wait_expired(known=known), ticket=ticket, settled=settled, wait_s=wait_s
        )

    async def resume(self, *, ticket: str, wait_s: float) -> Any:
        """Another slice of the call begun under `ticket`: its result, or None.

        Raises:
            QueueError: no such call is under way.
        """
        if ticket not in self._calls:
            raise QueueError(f"call {ticket} is not under way; it was withdrawn, or the queue restarted since")
        return await self._slice(self._calls[ticket], ticket=ticket, wait_s=wait_s)

    async def withdraw(self, ticket: str) -> None:
        """The caller gave up: stop the call. An admission that it made is what the next `admit` of its prompt returns.

        A batch that it took stays under the ticket, for `take_bytes` under the same ticket.
        """
        task = self._calls.get(ticket)
        if task is None:
            if ticket not in self._ended:
                self._withdrawn.add(ticket)
            return
        task.cancel()
        await asyncio.wait({task})
        result = None if task.cancelled() or task.exception() is not None else task.result()
        if isinstance(result, Batch):
            return
        self._calls.pop(ticket, None)
        if isinstance(result, Admission):
            self._queue.take_back(result)

    # ---- calls that do not wait; see TrajectoryQueue

    async def drop(self, group: int, *, reason: str, segments: int, tokens: int, expired: bool = False) -> bool:
        dropped = await self._queue.drop(group, reason=reason, segments=segments, tokens=tokens, expired=expired)
        self._contents.forget(group)
        return dropped

    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None:
        await self._queue.trained(groups, train_step=train_step, tokens=tokens)

    async def publish(self, version: int, *, update: int) -> None:
        await self._queue.publish(version, update=update)

    async def loaded(self, version: int) -> None:
        await self._queue.loaded(version)

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        fetched = await self._contents.fetch(records)
        await self._queue.append(fetched)
        self._contents.keep(records, fetched)

    async def sync(self) -> None:
        await self._queue.sync()

    async def checkpointed(self, train_step: int) -> None:
        await self._queue.checkpointed(train_step)

    async def close(self) -> None:
        await self._queue.close()

    async def expired(self) -> list[int]:
        return self._queue.expired()

    async def snapshot(self) -> QueueSnapshot:
        return self._queue.snapshot()

    async def drain_records(self, received: int) -> list[LedgerRecord]:
        """`TrajectoryQueue.drain_records`, where the caller has the first `received` of all; the others are kept."""
        self._records += self._queue.drain_records()
        del self._records[: max(0, received - self._received)]
        self._received = max(received, self._received)
        return list(self._records)

    async def closing_records(self, received: int) -> list[LedgerRecord | LedgerTotal]:
        """`TrajectoryQueue.closing_records`, where the caller has the first `received` of all."""
        return [*await self.drain_records(received), *self._queue.closing_records()]

    # ---- inside

    async def _admit(self, prompt: int) -> Admission:
        admission = await self._queue.admit(prompt)
        self._contents.begin(admission.group)
        return admission

    async def _put(self, message: GroupMessage) -> PutResult:
        group = await self._contents.group(message)
        result = await self._queue.put(group)
        self._contents.forget(group.group)
        return result

    async def _take(self, ticket: str) -> Batch[GroupMessage]:
        batch = await self._queue.take()
        contents = [group.content or Content(group.data, ()) for group in batch.groups]
        self._handed[ticket] = contents
        return Batch(
            groups=[content.message for content in contents],
            update=batch.update,
            version_updates=batch.version_updates,
            min_update=batch.min_update,
        )

    async def _begin(
        self, start: Callable[[], Coroutine[Any, Any, Any]], *, ticket: str, settled: Sequence[str], wait_s: float
    ) -> Any:
        for done in settled:
            self._calls.pop(done, None)
            self._handed.pop(done, None)
            self._withdrawn.discard(done)
            self._ended.add(done)
        if ticket in self._ended:
            raise QueueError(f"call {ticket} is over; its message came twice, or after it was withdrawn")
        if ticket not in self._calls:
            self._calls[ticket] = asyncio.create_task(start(), name=ticket)
        return await self._slice(self._calls[ticket], ticket=ticket, wait_s=wait_s)

    async def _slice(self, task: asyncio.Task[Any], *, ticket: str, wait_s: float) -> Any:
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        if not done:
            return None
        if task.cancelled():
            raise QueueError(f"call {ticket} was withdrawn")
        return task.result()
