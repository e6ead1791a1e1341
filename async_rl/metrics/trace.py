"""Time spans of all processes of a run as a Chrome trace (`trace.json`), readable by Perfetto.

The file is in the JSON Array Format: a line `[`, then one event per line, without a closing bracket, so that it can be
read while the run appends to it. An event of a span:

    {"name":"train 3","cat":"train","ph":"X","pid":"controller","tid":"controller train 0","ts":5200311,
     "dur":912004,"args":{"step":3,"groups":[8,9,10,11]}},

`ts` and `dur` are microseconds; `ts` counts from the first start of the run. Flow events have the number of a group as
`id` and connect its spans, in this order:

    admit -> rollout -> trajectory of each rollout -> queue -> train -> publish of the version with its gradient
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agent_loop.timeline import OpenSpan, Timeline, TimeSpan, now

WRITE_EVERY_S = 1.0
MAX_BYTES = 64 << 20  # of the file; a full one replaces `trace-earlier.json`
_FLOW = {"admit": "s", "rollout": "t", "trajectory": "t", "queue": "t", "train": "t", "publish": "f"}
"""Kind of a span -> phase of the flow events in it: start, step or end."""
_NAMED_BY = ("name", "step", "version", "group")


class Trace:
    """Writes the spans of a run. Each process has its tracks; overlapping spans of a track are on separate lanes.

    Args:
        path: file to write; None writes nothing. A file of an earlier start of the run is continued.
        warn: called with a text if the file cannot be written; the run continues without it.
        clock: time in seconds.
    """

    def __init__(
        self, path: Path | None, *, warn: Callable[[str], None] = lambda _text: None, clock: Callable[[], float] = now
    ) -> None:
        self._path = path
        self._warn = warn
        self._timelines: dict[tuple[str, str], Timeline] = {}
        self._lines: list[bytes] = []
        self._size = 0
        self._clock = clock
        self._origin = clock()
        if path is not None:
            self._resume(path)

    @contextmanager
    def span(
        self,
        kind: str,
        *,
        process: str = "controller",
        track: str | None = None,
        inside: OpenSpan | None = None,
        **args: Any,
    ) -> Generator[OpenSpan]:
        """Context of a span, written at its end; `args` are shown with it and may be extended.

        Args:
            process: process of the span.
            track: name of its lanes; None for `kind`.
            inside: open span of the same process and track that ends later.
        """
        timeline = self._timeline(process, track or kind)
        try:
            with timeline.span(kind, inside=inside, **args) as span:
                yield span
        finally:
            self.add(process, timeline.take())

    def start(self, kind: str, **args: Any) -> OpenSpan:
        """Start a span of the controller that `end` ends."""
        return self._timeline("controller", kind).start(kind, **args)

    def end(self, span: OpenSpan) -> None:
        """End a span of `start`, and write it."""
        span.timeline.end(span)
        self.add("controller", span.timeline.take())

    def add(self, process: str, spans: Iterable[TimeSpan]) -> None:
        """Write spans of a process, at the latest after WRITE_EVERY_S."""
        if self._path is None:
            return
        is_empty = not self._lines
        for span in spans:
            self._lines += map(_line, _events(process, span, origin=self._origin))
        if is_empty and self._lines:
            asyncio.get_running_loop().call_later(WRITE_EVERY_S, self.write)

    def write(self) -> None:
        """Write all spans so far."""
        if self._path is None or not self._lines:
            return
        content = b"".join(self._lines)
        self._lines.clear()
        try:
            if self._size > MAX_BYTES:
                self._start_file(self._path)
            with self._path.open("ab") as file:
                file.write(content)
        except OSError as error:
            self._warn(f"{self._path} is not continued: {error}")
            self._path = None
        self._size += len(content)

    # ---- inside

    def _timeline(self, process: str, track: str) -> Timeline:
        return self._timelines.setdefault((process, track), Timeline(track, clock=self._clock))

    def _resume(self, path: Path) -> None:
        """Continue a file without its last event if that is cut off; start one if there is none."""
        content = path.read_bytes() if path.exists() else b""
        try:
            self._origin = json.loads(content.split(b"\n", 2)[1].removesuffix(b","))["args"]["start"]
        except (ValueError, LookupError, TypeError):  # there is none, or another program wrote it
            return self._start_file(path)
        self._size = content.rfind(b"\n") + 1
        os.truncate(path, self._size)

    def _start_file(self, path: Path) -> None:
        """Start a file; one that is there is `trace-earlier.json` from then on."""
        if path.exists():
            path.replace(path.with_name("trace-earlier.json"))
        start = {"name": "start", "cat": "__metadata", "ph": "M", "pid": "controller", "ts": 0}
        content = b"[\n" + _line({**start, "args": {"start": self._origin}})
        path.write_bytes(content)
        self._size = len(content)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """All events of a file, also of a run that is under way or was killed.

    Raises:
        OSError: the file cannot be read.
    """
    return [json.loads(line.removesuffix(b",")) for line in path.read_bytes().split(b"\n")[1:-1]]


def _events(process: str, span: TimeSpan, *, origin: float) -> Sequence[dict[str, Any]]:
    """The event of a span, and those of the flows that pass through it."""
    kind, args = span.kind, span.args
    started, ended = (round(1e6 * (at - origin)) for at in (span.started, span.ended))
    place = {"pid": process, "tid": f"{process} {span.lane}", "ts": started}  # Perfetto wants a tid in one process only
    name = next((f"{kind} {args[key]}" for key in _NAMED_BY if key in args), kind)
    events = [{"name": name, "cat": kind, "ph": "X", **place, "dur": ended - started, "args": args}]
    if (phase := _FLOW.get(kind)) is not None:
        groups: Sequence[int] = args["groups"] if "groups" in args else [args["group"]] if "group" in args else []
        flow = {"name": "group", "cat": "group", "ph": phase, **place} | ({"bp": "e"} if phase == "f" else {})
        events += ({**flow, "id": group} for group in groups)
    return events


def _line(event: dict[str, Any]) -> bytes:
    return msgspec.json.encode(event) + b",\n"
