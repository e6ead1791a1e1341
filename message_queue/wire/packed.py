"""Messages in two parts: a head that is read on the way, and arrays that nobody touches.

The arrays of a `Packed` travel with it, as buffers of their own. Those of a `Shared` lie in memory that several
processes see, and only their reference travels, so they are copied once, whoever reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffers: TypeAlias = tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """head: a sealed message without payload. buffers: uint8 [n] each: token ids, logprobs, ends of kept
    sets, rows in pieces, kept token ids.
    """

    head: bytes
    buffers: Buffers

    @property
    def num_bytes(self) -> int:
        """Of the arrays."""
        return sum(len(buffer) for buffer in self.buffers)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """reference: of the buffers, as `SharedMemory.put` gave it."""

    head: bytes
    reference: Any


class SharedMemoryLost(RuntimeError):
    """What a reference is of is gone, with the process that put it there."""


class SharedMemory(Protocol):
    """Memory that several processes see. It keeps what is put as long as a reference or a buffer is held.

    min_bytes: messages with smaller arrays travel with them.
    """

    @property
    def min_bytes(self) -> int: ...

    def put(self, buffers: Buffers) -> Any:
        """Copy the buffers there; their reference, for any process."""
        ...

    async def get(self, references: Sequence[Any]) -> list[Buffers]:
        """The buffers of each reference, read-only and not copied.

        Raises:
            SharedMemoryLost: some are gone.
        """
        ...


class NoSharedMemory:
    """Everything travels."""

    min_bytes = 1 << 62

    def put(self, buffers: Buffers) -> Any:
        raise NotImplementedError("there is no shared memory")

    async def get(self, references: Sequence[Any]) -> list[Buffers]:
        if references:
            raise SharedMemoryLost("there is no shared memory in this process; give every client of a queue the same")
        return []


def share(message: Packed, memory: SharedMemory) -> Packed | Shared:
    """The message as it is to travel."""
    if message.num_bytes < memory.min_bytes:
        return message
    return Shared(message.head, memory.put(message.buffers))
