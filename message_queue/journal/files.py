"""The files of a journal: one grows, the others are read, renamed and removed. Knows records, not what they mean."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from message_queue.journal.disk import MAX_PARTS, Disk, DiskFile
from message_queue.journal.errors import JournalBroken, JournalError, disk_error
from message_queue.journal.format import Entry, file_seed, pack_file_header, pack_record, read_body, read_header
from message_queue.journal.groups import Span
from message_queue.journal.records import Summary

Parts = list[bytes | memoryview]


class LogFile:
    """A file of the journal.

    head_bytes: of its header and Summary. live: (group, number) -> size of the records in it that are live content.
    damaged: some of it cannot be read.
    """

    __slots__ = ("damaged", "handle", "head_bytes", "live", "live_bytes", "number", "seed", "size")

    def __init__(self, number: int, handle: DiskFile, *, run: str) -> None:
        self.number = number
        self.handle = handle
        self.seed = file_seed(run, number)
        self.size = self.head_bytes = self.live_bytes = 0
        self.live: dict[tuple[int, int], int] = {}
        self.damaged = False

    @property
    def name(self) -> str:
        return file_name(self.number)

    def hold(self, group: int, number: int, size: int) -> None:
        """A record in it is live."""
        self.live[group, number] = size
        self.live_bytes += size

    def release(self, group: int, number: int) -> None:
        """A record in it is live no more, or elsewhere."""
        self.live_bytes -= self.live.pop((group, number))


def file_name(number: int) -> str:
    """Of a file of the journal."""
    return f"{number:012d}.journal"


class JournalFiles:
    """All files, the newest of which takes records. Call `begin` before anything else.

    Args:
        durable: sync what is written, when asked to.
        existing: by number, those of the directory.
        next_seq: sequence number of the next record.

    num_syncs: so far. broken: why nothing is written any more.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        run: str,
        durable: bool,
        existing: dict[int, LogFile],
        next_number: int = 1,
        next_seq: int = 0,
    ) -> None:
        self.all = existing
        self.seq = next_seq
        self.num_syncs = 0
        self.dirty = False
        self.broken: JournalBroken | None = None
        self._disk = disk
        self._run = run
        self._durable = durable
        self._next_number = next_number

    @property
    def current(self) -> LogFile:
        """The one that takes records."""
        return self.all[max(self.all)]

    @property
    def oldest(self) -> LogFile:
        return self.all[min(self.all)]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.all.values())

    @property
    def live_bytes(self) -> int:
        return sum(file.live_bytes for file in self.all.values())

    def begin(self, summary: Summary) -> None:
        """Go on in a new file; what was written before is durable then.

        Raises:
            JournalError: it could not be made; the one before still takes records.
        """
        self.sync()
        number, self._next_number = self._next_number, self._next_number + 1
        path = self._disk.path(file_name(number))
        try:
            file = LogFile(number, self._disk.create(file_name(number)), run=self._run)
        except OSError as error:
            raise disk_error(error, what="create", path=path) from error
        header = pack_file_header(run=self._run, number=number, first_seq=self.seq)
        parts = [header, *pack_record(Entry(summary), seq=self.seq, number=0, seed=file.seed)]
        try:
            file.size = file.head_bytes = _write_parts(file.handle, parts, at=0)
            if self._durable:
                file.handle.sync()
                self._disk.sync()
                self.num_syncs += 1
        except (OSError, ShortWrite) as error:
            cause = error.cause if isinstance(error, ShortWrite) else error
            with suppress(OSError):  # an empty file that stays does no harm
                file.handle.close()
                self._disk.remove(file.name)
            raise disk_error(cause, what=f"write {sum(map(len, parts))} bytes to", path=path) from error
        self.all[number] = file
        self.seq += 1

    def pack(self, entry: Entry, *, number: int, ahead: int) -> tuple[Parts, int]:
        """A record that `ahead` others are written before, and its bytes."""
        parts = pack_record(entry, seq=self.seq + ahead, number=number, seed=self.current.seed)
        return parts, sum(map(len, parts))

    def write(self, records: Sequence[tuple[Parts, int]]) -> tuple[list[Span], JournalError | None]:
        """Append packed records; where they are, and why there are no more of them. What was begun is taken back."""
        file, error = self.current, None
        ends = list(accumulate((size for _, size in records), initial=file.size))
        try:
            _write_parts(file.handle, [part for parts, _ in records for part in parts], at=file.size)
        except ShortWrite as short:
            what = f"write {ends[-1] - short.end} of {ends[-1] - file.size} bytes to"
            ends = ends[: bisect_right(ends, short.end)]
            error = self._take_back(short.cause, what=what, size=ends[-1])
        spans = [Span(file.number, start, end - start) for start, end in pairwise(ends)]
        self.seq += len(spans)
        self.dirty = self.dirty or bool(spans)
        file.size = ends[-1]
        return spans, error

    def sync(self) -> None:
        """Return once all records survive a loss of power, where that is asked for.

        Raises:
            JournalBroken: the disk did not take them.
        """
        self.require_whole()
        if self.dirty and self._durable:
            try:
                self.current.handle.sync()
            except OSError as error:
                raise self._break(error, what="sync") from error
            self.num_syncs += 1
        self.dirty = False

    def read(self, span: Span) -> Entry:
        """A record.

        Raises:
            JournalBroken: it cannot be read any more.
        """
        file = self.all[span.file]
        try:
            data = file.handle.read(span.offset, span.size)
        except OSError as error:
            raise self._break(error, what="read") from error
        entry = read_record(data, seed=file.seed)
        if entry is None:
            self.broken = JournalBroken(
                f"journal file {self._disk.path(file.name)} is damaged at byte {span.offset}; restart the run, which "
                "recovers what can be and reports the rest"
            )
            raise self.broken
        return entry

    def remove(self, file: LogFile) -> None:
        """Give up a file.

        Raises:
            JournalError: it is still in the directory, which does no harm.
        """
        file.handle.close()
        del self.all[file.number]
        try:
            self._disk.remove(file.name)
        except OSError as error:
            raise disk_error(error, what="remove", path=self._disk.path(file.name)) from error

    def set_aside(self, file: LogFile) -> str:
        """Rename a file, so that it is no part of the journal any more; its new path."""
        file.handle.close()
        del self.all[file.number]
        new = f"{file.name}.damaged"
        try:
            self._disk.rename(file.name, new)
            if self._durable:
                self._disk.sync()
        except OSError as error:
            raise disk_error(error, what="rename", path=self._disk.path(file.name)) from error
        return self._disk.path(new)

    def close(self) -> None:
        """Close all files and let others open the journal; what is not synced stays so."""
        for file in self.all.values():
            file.handle.close()
        self._disk.unlock()

    def require_whole(self) -> None:
        """Raise what broke the journal, if something did."""
        if self.broken is not None:
            raise self.broken

    # ---- inside

    def _take_back(self, cause: OSError, *, what: str, size: int) -> JournalError:
        try:
            self.current.handle.truncate(size)
        except OSError as error:
            return self._break(error, what=f"cut back to {size} bytes")
        error = disk_error(cause, what=what, path=self._disk.path(self.current.name))
        if isinstance(error, JournalBroken):
            self.broken = error
        return error

    def _break(self, error: OSError, *, what: str) -> JournalBroken:
        """After this nobody knows what the disk holds."""
        cause = error.strerror or str(error)
        path = self._disk.path(self.current.name)
        self.broken = JournalBroken(f"could not {what} {path} ({cause}); restart the run once the disk works again")
        return self.broken


class ShortWrite(Exception):
    """The disk took bytes only up to offset `end`."""

    def __init__(self, cause: OSError, end: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.end = end


def read_record(data: memoryview, *, seed: int) -> Entry | None:
    """The record that `data` starts with; None where it is cut or damaged."""
    header = read_header(data, 0, seed=seed)
    return None if header is None else read_body(data, 0, header)


def _write_parts(handle: DiskFile, parts: Sequence[bytes | memoryview], *, at: int) -> int:
    """Write all parts, one after the other from offset `at`; the end.

    Raises:
        ShortWrite: the disk took only some.
    """
    left = list(reversed(parts))
    while left:
        try:
            count = handle.write(left[: -MAX_PARTS - 1 : -1], at)
            if not count:
                raise OSError(errno.ENOSPC, "the disk takes no more bytes")
        except OSError as error:
            raise ShortWrite(error, at) from error
        at += count
        while left and count >= len(left[-1]):
            count -= len(left.pop())
        if count:
            left[-1] = memoryview(left[-1])[count:]
    return at
