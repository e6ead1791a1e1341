"""Ray's object store as the memory that the queue shares with its clients.

An object costs milliseconds of several processes, whatever its size, and so does each process that reads it. So what
is put in one turn of the event loop becomes one object, up to `object_bytes`. It is made by `store`, before the message
with its reference is pickled: Ray keeps for ever what is put while it pickles something else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from message_queue.wire.packed import Buffers, SharedMemoryLost


class _Box:
    """Buffers that become one object."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.reference: Any = None
        self._buffers: list[Any] = []

    def has_room(self, size: int, *, limit: int) -> bool:
        """For so many bytes more."""
        return self.reference is None and self.num_bytes + size <= limit

    def add(self, buffers: Buffers) -> int:
        """The place of the first of them."""
        first = len(self._buffers)
        self._buffers += buffers
        self.num_bytes += sum(len(buffer) for buffer in buffers)
        return first

    def store(self) -> Any:
        """Make the object; its reference."""
        if self.reference is None:
            self.reference, self._buffers = ray.put(tuple(self._buffers)), []
        return self.reference


class Piece:
    """`count` buffers of an object, from `first` on."""

    __slots__ = ("_box", "count", "first")

    def __init__(self, box: _Box, first: int, count: int) -> None:
        self._box = box
        self.first = first
        self.count = count

    @property
    def reference(self) -> Any:
        """Of the object."""
        return self._box.store()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._box.reference is None:
            raise RuntimeError(
                "a message goes out before ObjectStore.store(); give its Together before_send=memory.store"
            )
        return _stored, (self._box.reference, self.first, self.count)


def _stored(reference: Any, first: int, count: int) -> Piece:
    box = _Box()
    box.reference = reference
    return Piece(box, first, count)


class ObjectStore:
    """See `message_queue.wire.packed.SharedMemory`.

    A reference dies with the process that put it. A buffer that is held does not, so the queue holds what it refers to.

    Args:
        min_bytes: smaller arrays travel with their message.
        object_bytes: of an object that more than one message shares; it stays until the last of them is done with.
    """

    def __init__(self, *, min_bytes: int = 128 << 10, object_bytes: int = 8 << 20) -> None:
        self.min_bytes = min_bytes
        self._object_bytes = object_bytes
        self._unstored: list[_Box] = []
        self._fetching: dict[Any, asyncio.Task[Buffers]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _object_store, (self.min_bytes, self._object_bytes)

    def put(self, buffers: Buffers) -> Piece:
        """See SharedMemory."""
        size = sum(len(buffer) for buffer in buffers)
        if not self._unstored or not self._unstored[-1].has_room(size, limit=self._object_bytes):
            self._unstored.append(_Box())
        box = self._unstored[-1]
        return Piece(box, box.add(buffers), len(buffers))

    def store(self) -> None:
        """Make the objects of all that was put. Call it before a message with a reference goes out."""
        while self._unstored:
            self._unstored.pop(0).store()

    async def get(self, references: Sequence[Piece]) -> list[Buffers]:
        """See SharedMemory."""
        wanted = {piece.reference: None for piece in references}
        try:
            found = await asyncio.gather(*(asyncio.shield(self._fetch(reference)) for reference in wanted))
        except ObjectLostError as error:
            raise SharedMemoryLost(f"arrays in Ray's object store are gone: {error}") from error
        objects = dict(zip(wanted, found, strict=True))
        return [objects[piece.reference][piece.first : piece.first + piece.count] for piece in references]

    def _fetch(self, reference: Any) -> asyncio.Task[Buffers]:
        """The object, once for all who want it now."""
        task = self._fetching.get(reference)
        if task is None:
            task = self._fetching[reference] = asyncio.create_task(_read(reference))
            task.add_done_callback(lambda _: self._fetching.pop(reference, None))
        return task


async def _read(reference: Any) -> Buffers:
    return await reference


def _object_store(min_bytes: int, object_bytes: int) -> ObjectStore:
    return ObjectStore(min_bytes=min_bytes, object_bytes=object_bytes)
