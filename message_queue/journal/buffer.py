"""Bounds what waits to be written, so that a slow disk slows down those who record."""

from __future__ import annotations

import asyncio
from collections import deque


class Buffer:
    """Bytes that wait to be written. One record is always let in, however large."""

    def __init__(self, limit: int) -> None:
        self.held = 0
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, size: int) -> None:
        """Wait for room, behind those who came before."""
        if not self._waiting and self._fits(size):
            self.held += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(size)
            raise

    def leave(self, size: int) -> None:
        """Make room."""
        self.held -= size
        while self._waiting:
            size, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif self._fits(size):
                self._waiting.popleft()
                self.held += size
                turn.set_result(None)
            else:
                return

    def _fits(self, size: int) -> bool:
        return not self.held or self.held + size <= self._limit
