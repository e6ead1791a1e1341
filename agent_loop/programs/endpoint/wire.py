"""A wire format as plain functions between JSON and `agent_loop.programs.conversation`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agent_loop.programs.endpoint.body import Body
from agent_loop.programs.endpoint.errors import EndpointError

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of a client, without its path."""

    body: Body
    """JSON object."""
    id: str
    """Unique name; ids in the answer are made from it."""
    created: int
    """Unix time of its arrival, in seconds."""
    is_retry: bool = False
    """Whether the client's SDK made the call before and got no answer."""
    idempotency_key: str | None = None
    """Header `Idempotency-Key`; None if it is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat(Generic[Request, Answer]):
    """Functions of a wire format. No function keeps a state."""

    read: Callable[[Call], Request]
    """Body -> request. Raises RequestError."""
    write: Callable[[Answer, Call], dict[str, Any]]
    """Answer -> JSON object of the response."""
    events: Callable[[Answer, Call], Iterator[str]]
    """Answer -> all server-sent events of the response."""
    error: Callable[[EndpointError], dict[str, Any]]
    """Error -> JSON object of the response."""
    error_event: Callable[[EndpointError], str]
    """Error -> server-sent event, for a response that has started."""
    keep_alive: str = ": keep-alive\n\n"
    """Server-sent event or comment while an answer is awaited."""


def sse(data: Mapping[str, Any], *, event: str | None = None) -> str:
    """A server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(data)}\n\n"
