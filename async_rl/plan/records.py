"""The files of a run directory that describe and explain it, also while the run writes them.

The last line of a file may be incomplete, and `trace.json` may have no closing bracket. Files other than config.yaml
and metrics.jsonl may be missing; `Records.notes` says what can then not be said. Of a long run only the end is read, so
that the work does not grow with the run: at most LAST_BYTES of each file, and LAST_BATCHES batches in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from async_rl.files.jsonl import read_lines
from message_queue.errors import AsyncRLError

LAST_BYTES = 32 << 20
LAST_BATCHES = 400


class RecordsError(AsyncRLError, ValueError):
    """The files of a run do not suffice; names the file and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A complete event of `trace.json`."""

    process: str
    """Name of its process."""
    kind: str
    """Its category."""
    start: float
    """Seconds since the start of the run."""
    end: float
    """Likewise."""
    args: Mapping[str, Any]
    """Its arguments."""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start

    def overlap(self, start: float, end: float) -> float:
        """Seconds that it shares with an interval."""
        return max(0.0, min(self.end, end) - max(self.start, start))


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """A run, from its directory."""

    config: Mapping[str, Any]
    """Of config.yaml."""
    metrics: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl, one entry per batch."""
    ledger: Mapping[int, Mapping[str, Any]]
    """Of ledger.jsonl: group -> its record."""
    batches: Mapping[int, Sequence[Mapping[str, Any]]]
    """Of schedule.jsonl: last train step of a batch -> its groups."""
    spans: Mapping[str, Sequence[Span]]
    """Of trace.json: kind -> spans by start; those of the controller, the workers and the replicas."""
    rank_spans: Sequence[Span]
    """Of trace.json: spans of the first trainer rank."""
    notes: Sequence[str]
    """What cannot be said, because a file or a kind of spans is missing."""

    def of(self, kind: str) -> Sequence[Span]:
        """Spans of a kind."""
        return self.spans.get(kind, ())

    def since(self, start: float) -> Records:
        """Without the spans that start earlier, in seconds since the start of the run."""
        spans = {kind: [span for span in each if span.start >= start] for kind, each in self.spans.items()}
        return replace(self, spans=spans, rank_spans=[span for span in self.rank_spans if span.start >= start])


def read_records(directory: Path) -> Records:
    """Records of a run that has ended or still runs.

    Raises:
        RecordsError: config.yaml or metrics.jsonl is missing or empty, or a file is damaged.
    """
    try:
        config: Any = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
        metrics = list(_objects(directory / "metrics.jsonl"))
    except OSError as error:
        raise RecordsError(
            f"{error.filename} cannot be read: {error.strerror}; DIR is the directory of a run"
        ) from error
    except yaml.YAMLError as error:
        raise RecordsError(f"{directory / 'config.yaml'} is damaged: {error}") from error
    if not metrics:
        raise RecordsError(f"{directory / 'metrics.jsonl'} has no train step yet; wait for the first one")
    notes = list[str]()
    ledger = list(_optional(directory / "ledger.jsonl", notes, "dropped groups are not counted"))
    schedule = list(_optional(directory / "schedule.jsonl", notes, "sources of staleness and lengths are not known"))
    spans: dict[str, list[Span]] = {}
    rank_spans = list[Span]()
    for event in _events(directory / "trace.json", notes):
        span = Span(
            process=str(event["pid"]),
            kind=str(event["cat"]),
            start=event["ts"] / 1e6,
            end=(event["ts"] + event["dur"]) / 1e6,
            args=event.get("args") or {},
        )
        (rank_spans if span.process.startswith("trainer") else spans.setdefault(span.kind, [])).append(span)
    for each in (*spans.values(), rank_spans):
        each.sort(key=lambda span: span.start)
    if len(trains := spans.get("train", [])) > LAST_BATCHES:
        first = trains[-LAST_BATCHES - 1].end
        spans = {kind: [span for span in each if span.start >= first] for kind, each in spans.items()}
        rank_spans = [span for span in rank_spans if span.start >= first]
    metrics = metrics[-LAST_BATCHES:]
    if int(metrics[0]["train_step"]) > int(metrics[0].get("optimizer_steps", 1)):
        notes.append(f"steps before {metrics[0]['train_step']:.0f}: only the end of a long run is looked at")
    if spans and "generate" not in spans:
        notes.append("trace.json has no requests: the causes of waits are one, `rollouts`")
    return Records(
        config=config,
        metrics=metrics,
        ledger={record["group"]: record for record in ledger if "group" in record},
        batches={line["train_step"]: line["groups"] for line in schedule},
        spans=spans,
        rank_spans=[span for span in rank_spans if span.process == rank_spans[0].process],
        notes=notes,
    )


def _optional(path: Path, notes: list[str], without: str) -> Iterator[Mapping[str, Any]]:
    try:
        yield from _objects(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: {without}")


def _events(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """Spans of a trace and of the file before it, if the trace was too large for one."""
    found = list[Mapping[str, Any]]()
    earlier, size = path.with_stem(f"{path.stem}-earlier"), path.stat().st_size if path.exists() else 0
    for each in (earlier, path) if size < LAST_BYTES else (path,):
        if each.exists():
            found += _objects(each, last_bytes=LAST_BYTES - size if each == earlier else LAST_BYTES)
    if not found or "traceEvents" in found[0]:  # a file of one object is of an earlier version
        notes.append(f"{path.name} has no spans: only the trainer's share of waiting is known, not its causes")
        return
    yield from (event for event in found if event.get("ph") == "X")


def _objects(path: Path, *, last_bytes: int | None = None) -> Iterator[Mapping[str, Any]]:
    """Objects of a file with one per line, or of an array with one per line.

    An incomplete last line that the run still writes is left out.
    """
    lines = read_lines(path, last_bytes=LAST_BYTES if last_bytes is None else last_bytes)
    for number, line in enumerate(lines, start=1):
        text = line.strip().strip("[],")
        if not text:
            continue
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError(f"{type(value).__name__} instead of an object")
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise RecordsError(f"{path}:{number} is damaged: {error}; remove the line") from error
        yield value
