"""Time spans: what a process did, from when to when.

    timeline = Timeline("rollout")
    with timeline.span("trajectory", group=3, trajectory=0) as rollout, enclosing(rollout):
        ...
        with timed("tool", name="add"):         in an agent loop, also in a task that it started
            ...
    timeline.take()                             the spans that have ended

    lane 0   | trajectory                                     |
    lane 0     | generate |  | tool add |  | generate |  | reward |
    lane 1                   | tool sub      |

Spans that overlap are on separate lanes. A span inside another one has the lane of that one, unless an earlier one
inside is still there.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_SPANS = 100_000  # that wait for `Timeline.take`; without room, the oldest is discarded
_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch. It never goes back, as a clock of the wall may when it is set."""
    return _EPOCH + time.monotonic()


class TimeSpan(NamedTuple):
    """A span that has ended."""

    kind: str
    """What was done, such as `generate`."""
    lane: str
    """Row on which it is drawn; two spans of a row are apart, or one is inside the other."""
    started: float
    """Seconds since the epoch."""
    ended: float
    """Seconds since the epoch."""
    args: dict[str, Any]
    """Further facts, as JSON has them."""


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has not ended."""

    timeline: Timeline
    """Timeline of the span."""
    kind: str
    """See `TimeSpan`."""
    lane: int
    """Number of its lane."""
    started: float
    """Seconds since the epoch."""
    args: dict[str, Any]
    """See `TimeSpan`; may be extended until the end."""
    outer: OpenSpan | None
    """Span on whose lane it is, one level above; None if the lane is its own."""
    is_shared: bool = False
    """Whether an open span inside this one is on its lane."""


class Timeline:
    """The time spans of a process on one track with as many lanes as spans overlap.

    Args:
        track: name of the lanes: `rollout 0`, `rollout 1`, ...
        clock: time in seconds.
    """

    def __init__(self, track: str, *, clock: Callable[[], float] = now) -> None:
        self._track = track
        self._clock = clock
        self._num_lanes = 0
        self._free: list[int] = []  # heap of lanes
        self._ended = deque[TimeSpan](maxlen=MAX_SPANS)

    def start(self, kind: str, *, inside: OpenSpan | None = None, **args: Any) -> OpenSpan:
        """Start a span; `args` are shown with it.

        Args:
            inside: open span of this timeline that ends later.
        """
        if inside is not None and not inside.is_shared:
            inside.is_shared = True
            return OpenSpan(self, kind, inside.lane, self._clock(), args, inside)
        if not self._free:
            self._free.append(self._num_lanes)
            self._num_lanes += 1
        return OpenSpan(self, kind, heapq.heappop(self._free), self._clock(), args, None)

    def end(self, span: OpenSpan) -> None:
        """End a span."""
        if span.outer is None:
            heapq.heappush(self._free, span.lane)
        else:
            span.outer.is_shared = False
        self.add(span.kind, span.lane, span.started, span.args)

    def add(self, kind: str, lane: int, started: float, args: dict[str, Any]) -> None:
        """Record a span that ends now."""
        self._ended.append(TimeSpan(kind, f"{self._track} {lane}", started, self._clock(), args))

    @contextmanager
    def span(self, kind: str, *, inside: OpenSpan | None = None, **args: Any) -> Generator[OpenSpan]:
        """Context of a span; see `start`."""
        span = self.start(kind, inside=inside, **args)
        try:
            yield span
        finally:
            self.end(span)

    def take(self) -> list[TimeSpan]:
        """The spans that ended since the last call, by time of their end."""
        ended = list(self._ended)
        self._ended.clear()
        return ended


_enclosing: ContextVar[OpenSpan | None] = ContextVar("enclosing", default=None)


@contextmanager
def enclosing(span: OpenSpan) -> Generator[None]:
    """Context in which `timed` and `record` make spans inside `span`, also in tasks that start in it."""
    token = _enclosing.set(span)
    try:
        yield
    finally:
        _enclosing.reset(token)


@contextmanager
def timed(kind: str, **args: Any) -> Generator[dict[str, Any]]:
    """Record a span inside the enclosing one, with the arguments of that one too; nothing if there is none.

    The arguments that are shown may be changed in the context.
    """
    outer = _enclosing.get()
    if outer is None:
        yield args
        return
    with outer.timeline.span(kind, inside=outer, **outer.args, **args) as span:
        yield span.args


def record(kind: str, started: float, **args: Any) -> None:
    """As `timed`, for a span from `started` until now, at a time in which the enclosing one had no other inside."""
    outer = _enclosing.get()
    if outer is not None:
        outer.timeline.add(kind, outer.lane, started, {**outer.args, **args})
