"""The journal as a log: records go to the newest file, the oldest is emptied and removed. One thread.

    removed <- [ oldest ] [ ... ] [ newest ] <- records
                   |                  ^
                   +-- live content --+    cleaning

Each file begins with a Summary of all that was recorded before it, so a file can go once no content in it is live.
Where files hold more than twice what is live, the live content of the oldest is appended anew, a piece at a time,
between the records that arrive; then the oldest is removed. A record that is there twice, because this was cut short,
counts once. So the disk holds little more than twice what is live, and cleaning writes at most about as much as
recording does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from message_queue.journal.checks import checked
from message_queue.journal.disk import DiskFile
from message_queue.journal.errors import JournalError
from message_queue.journal.files import JournalFiles, LogFile, Parts
from message_queue.journal.format import Entry
from message_queue.journal.groups import LiveGroup, Span, step_of
from message_queue.journal.records import (
    Admitted,
    Called,
    Checkpointed,
    Closed,
    Observed,
    Published,
    Sampled,
    Taken,
    Trained,
)
from message_queue.journal.state import JournalState

Key = tuple[int, int] | str
MIN_FILES = 2  # so that there is a second Summary where one is damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """How durable, and how large.

    fsync: `always`: a record is on the disk before its call returns; concurrent records share one fsync. `interval`: at
    most interval_s after it, or at once where the call asks for it; what was written survives a kill of the process in
    any case, a loss of power once it is on the disk. `never`: the operating system decides.
    max_file_bytes: of one file, beyond its Summary and its last record.
    buffer_bytes: records that wait to be written, before calls wait.
    """

    fsync: Literal["always", "interval", "never"] = "interval"
    interval_s: float = 0.2
    max_file_bytes: int = 64 << 20
    buffer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.fsync not in ("always", "interval", "never"):
            raise ValueError(f"journal.fsync is {self.fsync!r}; choose one of always, interval, never")
        if not 0 < self.interval_s < float("inf"):
            raise ValueError(f"journal.interval_s is {self.interval_s}; must be a positive number of seconds")
        if self.max_file_bytes < 1024:
            raise ValueError(f"journal.max_file_bytes is {self.max_file_bytes}; must be at least 1024")
        if self.buffer_bytes < 1:
            raise ValueError(f"journal.buffer_bytes is {self.buffer_bytes}; must be at least 1")


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A record that is about to be written. index: in the list of results. number: among the content of its group."""

    entry: Entry
    index: int
    number: int
    packed: tuple[Parts, int]


class JournalLog:
    """Appends, cleans, and finds what is live.

    Raises:
        JournalError: there is no room for a first file, or the directory cannot be written.
    """

    def __init__(self, files: JournalFiles, *, state: JournalState, config: JournalConfig) -> None:
        self.files = files
        self.state = state
        self.cleaned_bytes = 0
        self._config = config
        files.begin(state.summary())

    def append(self, entries: Sequence[Entry]) -> list[JournalError | None]:
        """Write entries in order; for each None, or why it is not recorded."""
        results: list[JournalError | None] = []
        while len(results) < len(entries):
            left = entries[len(results) :]
            try:
                self.files.require_whole()
                self._make_room()
            except JournalError as error:
                return results + [error] * len(left)
            results += self._append_some(left)
        return results

    def clean(self, budget: int) -> bool:
        """Give back room, writing about `budget` bytes at most; whether there is more to do.

        Raises:
            JournalError: a file could not be read, written or removed. Nothing that is live is lost by it.
        """
        files = self.files
        while True:
            while len(files.all) > MIN_FILES and not files.oldest.live:
                files.sync()  # what ended its groups, or holds their content now
                files.remove(files.oldest)
            limit = 2 * (files.live_bytes + self._config.max_file_bytes + files.current.head_bytes)
            if len(files.all) <= MIN_FILES or files.num_bytes <= limit:
                return False
            if budget <= 0:
                return True
            budget -= self._move(files.oldest, budget)

    def set_aside_damaged(self) -> list[str]:
        """Move what is live out of damaged files and rename them; their new paths."""
        damaged = [file for file in self.files.all.values() if file.damaged]
        for file in damaged:
            while file.live:
                self._move(file, self._config.max_file_bytes)
        self.files.sync()
        return [self.files.set_aside(file) for file in damaged]

    def records(self, group: LiveGroup) -> list[tuple[DiskFile, Span, int]]:
        """(file, place, checksum seed) of the content of a group, in order; the caller closes the files, each once."""
        files = self.files.all
        handles = {number: files[number].handle.duplicate() for number in {span.file for span in group.spans}}
        return [(handles[span.file], span, files[span.file].seed) for span in group.spans]

    def release(self, groups: Iterable[LiveGroup]) -> None:
        """Groups are live no more."""
        for group in groups:
            for number, span in enumerate(group.spans):
                self.files.all[span.file].release(group.group, number)

    # ---- inside

    @property
    def _room(self) -> int:
        """Bytes that the current file takes, but for the rest of a last record."""
        current = self.files.current
        return self._config.max_file_bytes - (current.size - current.head_bytes)

    def _make_room(self) -> None:
        if self._room <= 0:
            self.files.begin(self.state.summary())

    def _append_some(self, entries: Sequence[Entry]) -> list[JournalError | None]:
        """Results of the first entries: up to one that depends on another of them, or to the end of the file."""
        results: list[JournalError | None] = []
        staged: list[_Staged] = []
        touched: set[Key] = set()
        room = self._room
        numbers: Counter[int] = Counter()
        for entry in entries:
            own, conflicting = _keys(entry)
            if room <= 0 or not touched.isdisjoint(conflicting):
                break
            try:
                record = self._stage(entry, len(results), staged, numbers)
            except JournalError as error:
                results.append(error)
                continue
            touched.update(own)
            staged.append(record)
            results.append(None)
            room -= record.packed[1]
        spans, error = self.files.write([record.packed for record in staged])
        for record, span in zip(staged, spans, strict=False):
            self._follow(record, span)
        for record in staged[len(spans) :]:
            results[record.index] = error
        return results

    def _stage(self, entry: Entry, index: int, before: Sequence[_Staged], numbers: Counter[int]) -> _Staged:
        """The record of an entry behind those `before` it; `numbers` counts content by group."""
        entry, number = checked(self.state, entry), 0
        if isinstance(entry.body, Observed | Sampled | Called | Closed):
            number = len(self.state.live[entry.group].spans) + numbers[entry.group]
        try:
            packed = self.files.pack(entry, number=number, ahead=len(before))
        except (TypeError, ValueError, OverflowError) as error:
            raise JournalError(f"{entry.body!r} of group {entry.group} cannot be recorded: {error}") from error
        numbers[entry.group] += 1
        return _Staged(entry, index, number, packed)

    def _follow(self, record: _Staged, span: Span) -> None:
        entry = record.entry
        if isinstance(entry.body, Observed | Sampled | Called | Closed):
            self.state.extend(entry.group, entry.trajectory, step_of(entry.body), span)
            self.files.current.hold(entry.group, record.number, span.size)
        else:
            self.release(self.state.apply(entry.body, group=entry.group))

    def _move(self, file: LogFile, budget: int) -> int:
        """Append live content of `file` anew; how many bytes."""
        self._make_room()
        budget = min(budget, self._room)
        moved: list[_Staged] = []
        for (group, number), size in file.live.items():
            if budget <= 0:
                break
            budget -= size
            entry = self.files.read(self.state.live[group].spans[number])
            packed = self.files.pack(entry, number=number, ahead=len(moved))
            moved.append(_Staged(entry, len(moved), number, packed))
        spans, error = self.files.write([record.packed for record in moved])
        for record, span in zip(moved, spans, strict=False):
            group = record.entry.group
            self.state.live[group].spans[record.number] = span
            file.release(group, record.number)
            self.files.current.hold(group, record.number, span.size)
            self.cleaned_bytes += span.size
        if error is not None:
            raise error
        return sum(span.size for span in spans)


def _keys(entry: Entry) -> tuple[list[Key], list[Key]]:
    """(what the entry changes, what no other entry of the same write may have changed before it)."""
    body, group = entry.body, entry.group
    match body:
        case Observed() | Sampled() | Called() | Closed():
            own: list[Key] = [(group, entry.trajectory), f"content {group}"]
            return own, [(group, entry.trajectory), f"group {group}"]
        case Taken() | Trained():
            keys: list[Key] = [f"group {g}" for g in body.groups]
            keys += ["steps"] if isinstance(body, Trained) else []
            return keys, [*keys, *(f"content {g}" for g in body.groups)]
        case Checkpointed():
            return ["steps"], ["steps"]
        case Published():
            return ["versions"], ["versions"]
        case Admitted():
            return ["ids", f"group {group}"], ["ids"]
        case _:
            return [f"group {group}"], [f"group {group}", f"content {group}"]
