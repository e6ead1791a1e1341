"""The driver's side of the queue, which notes what was acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from async_rl.cluster.queue_handle import QueueClient
from async_rl.simulate.acknowledged import Acknowledged
from message_queue.contract import Admission, Batch
from message_queue.heads import GroupHead
from message_queue.recovery import JournalPlace, Restored


class WatchedQueue(QueueClient):
    """A QueueClient.

    Args:
        told: notes acknowledged facts.
        opens: called before the journal is opened.
        taken: called with each batch.
        on_kill: ends the queue's process.
    """

    def __init__(
        self,
        handle: Any,
        *,
        told: Acknowledged,
        opens: Callable[[JournalPlace], None],
        taken: Callable[[Batch], None],
        on_kill: Callable[[], None],
        timeout_s: float,
    ) -> None:
        super().__init__(handle, timeout_s=timeout_s)
        self._told = told
        self._opens = opens
        self._taken = taken
        self._on_kill = on_kill

    def kill(self) -> None:
        """End the process of the queue."""
        self._on_kill()

    async def open(self, place: JournalPlace, *, timeout_s: float) -> Restored:
        self._opens(place)
        return await super().open(place, timeout_s=timeout_s)

    async def admit(self, prompt: int) -> Admission:
        admission = await super().admit(prompt)
        self._told.admitted[admission.group] = admission
        return admission

    async def put(self, head: GroupHead) -> str | None:
        result = await super().put(head)
        (self._told.ready if result is None else self._told.dropped).add(head.group)
        return result

    async def drop(self, group: int, *, reason: str, segments: int = 0, tokens: int = 0, expired: bool = False) -> bool:
        dropped = await super().drop(group, reason=reason, segments=segments, tokens=tokens, expired=expired)
        if dropped:
            self._told.dropped.add(group)
        return dropped

    async def take(self) -> Batch:
        batch = await super().take()
        self._taken(batch)
        return batch

    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None:
        await super().trained(groups, train_step=train_step, tokens=tokens)
        self._told.trained[train_step] = tuple(groups)

    async def publish(self, version: int, *, update: int) -> None:
        await super().publish(version, update=update)
        self._told.version = max(self._told.version, version)
