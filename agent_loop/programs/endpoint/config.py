"""Settings of the endpoint."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Lt

from agent_loop.bounds import Count, Seconds, bounded


@bounded("endpoint")
class EndpointConfig:
    """Address and limits of the endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on, also given to agents."""
    port: Annotated[int, Ge(0), Lt(2**16)] = 0
    """Port; 0 lets the system choose."""
    run_key: str | None = None
    """Key for agents outside of the run to open sessions; None if there are none."""
    max_body_bytes: Count = 32 * 2**20
    """Size of a request's body."""
    max_head_bytes: Count = 32 * 2**10
    """Size of a request's line and headers."""
    max_connections: Count = 1024
    """Connections at once. Beyond it, and beyond half as many without a valid key, the oldest without one is closed."""
    head_timeout_s: Seconds = 30.0
    """Seconds for the line and headers of a request."""
    body_timeout_s: Seconds = 60.0
    """Seconds for the body of a request, and for a client that does not read its response."""
    keep_alive_s: Seconds = 15.0
    """Seconds between the comments or pings of a stream that waits for its answer."""

    def __post_init__(self) -> None:
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError(f"endpoint.host is {self.host!r}; agents connect to it, so give one address or name")
