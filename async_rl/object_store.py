"""Ray's object store as the memory that the queue shares with its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import ObjectLostError

from message_queue.packed import Buffers, SharedMemoryLost


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """See `message_queue.packed.SharedMemory`. A reference dies with the process that put it; a buffer that is held
    does not, so the queue holds what it refers to.

    min_bytes: below it an object of its own costs more than a second copy.
    """

    min_bytes: int = 1 << 20

    def put(self, buffers: Buffers) -> Any:
        """See SharedMemory."""
        return ray.put(buffers)

    async def get(self, references: Sequence[Any]) -> list[Buffers]:
        """See SharedMemory."""
        try:
            return cast(list[Buffers], list(await asyncio.gather(*references)))
        except ObjectLostError as error:
            raise SharedMemoryLost(f"arrays in Ray's object store are gone: {error}") from error
