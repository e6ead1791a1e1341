"""Spans of the driver as a Chrome trace (`trace.json`), readable by Perfetto."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_EVENTS = 200_000  # about 30 MB of JSON; later spans are counted, not kept


class Trace:
    """Collects spans; a track per stage, overlapping spans of one stage on lanes of their own."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._origin = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._busy_lanes: dict[str, set[int]] = {}
        self._lost = 0

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Generator[None]:
        """Record the time between enter and exit."""
        lanes = self._busy_lanes.setdefault(track, set())
        lane = next(i for i in range(len(lanes) + 1) if i not in lanes)
        lanes.add(lane)
        begun = time.monotonic()
        try:
            yield
        finally:
            lanes.discard(lane)
            self._add(track, lane, name, begun, time.monotonic(), args)

    def write(self) -> None:
        """Write what was collected."""
        if self._path is None:
            return
        document = {"traceEvents": self._events, "otherData": {"spans_not_kept": self._lost}}
        self._path.write_text(json.dumps(document))

    def _add(self, track: str, lane: int, name: str, begun: float, ended: float, args: dict[str, Any]) -> None:
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
                "ts": round((begun - self._origin) * 1e6),
                "dur": round((ended - begun) * 1e6),
                "args": args,
            }
        )
