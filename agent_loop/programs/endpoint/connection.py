"""HTTP/1.1 connections of the endpoint: uvicorn's, with bounds that it lacks."""

from __future__ import annotations

import asyncio

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

KEYLESS_HEAD_S = 10.0  # for the first head of a connection


class Connection(H11Protocol):
    """A connection of a client that may be slow or hostile.

    It is closed if the head of a request is not complete in time, or if the client does not read its response. If there
    are too many, the oldest connection whose last request had no valid key is closed; these have at most half of the
    places. The body of a request is bounded by its reader.

    Args:
        config: settings of uvicorn, loaded.
        state: connections and requests of the server.
        keyless: connections of the server without a valid key, the oldest first.
        max_connections: connections that may be open at once.
        head_timeout_s: seconds from the connection, or from the first byte after a response, to the end of the head.
        write_timeout_s: seconds to wait for a client that reads nothing.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        *,
        keyless: dict[Connection, None],
        max_connections: int,
        head_timeout_s: float,
        write_timeout_s: float,
    ) -> None:
        super().__init__(config, state, {"connection": self})
        self._keyless = keyless
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._keyless[self] = None
        self._watch_head()
        if len(self.connections) > self._max_connections or len(self._keyless) > max(1, self._max_connections // 2):
            oldest = next(iter(self._keyless))
            del self._keyless[oldest]
            oldest.transport.abort()

    def note_key(self, *, valid: bool) -> None:
        """Note whether the last request had a valid key."""
        if valid:
            self._keyless.pop(self, None)
        else:
            self._keyless[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._keyless.pop(self, None)
        self._head_timer = _cancelled(self._head_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.ProtocolError:  # a malformed body after the response has started
            self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._write_timer or self.loop.call_later(self._write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _cancelled(self._write_timer)

    def _watch_head(self) -> None:
        """Time the head of a request. Between requests, uvicorn's own timer runs until the next byte."""
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None:
            timeout_s = min(self._head_timeout_s, KEYLESS_HEAD_S) if self in self._keyless else self._head_timeout_s
            self._head_timer = self.loop.call_later(timeout_s, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
