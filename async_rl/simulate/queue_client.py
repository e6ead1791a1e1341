"""The driver's side of the queue, which tells the oracle what the driver is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from async_rl.simulate import model
from async_rl.simulate.acknowledged import Acknowledged, Dropped, Held, Published, Ready, Trained
from message_queue.client import QueueClient, QueueClientConfig
from message_queue.contract import Admission, Batch, PutResult
from message_queue.progress import CallBegun, RolloutRecord, Sampled, TrajectoryClosed
from message_queue.restart import Restored
from message_queue.shards.handle import ShardedHandle
from message_queue.tokens import TokenOutput
from message_queue.trajectory import PromptGroup


class WatchedQueue(QueueClient):
    """A QueueClient.

    Args:
        told: is given what the driver was told. taken: the batches that it gets. on_kill: ends the queue's process.
    """

    def __init__(
        self,
        handle: Any,
        *,
        told: Acknowledged,
        taken: Callable[[Batch[PromptGroup]], None],
        on_kill: Callable[[], None],
        config: QueueClientConfig,
    ) -> None:
        super().__init__(handle, name="driver", routing=model.ROUTING, config=config)
        self._told = told
        self._taken = taken
        self._on_kill = on_kill

    def kill(self) -> None:
        """End the process of the queue."""
        self._on_kill()

    async def admit(self, prompt: int) -> Admission:
        admission = await super().admit(prompt)
        self._told.note(admission)
        return admission

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        await super().append(records)
        for record in records:
            self._told.note(_held(record))

    async def put(self, group: PromptGroup) -> PutResult:
        result = await super().put(group)
        self._told.note(Ready(group.group) if result.accepted else Dropped(group.group))
        return result

    async def drop(self, group: int, *, reason: str, segments: int = 0, tokens: int = 0, expired: bool = False) -> bool:
        dropped = await super().drop(group, reason=reason, segments=segments, tokens=tokens, expired=expired)
        if dropped:
            self._told.note(Dropped(group))
        return dropped

    async def take(self) -> Batch[PromptGroup]:
        batch = await super().take()
        self._taken(batch)
        return batch

    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None:
        await super().trained(groups, train_step=train_step, tokens=tokens)
        self._told.note(Trained(tuple(groups), train_step))

    async def publish(self, version: int, *, update: int) -> None:
        await super().publish(version, update=update)
        self._told.note(Published(version))


class WatchedShards(ShardedHandle):
    """A ShardedHandle.

    Args:
        opened: is given what the journals gave back.
    """

    def __init__(self, books: Any, holders: Sequence[Any], *, opened: Callable[[Restored[bytes]], None]) -> None:
        super().__init__(books, holders)
        self._opened = opened

    async def _open(self) -> Restored[bytes]:
        restored = await super()._open()
        self._opened(restored)
        return restored


def _held(record: RolloutRecord) -> Held:
    what, length = record.what, record.at
    match what:
        case Sampled():
            assert isinstance(what.segment, TokenOutput), "the driver appends what engines gave"
            length += len(what.segment)
        case CallBegun():
            pass
        case TrajectoryClosed():
            return Held(record.group, record.trajectory, length, closed=True)
        case _:
            length += len(what)
    return Held(record.group, record.trajectory, length)
