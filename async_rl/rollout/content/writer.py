"""Content that rollouts append, written to disk by the process that makes it.

    append(records) ──> one thread: arrays to <name>-000001.data, then one transaction in <name>.sqlite

Each writer has separate files; `reader` reads those of all writers. A record exists once its transaction
is committed. Bytes at the end of a data file that no row of the index names are left over by a kill, and the next write
of a living writer replaces them. A kill of the process costs no record whose `append` has returned; with `fsync` a loss
of power costs none either. Data files only grow, and a file is removed once all its groups are forgotten.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from async_rl.files.atomic_dir import sync_path
from async_rl.rollout.content.format import (
    APPLICATION_ID,
    FORMAT,
    RECORDS_TABLE,
    WRITER_TABLE,
    IndexRow,
    RolloutRecord,
    data_path,
    encode,
    row_checksum,
)
from message_queue.errors import JournalBroken, JournalBusy, JournalError
from message_queue.sqlite_file import connect, disk_errors, stamp

FILE_BYTES = 64 << 20  # of a data file; then a new one is started
MAX_PARTS = 1024  # buffers in one call to the operating system (IOV_MAX of Linux)


class ContentWriter:
    """Writes records in order. Made by `open`, and used from one event loop."""

    def __init__(self, directory: Path, *, name: str, run: str, fsync: bool) -> None:
        self._directory, self._name, self._fsync = directory, name, fsync
        self._path = directory / f"{name}.sqlite"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"content-{name}")
        self._data: int | None = None  # descriptor of the newest data file
        self._file = self._size = self._number = 0
        self._groups: dict[int, set[int]] = {}  # data file -> groups that have a record in it
        self._failure: JournalError | None = None
        with disk_errors("create", self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._index = self._new_index(run)

    @classmethod
    async def open(cls, directory: Path, *, name: str, run: str, fsync: bool) -> ContentWriter:
        """Make the files of a new writer.

        Args:
            directory: folder for the content of all writers, and for nothing else; made if it does not exist.
            name: prefix of the files, unique among all writers that the directory has seen.
            run: identity of the run; group ids are unique in a run only.
            fsync: whether written records also survive a loss of power.

        Raises:
            JournalBusy: the directory has a writer of that name.
            JournalError: the disk refuses.
        """
        return await asyncio.to_thread(cls, directory, name=name, run=run, fsync=fsync)

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        """Return once the records are written. They are written even if the caller is cancelled.

        Arrays must not change any more.

        Raises:
            JournalUnwritable: none of the records is written; the call can be repeated.
            JournalError: the disk failed, or the writer was closed.
        """
        await self._in_thread(partial(self._append, records))

    async def forget(self, groups: Iterable[int]) -> None:
        """Remove the records of groups, and data files without any other.

        Raises:
            JournalError: the disk failed, or the writer was closed.
        """
        await self._in_thread(partial(self._forget, frozenset(groups)))

    async def close(self) -> None:
        """Write what waits and close the files, without removing them. Idempotent."""
        await self._in_thread(self.release)

    def release(self) -> None:
        """Close the files without what waits to be written. Idempotent."""
        self._failure = JournalError(f"the content of writer {self._name} in {self._directory} was closed")
        self._index.close()
        if self._data is not None:
            os.close(self._data)
            self._data = None

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Do work after all earlier work, also if the caller is cancelled."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may be gone
        await asyncio.shield(done)

    # ---- in the thread

    def _new_index(self, run: str) -> sqlite3.Connection:
        try:
            self._path.touch(exist_ok=False)
        except FileExistsError as error:
            raise JournalBusy(
                f"{self._path} is the content of another writer; give every writer a name of its own"
            ) from error
        index = connect(self._path)
        index.execute("PRAGMA journal_mode=PERSIST")
        index.execute(f"PRAGMA synchronous={'FULL' if self._fsync else 'OFF'}")
        with index:  # one transaction: a reader finds all or nothing
            index.execute("BEGIN IMMEDIATE")
            stamp(index, application=APPLICATION_ID, version=FORMAT)
            index.execute(WRITER_TABLE)
            index.execute(RECORDS_TABLE)
            index.execute("INSERT INTO writer VALUES (?)", (run,))
        return index

    def _append(self, records: Sequence[RolloutRecord]) -> None:
        """Write the arrays, then name them in the index."""
        self._require_open()
        rows, parts = self._encoded(records)
        size = sum(map(len, parts))
        self._write(parts, size)
        with self._disk_errors(f"write {len(rows)} rows to", self._path), self._index:
            self._index.executemany(f"INSERT INTO records VALUES ({','.join('?' * len(IndexRow._fields))})", rows)
        self._size += size
        self._groups[self._file].update(record.group for record in records)

    def _forget(self, groups: frozenset[int]) -> None:
        """Forget in the index first: a row never names a file that is gone."""
        self._require_open()
        with self._disk_errors("delete rows of", self._path), self._index:
            self._index.executemany("DELETE FROM records WHERE group_id = ?", [(group,) for group in groups])
        for stored in self._groups.values():
            stored -= groups
        self._remove_empty()

    def _encoded(self, records: Sequence[RolloutRecord]) -> tuple[list[IndexRow], list[memoryview]]:
        if self._data is None or self._size >= FILE_BYTES:
            self._start_file()
        rows: list[IndexRow] = []
        parts: list[memoryview] = []
        start = self._size
        for record in records:
            self._number += 1
            kind, fields, arrays = encode(record.what)
            row = IndexRow(
                group=record.group,
                trajectory=record.trajectory,
                path=record.path,
                handout=record.handout,
                number=self._number,
                at=record.at,
                kind=kind,
                fields=fields,
                file=self._file,
                start=start,
                length=sum(map(len, arrays)),
                checksum=b"",
            )
            rows.append(row._replace(checksum=row_checksum(row, arrays)))
            parts += [part for part in arrays if part]
            start += row.length
        return rows, parts

    def _write(self, parts: Sequence[memoryview], size: int) -> None:
        assert self._data is not None, "the records were encoded for a file"
        waiting, at = list(parts), self._size
        with self._disk_errors(f"write {size} bytes to", data_path(self._directory, self._name, self._file)):
            while waiting:
                written = os.pwritev(self._data, waiting[:MAX_PARTS], at)
                at += written
                while waiting and written >= len(waiting[0]):
                    written -= len(waiting.pop(0))
                if written:
                    waiting[0] = waiting[0][written:]
            if self._fsync:
                os.fdatasync(self._data)

    def _start_file(self) -> None:
        path = data_path(self._directory, self._name, self._file + 1)
        with self._disk_errors("create", path):
            data = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            if self._fsync:
                sync_path(self._directory)
            if self._data is not None:
                os.close(self._data)
        self._data, self._file, self._size = data, self._file + 1, 0
        self._groups[self._file] = set()
        self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove data files without a group, but for the newest."""
        for file in [file for file, groups in self._groups.items() if not groups and file != self._file]:
            path = data_path(self._directory, self._name, file)
            with self._disk_errors("remove", path):
                path.unlink(missing_ok=True)
            del self._groups[file]

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _disk_errors(self, what: str, path: Path) -> Generator[None]:
        """As `disk_errors`; nothing more is written if the disk's content is unknown."""
        try:
            with disk_errors(what, path):
                yield
        except JournalBroken as failure:
            self._failure = failure
            raise
