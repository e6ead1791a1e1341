"""Something that happens again and again, to be waited for."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes all who wait at the time; who comes later waits for the next time."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self) -> None:
        """Wake all who wait."""
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    async def wait(self) -> None:
        """Return at the next ring."""
        await self._next.wait()
