"""Settings of the endpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Address and limits of the endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on, which agents are given too."""
    port: int = 0
    """Port; 0 lets the system choose."""
    run_key: str | None = None
    """Key with which agents outside of the run open sessions; None if there are none."""
    max_body_bytes: int = 32 * 2**20
    """Size of a request's body."""
    max_head_bytes: int = 32 * 2**10
    """Size of a request's line and headers."""
    max_connections: int = 1024
    """Connections at once. Beyond it, and beyond half of it without a valid key, the oldest without one is closed."""
    head_timeout_s: float = 30.0
    """Seconds for the line and headers of a request."""
    body_timeout_s: float = 60.0
    """Seconds for the body of a request, and for a client that does not read its response."""
    keep_alive_s: float = 15.0
    """Seconds between the comments or pings of a stream that waits for its answer."""

    def __post_init__(self) -> None:
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError(f"endpoint.host is {self.host!r}; agents connect to it, so give one address or name")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"endpoint.port is {self.port}; must be 0 to 65535")
        for name in ("max_body_bytes", "max_head_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"endpoint.{name} is {getattr(self, name)}; must be at least 1")
        for name in ("head_timeout_s", "body_timeout_s", "keep_alive_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"endpoint.{name} is {getattr(self, name)}; must be a positive number of seconds")
