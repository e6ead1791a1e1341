"""A queue in several processes behind one handle, so that its client is that of a queue in one.

    ShardedHandle.append.remote(...)      -> holder of the group
                 .put_bytes.remote(...)   -> holder: whole and durable -> books: ready
                 .take_bytes.remote(...)  -> books: which groups       -> holders: what they are
                 .trained.remote(...)     -> books                     -> holders: what they may forget
                 .admit.remote(...), ...  -> books

The order is what makes it safe: see `message_queue.shards`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from message_queue.content import GroupMessage
from message_queue.contract import Admission, Batch, PutResult
from message_queue.progress import RolloutRecord
from message_queue.restart import Restored, with_open
from message_queue.shards.inventory import Books, Counted, Inventory
from message_queue.wire import EncodedGroup
from message_queue.wire.packed import Buffers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Method:
    call: Callable[..., Awaitable[Any]]

    def remote(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self.call(*args, **kwargs)


class ShardedHandle:
    """Has the shape of the handle of one queue; see `QueueService` for each call.

    Args:
        books: handle of the process that runs Bookkeeper.
        holders: of those that run ContentHolder, by shard.
    """

    def __init__(self, books: Any, holders: Sequence[Any]) -> None:
        self._books = books
        self._holders = list(holders)
        self.open = _Method(self._open)
        self.append = _Method(self._append)
        self.put_bytes = _Method(self._put_bytes)
        self.take_bytes = _Method(self._take_bytes)
        self.resume = _Method(self._resume)
        self.taken_arrays = _Method(self._taken_arrays)
        self.trained = _Method(self._trained)
        self.checkpointed = _Method(self._checkpointed)
        self.sync = _Method(self._sync)
        self.close_journal = _Method(self._close_journal)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._books, method)

    # ---- content

    async def _append(self, records: Sequence[RolloutRecord]) -> None:
        await self._by_shard(records, lambda record: record.group, lambda holder, part: holder.append.remote(part))

    async def _put_bytes(
        self, message: GroupMessage, *, ticket: str, settled: Sequence[str], wait_s: float
    ) -> PutResult | None:
        head = message if isinstance(message, bytes) else message.head
        group = EncodedGroup(head)
        mark = await self._holder(group.group).whole.remote(group.group, message) if group.closed else None
        counted = Counted(head, mark)
        return await self._books.put_bytes.remote(counted, ticket=ticket, settled=settled, wait_s=wait_s)

    async def _take_bytes(self, *, ticket: str, settled: Sequence[str], wait_s: float) -> Batch[GroupMessage] | None:
        return await self._filled(await self._books.take_bytes.remote(ticket=ticket, settled=settled, wait_s=wait_s))

    async def _resume(self, *, ticket: str, wait_s: float) -> Any:
        return await self._filled(await self._books.resume.remote(ticket=ticket, wait_s=wait_s))

    async def _taken_arrays(self, ticket: str) -> list[Buffers]:
        groups: list[int] = await self._books.taken.remote(ticket)
        found: list[list[Buffers]] = await self._by_shard(
            groups, lambda group: group, lambda holder, part: holder.arrays.remote(part)
        )
        return [buffers for group in found for buffers in group]

    # ---- what holders are told of

    async def _trained(self, groups: Sequence[int], **of: Any) -> None:
        await self._books.trained.remote(groups, **of)
        await self._settle()

    async def _checkpointed(self, train_step: int) -> None:
        await self._books.checkpointed.remote(train_step)
        await self._settle()

    async def _sync(self) -> None:
        await asyncio.gather(*(holder.sync.remote() for holder in self._holders))
        await self._books.sync.remote()

    async def _close_journal(self) -> None:
        await asyncio.gather(*(holder.close_journal.remote() for holder in self._holders))
        await self._books.close_journal.remote()

    async def _open(self) -> Restored[bytes]:
        inventories: list[Inventory] = await asyncio.gather(*(holder.open.remote() for holder in self._holders))
        restored: Restored[Admission] = await self._books.open.remote(inventories)
        books: Books = await self._books.books.remote()
        await asyncio.gather(*(holder.begin.remote(books) for holder in self._holders))
        groups: list[bytes] = await self._by_shard(
            restored.open, lambda admission: admission.group, lambda holder, part: holder.read.remote(part)
        )
        return with_open(restored, groups)

    # ---- inside

    async def _settle(self) -> None:
        books: Books = await self._books.books.remote()
        await asyncio.gather(*(holder.settle.remote(books) for holder in self._holders))

    async def _filled(self, result: Any) -> Any:
        """What the books answered, a batch with its groups."""
        if not isinstance(result, Batch):
            return result
        batch = cast(Batch[Admission], result)
        groups: list[GroupMessage] = await self._by_shard(
            batch.groups, lambda admission: admission.group, lambda holder, part: holder.contents.remote(part)
        )
        return Batch(
            groups=groups, update=batch.update, version_updates=batch.version_updates, min_update=batch.min_update
        )

    def _holder(self, group: int) -> Any:
        return self._holders[group % len(self._holders)]

    async def _by_shard(
        self, items: Sequence[T], group_of: Callable[[T], int], ask: Callable[[Any, list[T]], Awaitable[Any]]
    ) -> list[Any]:
        """What the holders answer for each item, in the order of the items; nothing where they answer nothing."""
        shards = [group_of(item) % len(self._holders) for item in items]
        asked = sorted(set(shards))
        parts = [[item for item, of in zip(items, shards, strict=True) if of == shard] for shard in asked]
        answers = await asyncio.gather(
            *(ask(self._holders[shard], part) for shard, part in zip(asked, parts, strict=True))
        )
        found = {shard: iter(answer or ()) for shard, answer in zip(asked, answers, strict=True)}
        return [answer for shard in shards for answer in (next(found[shard], None),)]
