"""The journal of events: one SQLite file, from which a restart makes the state of the queue again.

    <output_dir>/journal/events.sqlite
        head, head_copy   run, settings and header of the state at the last checkpoint or start, each stored twice
        groups            groups of that state, one row each
        events            events since then, in order

Events that wait travel together in one transaction, in a thread of their own. A call is answered after the commit, so a
kill of any process loses no answered call. Every row has a checksum; a damaged row or page is reported and skipped.
After a failed write the journal refuses everything, because the state of the queue is then ahead of the file.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import sqlite3
import zlib
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from message_queue.disk_errors import (
    JournalBroken,
    JournalBusy,
    JournalError,
    JournalFormatError,
    JournalFull,
    JournalRunError,
    JournalUnwritable,
)
from message_queue.events import Event
from message_queue.state import GroupState, StateHeader

T = TypeVar("T")
Settings = Mapping[str, int | str]  # config field -> value

FILE, LOCK = "events.sqlite", "events.lock"
APPLICATION = 0x6172_6C65
FORMAT = 2  # 1 was a directory of *.journal files
_META, _HEADER = 0, 1  # ids of the rows of `head`
_TABLES = ("head", "head_copy", "groups", "events")
_PROBED_ROWS = 10_000  # looked up one by one behind the last row that can be read


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """How durable the journal is."""

    fsync: bool = False
    """True: an answered call survives a loss of power. False: it survives a kill of any process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvents:
    """Contents of a journal."""

    empty: bool = True
    """Whether the journal is new."""
    settings: Settings = field(default_factory=dict[str, int | str])
    """Settings of the run that wrote it."""
    header: StateHeader | None = None
    """State without groups before the events; None if both copies are damaged."""
    groups: tuple[GroupState, ...] = ()
    """Groups of that state."""
    events: tuple[Event, ...] = ()
    """Events after it, in order."""
    lost_events: int = 0
    """Events that cannot be read."""
    damage: tuple[str, ...] = ()
    """One sentence for each damaged place."""


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    settings: dict[str, int | str]
    next_seq: int
    """`id` of the first event after the header."""


@dataclass(frozen=True, slots=True)
class _Base:
    header: StateHeader
    groups: Sequence[GroupState]


class EventJournal:
    """Stores events of one queue. Belongs to one event loop.

    Args:
        store: opened by `open_store`, and based on the state of the queue.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[Event | _Base] = []
        self._written: asyncio.Future[None] | None = None  # of `_pending`
        self._flushing: asyncio.Task[None] | None = None
        self._error: JournalError | None = None

    def record(self, events: Iterable[Event]) -> Awaitable[None]:
        """Store events in one transaction, after all before them; the result is awaited for the commit.

        Raises:
            JournalError: an earlier write failed, or the journal is closed. The awaitable raises it for this write.
        """
        return self._submit(events)

    def rebase(self, header: StateHeader, groups: Sequence[GroupState]) -> Awaitable[None]:
        """Store the whole state and delete the events before it, in one transaction.

        Raises: as `record`.
        """
        return self._submit([_Base(header, groups)])

    async def in_thread(self, work: Callable[[], T]) -> T:
        """`work()` in the thread of the journal."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def sync(self) -> None:
        """Return once everything before is stored.

        Raises: as `record`.
        """
        await self._submit([])

    async def close(self) -> None:
        """Store pending events and let other processes open the journal. Idempotent."""
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        self._error = self._error or JournalError(f"the journal {self._store.path} is closed")
        await self.in_thread(self._store.close)

    # ---- inside

    def _submit(self, items: Iterable[Event | _Base]) -> Awaitable[None]:
        if self._error is not None:
            raise self._error
        if self._written is None:
            self._written = asyncio.get_running_loop().create_future()
            self._written.add_done_callback(lambda written: written.exception())  # its callers may be cancelled
        self._pending.extend(items)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush(), name="journal")
        return asyncio.shield(self._written)

    async def _flush(self) -> None:
        while (written := self._written) is not None:
            items, self._pending, self._written = self._pending, [], None
            error = self._error or JournalBroken(f"the writer of {self._store.path} failed; start the run again")
            try:
                if self._error is None:
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._store.write, items)
                    error = None
            except JournalError as failed:
                error = failed
            finally:
                self._error = error
                if error is None:
                    written.set_result(None)
                else:
                    written.set_exception(error)


class EventStore:
    """The file, locked against other processes. Not thread-safe: one thread at a time."""

    def __init__(self, directory: Path, *, run: str, config: JournalConfig) -> None:
        self.path = directory / FILE
        self._run = run
        self._config = config
        self._settings: dict[str, int | str] = {}
        self._next_seq = 0
        self._damaged = False
        with _disk_errors(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(directory / LOCK)
        try:
            self._connection = self._connect(self.path)
        except BaseException:
            os.close(self._lock)
            raise

    def read(self) -> StoredEvents:
        """Everything that can be read.

        Raises:
            JournalFormatError, JournalRunError: the file is not of this format or run.
            JournalBroken: too much of it is damaged.
        """
        with _disk_errors(self.path):
            if _is_empty(self._connection, self.path):
                return StoredEvents()
            damage = _check(self._connection, self.path)
            rows = {table: _read_rows(self._connection, table, damage, path=self.path) for table in _TABLES}
            last_seq = _last_seq(self._connection)
        head = rows["head_copy"] | rows["head"]
        if _META not in head:
            raise JournalBroken(f"both copies of the head of {self.path} are damaged; {_RESTORE}")
        meta = msgspec.msgpack.decode(head[_META], type=_Meta)
        _require_run(self.path, meta, run=self._run)
        seqs = range(meta.next_seq, max((*rows["events"], last_seq, meta.next_seq - 1)) + 1)
        lost = sum(seq not in rows["events"] for seq in seqs)
        if lost:
            damage.append(f"{self.path}: {lost} events cannot be read")
        self._next_seq = seqs.stop
        self._damaged = bool(damage)
        return StoredEvents(
            empty=False,
            settings=meta.settings,
            header=msgspec.msgpack.decode(head[_HEADER], type=StateHeader) if _HEADER in head else None,
            groups=tuple(msgspec.msgpack.decode(data, type=GroupState) for data in rows["groups"].values()),
            events=tuple(_EVENTS.decode(data) for _, data in sorted(rows["events"].items())),
            lost_events=lost,
            damage=tuple(damage),
        )

    def start(self, header: StateHeader, groups: Sequence[GroupState], *, settings: Settings) -> Path | None:
        """Base the journal on a state. A damaged file is copied for inspection; returns the copy's path.

        Raises:
            JournalError: nothing is changed.
        """
        self._settings = dict(settings)
        if not self._damaged:
            self.write([_Base(header, groups)])
            return None
        new = self.path.with_name("events.new.sqlite")
        with _disk_errors(self.path):
            for left in (new, new.with_name(new.name + "-journal")):
                left.unlink(missing_ok=True)
        damaged, self._connection = self._connection, self._connect(new)
        damaged.close()
        try:
            self.write([_Base(header, groups)])
        finally:
            self._connection.close()
        with _disk_errors(self.path):
            number = 1
            while (copy := self.path.with_name(f"events.damaged-{number}.sqlite")).exists():
                number += 1
            shutil.copyfile(self.path, copy)
            new.replace(self.path)
        self._connection = self._connect(self.path)
        self._damaged = False
        return copy

    def write(self, items: Sequence[Event | _Base]) -> None:
        """Store events and states in one transaction.

        Raises:
            JournalFull, JournalUnwritable, JournalBroken: nothing is stored.
        """
        bases = [at for at, item in enumerate(items) if isinstance(item, _Base)]
        base, events = None, items
        if bases:
            base, events = items[bases[-1]], items[bases[-1] + 1 :]
        with _disk_errors(self.path), _transaction(self._connection) as connection:
            if isinstance(base, _Base):
                self._write_base(connection, base)
            rows = enumerate(map(_ENCODER.encode, events), self._next_seq)
            connection.executemany("INSERT INTO events VALUES (?, ?, ?)", map(_with_checksum, rows))
        self._next_seq += len(events)

    def close(self) -> None:
        """Let other processes open the file. Idempotent."""
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- inside

    def _connect(self, path: Path) -> sqlite3.Connection:
        with _disk_errors(path):
            connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                _require_format(connection, path)
                connection.execute("PRAGMA journal_mode=TRUNCATE")
                connection.execute(f"PRAGMA synchronous={'FULL' if self._config.fsync else 'OFF'}")
            except BaseException:
                connection.close()
                raise
            return connection

    def _write_base(self, connection: sqlite3.Connection, base: _Base) -> None:
        connection.execute(f"PRAGMA application_id={APPLICATION}")
        connection.execute(f"PRAGMA user_version={FORMAT}")
        for table in _TABLES:
            key = "INTEGER PRIMARY KEY" + " AUTOINCREMENT" * (table == "events")  # SQLite then stores the last id
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (id {key}, data BLOB, checksum INTEGER)")
            connection.execute(f"DELETE FROM {table}")
        meta = _Meta(run=self._run, settings=self._settings, next_seq=self._next_seq)
        head = [(_META, _ENCODER.encode(meta)), (_HEADER, _ENCODER.encode(base.header))]
        groups = ((group.group, _ENCODER.encode(group)) for group in base.groups)
        for table, rows in (("head", head), ("head_copy", head), ("groups", groups)):
            connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", map(_with_checksum, rows))


_RESTORE = (
    "restore it from a backup, or remove the directory: then groups in flight are dropped, and their prompts admitted "
    "again from the last checkpoint"
)
_ENCODER = msgspec.msgpack.Encoder()
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


async def open_store(directory: Path, *, run: str, config: JournalConfig, busy_s: float) -> EventStore:
    """Open the journal of a directory, or make one. Waits up to `busy_s` seconds for another process to end.

    Raises:
        JournalBusy: the other process still has the journal open. JournalFormatError, JournalUnwritable, JournalFull,
            JournalBroken.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + busy_s
    while True:
        try:
            return await asyncio.to_thread(EventStore, directory, run=run, config=config)
        except JournalBusy:
            if clock() >= until:
                raise
        await asyncio.sleep(min(0.5, busy_s))


def check_owner(directory: Path, *, run: str) -> None:
    """Refuse a directory with a journal that this run cannot continue; changes nothing.

    Raises:
        JournalFormatError, JournalRunError: the journal is of another format or run. JournalUnwritable: no access.
    """
    path = directory / FILE
    with _disk_errors(path):
        if not path.exists() or not path.stat().st_size:
            return
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            _require_format(connection, path)
            rows = _read_rows(connection, "head_copy", [], path=path) | _read_rows(connection, "head", [], path=path)
        finally:
            connection.close()
    if _META in rows:
        _require_run(path, msgspec.msgpack.decode(rows[_META], type=_Meta), run=run)


def _require_format(connection: sqlite3.Connection, path: Path) -> None:
    if _is_empty(connection, path):
        return
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise JournalFormatError(f"{path} is no journal; move it away, or give output_dir another directory")
    if version != FORMAT:
        raise JournalFormatError(
            f"{path} has journal format {version}, this program reads format {FORMAT}; continue the run with the "
            "program that wrote it, or give output_dir another directory"
        )


def _require_run(path: Path, meta: _Meta, *, run: str) -> None:
    if meta.run != run:
        raise JournalRunError(
            f"{path} is of run {meta.run!r}, this run is {run!r}; give output_dir another directory, or remove the "
            "journal"
        )


def _is_empty(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether nothing was ever committed to the file."""
    return not path.stat().st_size or not connection.execute("PRAGMA schema_version").fetchone()[0]


def _with_checksum(row: tuple[int, bytes]) -> tuple[int, bytes, int]:
    key, data = row
    return key, data, zlib.crc32(data, key & 0xFFFF_FFFF)


def _check(connection: sqlite3.Connection, path: Path) -> list[str]:
    """A sentence if pages of the file are damaged."""
    try:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        _require_damage(error)
        found = str(error)
    return [] if found == "ok" else [f"{path}: {str(found).splitlines()[-1]}"]


def _last_seq(connection: sqlite3.Connection) -> int:
    """Id of the newest event that was ever stored in this file; -1 if that cannot be read."""
    try:
        found = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    except sqlite3.DatabaseError as error:
        _require_damage(error)
        return -1
    return -1 if found is None else int(found[0])


def _read_rows(connection: sqlite3.Connection, table: str, damage: list[str], *, path: Path) -> dict[int, bytes]:
    """Rows with a correct checksum, by id; a sentence for each of the others."""
    found: dict[int, tuple[object, object]] = {}
    select = f"SELECT id, CAST(data AS BLOB), CAST(checksum AS INTEGER) FROM {table}"
    if not _collect(connection, f"{select} ORDER BY id", found):
        damage.append(f"{path}: table {table} has damaged pages")
        backwards: dict[int, tuple[object, object]] = {}
        _collect(connection, f"{select} ORDER BY id DESC", backwards)
        found |= backwards
        for key in _gaps(found):
            _collect(connection, f"{select} WHERE id = {key}", found)
    rows: dict[int, bytes] = {}
    for key, (data, checksum) in sorted(found.items()):
        if isinstance(data, bytes) and _with_checksum((key, data))[2] == checksum:
            rows[key] = data
        else:
            damage.append(f"{path}: row {key} of table {table} is damaged")
    return rows


def _collect(connection: sqlite3.Connection, select: str, found: dict[int, tuple[object, object]]) -> bool:
    """Add rows up to the first damaged page; whether there was none."""
    try:
        for key, data, checksum in connection.execute(select):
            found[key] = (data, checksum)
    except sqlite3.DatabaseError as error:
        _require_damage(error)
        return False
    return True


def _require_damage(error: sqlite3.DatabaseError) -> None:
    if _primary_code(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        raise error


def _gaps(found: Mapping[int, object]) -> list[int]:
    """Ids between the rows that were found, and some before and behind them."""
    first, last = min(found, default=0), max(found, default=0)
    return [key for key in range(max(0, first - _PROBED_ROWS), last + _PROBED_ROWS) if key not in found]


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection, None, None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _disk_errors(path: Path) -> Generator[None, None, None]:
    """Raise errors of SQLite and of the operating system as the journal's."""
    try:
        yield
    except sqlite3.Error as error:
        kind = _SQLITE_ERRORS.get(_primary_code(error), JournalBroken)
        raise _journal_error(kind, path, cause=str(error)) from error
    except BlockingIOError as error:
        raise _journal_error(JournalBusy, path, cause="locked") from error
    except OSError as error:
        kind = _OS_ERRORS.get(error.errno or 0, JournalBroken)
        raise _journal_error(kind, path, cause=error.strerror or str(error)) from error


def _primary_code(error: sqlite3.Error) -> int:
    """Without the details that SQLite adds in the higher bits; errors of the Python module have no code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


_SQLITE_ERRORS: dict[int, type[JournalError]] = {
    sqlite3.SQLITE_FULL: JournalFull,
    sqlite3.SQLITE_READONLY: JournalUnwritable,
    sqlite3.SQLITE_CANTOPEN: JournalUnwritable,
    sqlite3.SQLITE_PERM: JournalUnwritable,
    sqlite3.SQLITE_BUSY: JournalBusy,
    sqlite3.SQLITE_NOTADB: JournalFormatError,
}
_OS_ERRORS: dict[int, type[JournalError]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), JournalFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR), JournalUnwritable),
    errno.EEXIST: JournalUnwritable,
}


def _journal_error(kind: type[JournalError], path: Path, *, cause: str) -> JournalError:
    ways_out: dict[type[JournalError], str] = {
        JournalFull: "no room in {path} ({cause}); make room and start the run again: it continues from there",
        JournalUnwritable: "cannot write {path} ({cause}); make it writable, or give output_dir another directory",
        JournalBusy: "another process has {path} open ({cause}); stop that run, or give output_dir another directory",
        JournalFormatError: "{path} is no journal, or its first page is damaged ({cause}); " + _RESTORE,
        JournalBroken: "{path} cannot be read or written ({cause}); start the run again once the disk works, or "
        + _RESTORE,
    }
    return kind(ways_out[kind].format(path=path, cause=cause))
