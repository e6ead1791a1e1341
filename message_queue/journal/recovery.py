"""Reads a journal from the disk after the run stopped, whatever state it is in, and says what could not be read.

A record counts if its header and body are whole. What is not is skipped up to the next record that is. Behind the last
record of the last file that is a write that was cut short: it is cut off. Anywhere else it is damage, and the sequence
numbers tell how many records are lost:

    content of a group   the group ends before the first record that is missing; it is open again
    anything else        the next Summary makes good for it; without one, the report says that records are lost

Everything before the damage is recovered, and of what comes after it all that does not build on lost content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from message_queue.journal.disk import Disk
from message_queue.journal.files import LogFile, file_name
from message_queue.journal.format import (
    ALIGNMENT,
    FILE_BYTES,
    NO_GROUP,
    RECORD_MAGIC,
    Entry,
    RecordHeader,
    read_body,
    read_file_header,
    read_header,
)
from message_queue.journal.groups import Span, Step, step_of
from message_queue.journal.records import Called, Closed, Dropped, Observed, Sampled, Summary, Taken, Trained
from message_queue.journal.state import JournalStart, JournalState

_NAME = re.compile(r"(\d{12})\.journal")
_MAGIC = re.compile(re.escape(RECORD_MAGIC))


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes that are no whole record.

    path, offset, size: where. lost_records: that were there, as far as sequence numbers tell; 0 where a write was cut
    short. what: the record whose body is damaged, where its header is whole.
    """

    path: str
    offset: int
    size: int
    lost_records: int = 0
    what: str = ""

    def __str__(self) -> str:
        what = f", the first: {self.what}" if self.what else ""
        return f"{self.path}: {self.size} bytes from byte {self.offset}, {self.lost_records} records{what}"


@dataclass(frozen=True, slots=True)
class LostContent:
    """A group whose records from number `kept` on are lost, of `known`; it is open again."""

    group: int
    kept: int
    known: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What was read, and what could not be.

    cut: what is behind the last whole record of the journal: a write that was cut short.
    damage: anywhere else. lost_content: groups that lost records. lost_groups: of which the admission is lost; they
    count as dropped. set_aside: new paths of damaged files.
    """

    files: int
    records: int
    num_bytes: int
    cut: tuple[Damage, ...] = ()
    damage: tuple[Damage, ...] = ()
    lost_content: tuple[LostContent, ...] = ()
    lost_groups: tuple[int, ...] = ()
    set_aside: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether nothing is lost but what a write that was cut short held."""
        return not (self.damage or self.lost_content or self.lost_groups)

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"journal: {self.records} records in {self.files} files, {self.num_bytes} bytes"]
        lines += [f"cut off, an unfinished write: {cut}" for cut in self.cut]
        lines += [f"damaged: {damage}" for damage in self.damage]
        lines += [f"group {g.group} lost its records {g.kept} to {g.known - 1}; it is open" for g in self.lost_content]
        lines += [f"group {group} is lost: its admission cannot be read" for group in self.lost_groups]
        return lines + [f"kept for inspection: {path}" for path in self.set_aside]


class _Piece(NamedTuple):
    span: Span
    trajectory: int
    step: Step


@dataclass(frozen=True, slots=True, eq=False)
class _Bad:
    """Bytes of a file that are no record; `header` where that is whole."""

    offset: int
    end: int
    header: RecordHeader | None


class Replay:
    """What the records of all files add up to.

    state: without the content of its groups until `finish`. files: by number.
    """

    def __init__(self, disk: Disk, *, run: str) -> None:
        self.state = JournalState(JournalStart())
        self.files: dict[int, LogFile] = {}
        self.next_seq = 0
        self.empty = True
        self._disk = disk
        self._run = run
        self._found: dict[int, dict[int, _Piece]] = {}
        self._expected: dict[int, int] = {}
        self._orphans: set[int] = set()
        self._unread: list[tuple[LogFile, _Bad]] = []
        self._behind: list[tuple[LogFile, _Bad]] = []
        self._damage: list[Damage] = []
        self._records = 0

    @property
    def next_number(self) -> int:
        """Of the next file."""
        return max(self.files, default=0) + 1

    def read(self) -> None:
        """Read all files.

        Raises:
            JournalFormatError, JournalRunError: they are not of this run. OSError: the disk failed.
        """
        names = sorted(match.group(1) for match in map(_NAME.fullmatch, self._disk.names()) if match)
        for number in map(int, names):
            file = LogFile(number, self._disk.open(file_name(number)), run=self._run)
            self.files[number] = file
            self._read_file(file)

    def finish(self) -> RecoveryReport:
        """Give the groups their content. What is behind the last record is there until `cut`."""
        first = {file.number: bad for file, bad in reversed(self._unread)}
        self._behind = [(self.files[number], bad) for number, bad in first.items()]
        lost = [
            LostContent(group=group, kept=kept, known=known)
            for group in self.state.live
            if (kept := self._fold(group)) < (known := self._expected.get(group, 0))
        ]
        orphans = sorted({*self._orphans, *self._found} - self.state.live.keys())
        self.state.lose(orphans)
        return RecoveryReport(
            files=len(self.files),
            records=self._records,
            num_bytes=sum(file.size for file in self.files.values()),
            cut=tuple(self._unfinished(file, bad) for file, bad in self._behind),
            damage=tuple(self._damage),
            lost_content=tuple(lost),
            lost_groups=tuple(orphans),
        )

    def cut(self) -> None:
        """Cut what is behind the last record; a file that is set aside anyway stays as it is.

        Do it once the journal is open: until then the next attempt has to report it too.
        """
        for file, bad in self._behind:
            if not file.damaged:
                file.handle.truncate(bad.offset)
                file.size = bad.offset

    # ---- inside

    def _read_file(self, file: LogFile) -> None:
        before = self._records
        file.size = file.handle.size()
        data = file.handle.read(0, file.size)
        first_seq = read_file_header(data, run=self._run, path=self._disk.path(file.name))
        if self.empty and first_seq is not None:
            self.next_seq = first_seq
        for found in _records(data, start=0 if first_seq is None else FILE_BYTES, seed=file.seed):
            if isinstance(found, _Bad):
                self._unread.append((file, found))
                continue
            offset, header, entry = found
            self._settle_unread(header.seq)
            self._records += 1
            self.next_seq, self.empty = header.seq + 1, False
            self._follow(file, Span(file.number, offset, header.size), header, entry)
        file.damaged = file.damaged or self._records == before

    def _settle_unread(self, seq: int) -> None:
        """A record came after bytes that could not be read: they are damage, unless no record is missing."""
        lost = seq - self.next_seq
        for file, bad in self._unread:
            if lost <= 0 and bad.end == file.size:
                continue  # what was left of a write that was taken back
            file.damaged = True
            if bad.header is not None and bad.header.kind in (Observed, Sampled, Called, Closed):
                self._expect(bad.header.group, bad.header.number)
            self._damage.append(
                Damage(
                    path=self._disk.path(file.name),
                    offset=bad.offset,
                    size=bad.end - bad.offset,
                    lost_records=lost,
                    what=_describe(bad.header),
                )
            )
            lost = 0 if bad.header is None else lost - 1
        self._unread.clear()

    def _follow(self, file: LogFile, span: Span, header: RecordHeader, entry: Entry) -> None:
        body, group = entry.body, header.group
        match body:
            case Summary():
                self._begin_from(body)
                if span.offset == FILE_BYTES:
                    file.head_bytes = span.offset + span.size
            case Observed() | Sampled() | Called() | Closed():
                self._expect(group, header.number)
                piece = _Piece(span, header.trajectory, step_of(body))
                self._found.setdefault(group, {})[header.number] = piece
            case _:
                groups = body.groups if isinstance(body, Taken | Trained) else (group,)
                if isinstance(body, Taken | Trained | Dropped):
                    self._orphans.update(g for g in groups if g not in self.state.live)
                for ended in self.state.apply(body, group=group):
                    self._forget(ended.group)

    def _begin_from(self, summary: Summary) -> None:
        """A Summary replaces all but content, and content that it does not know is not there."""
        self.state = JournalState.of(summary)
        self._orphans = {group for group in self._orphans if group >= summary.next_group}
        records = {head.group: head.records for head in summary.groups}
        for group in [g for g in self._found if g not in records and g < summary.next_group]:
            self._forget(group)
        for group, count in records.items():
            found = self._found.get(group, {})
            self._found[group] = {number: piece for number, piece in found.items() if number < count}
            self._expected[group] = count

    def _expect(self, group: int, number: int) -> None:
        self._expected[group] = max(self._expected.get(group, 0), number + 1)

    def _forget(self, group: int) -> None:
        self._found.pop(group, None)
        self._expected.pop(group, None)

    def _fold(self, group: int) -> int:
        """Give a group its content, up to the first record that is missing; how many there are."""
        found, live = self._found.get(group, {}), self.state.live[group]
        for number in range(self._expected.get(group, 0)):
            piece = found.get(number)
            if piece is None or piece.step.at != live.trajectory(piece.trajectory).length:
                return number
            self.state.extend(group, piece.trajectory, piece.step, piece.span)
            self.files[piece.span.file].hold(group, number, piece.span.size)
        return self._expected.get(group, 0)

    def _unfinished(self, file: LogFile, bad: _Bad) -> Damage:
        path = self._disk.path(file.name)
        return Damage(path=path, offset=bad.offset, size=file.size - bad.offset, what=_describe(bad.header))


def _records(data: memoryview, *, start: int, seed: int) -> Iterator[tuple[int, RecordHeader, Entry] | _Bad]:
    """The records of a file with their offsets, and what is between them."""
    offset = start
    while offset < len(data):
        header = read_header(data, offset, seed=seed)
        entry = None if header is None else read_body(data, offset, header)
        if header is not None and entry is not None:
            yield offset, header, entry
            offset += header.size
            continue
        end = _next_record(data, offset + ALIGNMENT, seed=seed) if header is None else offset + header.size
        end = min(end, len(data))
        yield _Bad(offset, end, header)
        offset = end


def _describe(header: RecordHeader | None) -> str:
    if header is None:
        return ""
    kind = header.kind.__name__
    return kind if header.group == NO_GROUP else f"{kind} of group {header.group}"


def _next_record(data: memoryview, offset: int, *, seed: int) -> int:
    """Where the next record header that is whole starts; the end where there is none."""
    for match in _MAGIC.finditer(data, offset):
        if match.start() % ALIGNMENT == 0 and read_header(data, match.start(), seed=seed) is not None:
            return match.start()
    return len(data)
