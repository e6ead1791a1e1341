"""What the process of the queue runs where others hold the content: the queue, its decisions and its journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from message_queue.contract import Admission, Batch, PutResult, QueueError
from message_queue.progress import RolloutRecord
from message_queue.restart import Restored
from message_queue.service import QueueService
from message_queue.shards.books import open_books
from message_queue.shards.inventory import Books, Counted, Inventory
from message_queue.start import admission_of
from message_queue.wire import EncodedGroup


class Bookkeeper(QueueService):
    """A QueueService whose groups are heads: the holders have the rest. Takes its arguments; the journal is needed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._batches: dict[str, list[int]] = {}  # by ticket, groups

    async def open(self, inventories: Sequence[Inventory] = ()) -> Restored[Any]:
        """Open the journal; what comes back has admissions for groups.

        Args:
            inventories: of all holders.

        Raises: as QueueService.open.
        """
        place = self._place_to_open()
        self._journal, log, start, restored = await open_books(place, inventories, policy=self._policy)
        self._queue = self._make(restored=start, log=log)
        return restored

    async def books(self) -> Books:
        """Where all groups are, by what is durable."""
        if self._journal is None:
            raise QueueError("the queue has no journal open")
        next_group, live = await self._journal.live()
        return Books(next_group, live, frozenset(self._queue.live))

    async def taken(self, ticket: str) -> list[int]:
        """Groups of a batch that is not known to have arrived.

        Raises:
            QueueError: no batch was taken under that ticket, or it has arrived.
        """
        if ticket not in self._batches or ticket not in self._calls:
            raise QueueError(f"no batch is on its way under ticket {ticket}")
        return self._batches[ticket]

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        raise QueueError("content goes to the holder of its group, not to the books")

    # ---- inside

    async def _admit(self, prompt: int) -> Admission:
        return await self._queue.admit(prompt)

    async def _put(self, message: Any) -> PutResult:
        assert isinstance(message, Counted), "a client of a queue with shards counts first"
        return await self._queue.put(EncodedGroup(message.head, message.mark))

    async def _take(self, ticket: str) -> Batch[Any]:
        batch = await self._queue.take()
        self._batches = {of: groups for of, groups in self._batches.items() if of in self._calls}
        self._batches[ticket] = [group.group for group in batch.groups]
        return Batch(
            groups=[admission_of(group) for group in batch.groups],
            update=batch.update,
            version_updates=batch.version_updates,
            min_update=batch.min_update,
        )
