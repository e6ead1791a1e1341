"""Time spans of the driver as a Chrome trace (`trace.json`), readable by Perfetto."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_EVENTS = 200_000  # about 30 MB of JSON; later spans are only counted


class Trace:
    """Collects spans. Each stage is a track; overlapping spans of a stage are on separate lanes.

    Args:
        path: of the file; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._origin = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._num_lanes: dict[str, int] = {}
        self._free_lanes: dict[str, list[int]] = {}  # heaps
        self._lost = 0

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Generator[None]:
        """Record the time between enter and exit; `args` are shown with the span."""
        free = self._free_lanes.setdefault(track, [])
        if not free:
            count = self._num_lanes[track] = self._num_lanes.get(track, 0) + 1
            free.append(count - 1)
        lane = heapq.heappop(free)
        started = time.monotonic()
        try:
            yield
        finally:
            heapq.heappush(free, lane)
            self._add(track, lane, name, started, time.monotonic(), args)

    def write(self) -> None:
        """Write the file."""
        if self._path is None:
            return
        document = {"traceEvents": self._events, "otherData": {"spans_not_kept": self._lost}}
        self._path.write_text(json.dumps(document))

    def _add(self, track: str, lane: int, name: str, started: float, ended: float, args: dict[str, Any]) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._lost += 1
            return
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "cat": track,
                "pid": track,
                "tid": f"{track} {lane}",
                "ts": round((started - self._origin) * 1e6),
                "dur": round((ended - started) * 1e6),
                "args": args,
            }
        )
