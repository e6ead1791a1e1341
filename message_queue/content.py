"""Content that rollouts append, written to disk by the process in which it is made.

    append(records) ──> one thread: arrays to <name>-000001.data, then one transaction in <name>.sqlite

Each writer has files of its own; `content_reader` reads those of all writers. A record exists once its transaction
is committed. Bytes at the end of a data file that no row of the index names are left over by a kill, and the next write
of a living writer replaces them. A kill of the process costs no record whose `append` has returned; with `fsync` a loss
of power costs none either. Data files only grow, and a file is removed once all its groups are forgotten.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from message_queue.content_format import (
    APPLICATION_ID,
    FORMAT,
    RECORDS_TABLE,
    WRITER_TABLE,
    IndexRow,
    checksum,
    connect,
    data_path,
    encode,
)
from message_queue.disk_errors import JournalBroken, JournalBusy, JournalClosed, JournalError, disk_error
from message_queue.progress import RolloutRecord

FILE_BYTES = 64 << 20  # of a data file, after which a new one is started
MAX_PARTS = 1024  # buffers in one call to the operating system (IOV_MAX of Linux)

T = TypeVar("T")


class ContentWriter:
    """Writes records in order. Made by `open`, and used from one event loop."""

    def __init__(self, files: _Files, thread: ThreadPoolExecutor) -> None:
        self._files = files
        self._thread = thread
        self._turn = asyncio.Lock()
        self._waiting: list[RolloutRecord] = []
        self._next_write: asyncio.Task[None] | None = None

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
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"content-{name}")
        make = partial(_Files, directory, name=name, run=run, fsync=fsync)
        try:
            return cls(await asyncio.get_running_loop().run_in_executor(thread, make), thread)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        """Return once the records are written. They are written even if the caller is cancelled.

        Records that arrive while the disk works travel together in the next write. Arrays must not change any more.

        Raises:
            JournalFull: none of the records is written; the call can be made again.
            JournalError: the disk failed, or the writer was closed.
        """
        self._waiting += records
        if self._next_write is None:
            self._next_write = asyncio.create_task(self._write_waiting())
            self._next_write.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next_write)

    async def forget(self, groups: Iterable[int]) -> None:
        """Remove the records of groups, and data files without any other.

        Raises:
            JournalError: the disk failed, or the writer was closed.
        """
        await self._after_waiting(partial(self._files.forget, frozenset(groups)))

    async def close(self) -> None:
        """Write what waits and close the files, which stay. Idempotent."""
        await self._after_waiting(self._files.close)

    async def _write_waiting(self) -> None:
        async with self._turn:
            records, self._waiting, self._next_write = self._waiting, [], None
            await self._in_thread(partial(self._files.append, records))

    async def _after_waiting(self, work: Callable[[], None]) -> None:
        """Do work once the records that wait are written."""
        if self._next_write is not None:
            await asyncio.wait([self._next_write])
        async with self._turn:
            await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class _Files:
    """Data files and index of one writer. All calls are made in one thread."""

    def __init__(self, directory: Path, *, name: str, run: str, fsync: bool) -> None:
        self._directory, self._name, self._fsync = directory, name, fsync
        self._path = directory / f"{name}.sqlite"
        self._data: int | None = None  # descriptor of the newest data file
        self._file = self._size = self._number = 0
        self._groups: dict[int, set[int]] = {}  # data file -> groups that have a record in it
        self._failure: JournalError | None = None
        self._make_index()
        try:
            self._index = connect(self._path)
            self._index.execute("PRAGMA journal_mode=PERSIST")
            self._index.execute(f"PRAGMA synchronous={'FULL' if fsync else 'OFF'}")
            with self._index:  # one transaction: a reader finds all or nothing
                self._index.execute("BEGIN IMMEDIATE")
                self._index.execute(f"PRAGMA application_id={APPLICATION_ID}")
                self._index.execute(f"PRAGMA user_version={FORMAT}")
                self._index.execute(WRITER_TABLE)
                self._index.execute(RECORDS_TABLE)
                self._index.execute("INSERT INTO writer VALUES (?)", (run,))
        except sqlite3.Error as error:
            raise disk_error(error, what="create", path=str(self._path)) from error

    def append(self, records: Sequence[RolloutRecord]) -> None:
        """Write the arrays, then name them in the index."""
        self._require_open()
        rows, parts = self._encoded(records)
        size = sum(map(len, parts))
        self._write(parts, size)
        try:
            with self._index:
                self._index.executemany(f"INSERT INTO records VALUES ({','.join('?' * len(IndexRow._fields))})", rows)
        except sqlite3.Error as error:
            raise self._failed(error, what=f"write {len(rows)} rows to", path=self._path) from error
        self._size += size
        self._groups[self._file].update(record.group for record in records)

    def forget(self, groups: frozenset[int]) -> None:
        """Forget in the index first: a row never names a file that is gone."""
        self._require_open()
        try:
            with self._index:
                self._index.executemany("DELETE FROM records WHERE group_id = ?", [(group,) for group in groups])
        except sqlite3.Error as error:
            raise self._failed(error, what="delete rows of", path=self._path) from error
        for held in self._groups.values():
            held -= groups
        self._remove_empty()

    def close(self) -> None:
        """Idempotent."""
        if not isinstance(self._failure, JournalClosed):
            self._failure = JournalClosed(f"the content of writer {self._name} in {self._directory} was closed")
            self._index.close()
            if self._data is not None:
                os.close(self._data)

    def _encoded(self, records: Sequence[RolloutRecord]) -> tuple[list[IndexRow], list[memoryview]]:
        if self._data is None or self._size >= FILE_BYTES:
            self._start_file()
        rows: list[IndexRow] = []
        parts: list[memoryview] = []
        start = self._size
        for record in records:
            self._number += 1
            kind, fields, arrays = encode(record.what)
            identity = (record.group, record.trajectory, record.handout, self._number, record.at)
            length = sum(map(len, arrays))
            digest = checksum(identity, kind, fields, arrays)
            rows.append(IndexRow(*identity, kind, fields, self._file, start, length, digest))
            parts += [part for part in arrays if part]
            start += length
        return rows, parts

    def _write(self, parts: Sequence[memoryview], size: int) -> None:
        assert self._data is not None, "the records were encoded for a file"
        waiting, at = list(parts), self._size
        try:
            while waiting:
                written = os.pwritev(self._data, waiting[:MAX_PARTS], at)
                at += written
                while waiting and written >= len(waiting[0]):
                    written -= len(waiting.pop(0))
                if written:
                    waiting[0] = waiting[0][written:]
            if self._fsync:
                os.fdatasync(self._data)
        except OSError as error:
            path = data_path(self._directory, self._name, self._file)
            raise self._failed(error, what=f"write {size} bytes to", path=path) from error

    def _start_file(self) -> None:
        path = data_path(self._directory, self._name, self._file + 1)
        try:
            data = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            if self._fsync:
                _sync_folder(self._directory)
            if self._data is not None:
                os.close(self._data)
        except OSError as error:
            raise self._failed(error, what="create", path=path) from error
        self._data, self._file, self._size = data, self._file + 1, 0
        self._groups[self._file] = set()
        self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove data files without a group, but for the newest."""
        for file in [file for file, groups in self._groups.items() if not groups and file != self._file]:
            path = data_path(self._directory, self._name, file)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._failed(error, what="remove", path=path) from error
            del self._groups[file]

    def _make_index(self) -> None:
        """An empty index of a new writer; the directory comes with it."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, what="create", path=str(self._directory)) from error
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError as error:
            raise JournalBusy(
                f"{self._path} is the content of another writer; give every writer a name of its own"
            ) from error
        except OSError as error:
            raise disk_error(error, what="create", path=str(self._path)) from error

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _failed(self, error: OSError | sqlite3.Error, *, what: str, path: Path) -> JournalError:
        """The error to raise. Nothing more is written if the disk's content is unknown."""
        failure = disk_error(error, what=what, path=str(path))
        if isinstance(failure, JournalBroken):
            self._failure = failure
        return failure


def _sync_folder(folder: Path) -> None:
    """Return once the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
