"""A repeatable event that tasks can wait for."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes all tasks that wait at the time of a ring; later tasks wait for the next ring."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self) -> None:
        """Wake all waiting tasks."""
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    async def wait(self) -> None:
        """Return at the next ring."""
        await self._next.wait()
