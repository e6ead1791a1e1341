"""A repeatable event that tasks can wait for."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes all tasks that wait now; a task that waits later is woken by the next call."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify_all(self) -> None:
        """Wake all waiting tasks."""
        notified, self._next = self._next, asyncio.Event()
        notified.set()

    async def wait(self) -> None:
        """Return at the next `notify_all`."""
        await self._next.wait()
