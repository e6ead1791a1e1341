"""The journal of events: one SQLite file, from which a restart makes the state of the queue again.

    <output_dir>/journal/events.sqlite
        state    one row: run, settings, and the state at the last checkpoint or start
        events   events since then, in order

Events that wait travel together in one transaction, in a thread of their own. A call is answered after the commit, so a
kill of any process loses no answered call. After a failed write the journal refuses everything, because the state of
the queue is then ahead of the file. Every row has a checksum. A file with a damaged page, a wrong checksum or a missing
event is refused as a whole, with the way out; nothing is guessed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import zlib
from collections.abc import Awaitable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from message_queue.disk_errors import (
    JournalBroken,
    JournalBusy,
    JournalError,
    JournalFormatError,
    JournalRunError,
    disk_error,
)
from message_queue.events import Event
from message_queue.state import StoredState

Settings = Mapping[str, int | str]  # config field -> value

FILE, LOCK = "events.sqlite", "events.lock"
APPLICATION = 0x6172_6C65
FORMAT = 3  # 2 had two copies of the state and a row for each group
_STATE_ROW = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """How durable the journal is."""

    fsync: bool = False
    """True: an answered call survives a loss of power. False: it survives a kill of any process."""


class JournalBase(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the events of a journal follow on."""

    run: str
    """Name of the run."""
    settings: dict[str, int | str]
    """Settings of the run that wrote it."""
    next_seq: int
    """`id` of the first event after the state."""
    state: StoredState
    """State at the last checkpoint or start."""


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """Contents of a journal."""

    base: JournalBase
    """State before the events."""
    events: tuple[Event, ...]
    """Events after it, in order."""


class EventJournal:
    """Stores events of one queue. Belongs to one event loop.

    Args:
        store: opened by `open_journal`.
    """

    def __init__(self, store: EventStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[Event | StoredState] = []
        self._written: asyncio.Future[None] | None = None  # of `_pending`
        self._flushing: asyncio.Task[None] | None = None
        self._error: JournalError | None = None

    def record(self, events: Iterable[Event]) -> Awaitable[None]:
        """Store events in one transaction, after all before them; the result is awaited for the commit.

        Raises:
            JournalError: an earlier write failed, or the journal is closed. The awaitable raises it for this write.
        """
        return self._submit(events)

    def rebase(self, state: StoredState) -> Awaitable[None]:
        """Store the whole state and delete the events before it, in one transaction.

        Raises: as `record`.
        """
        return self._submit([state])

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
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)

    # ---- inside

    def _submit(self, items: Iterable[Event | StoredState]) -> Awaitable[None]:
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
    """The file, locked against other processes. Not thread-safe: one thread at a time.

    Args:
        directory: folder of the journal; made if it is missing.
        run: name of the run.
        settings: settings of the run, stored with each state.
        config: durability.

    Raises:
        JournalError: another process has it open, it is of another format, or the disk refuses.
    """

    def __init__(self, directory: Path, *, run: str, settings: Settings, config: JournalConfig) -> None:
        self.path = directory / FILE
        self._run = run
        self._settings = dict(settings)
        self._next_seq = 0
        with _disk_errors("open", self.path):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(directory / LOCK)
            try:
                durability = ("journal_mode=TRUNCATE", f"synchronous={'FULL' if config.fsync else 'OFF'}")
                self._connection = _connected(self.path, pragmas=durability)
            except BaseException:
                os.close(self._lock)
                raise

    def read(self) -> StoredEvents | None:
        """All that was stored; None if the journal is new.

        Raises:
            JournalRunError: the file is of another run.
            JournalBroken: a page, a row or the sequence of the events is damaged.
        """
        with _disk_errors("read", self.path):
            if _is_empty(self._connection, self.path):
                return None
            (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise _damaged(self.path, str(found).splitlines()[-1])
            base = _read_base(self._connection, self.path, run=self._run)
            events = _read_rows(self._connection, "events", self.path)
            stored = self._connection.execute("SELECT CAST(max(seq) AS INTEGER) FROM sqlite_sequence").fetchone()[0]
        self._next_seq = 0 if stored is None else stored + 1
        if list(events) != list(range(base.next_seq, self._next_seq)) or self._next_seq < base.next_seq:
            raise _damaged(self.path, f"{len(events)} events are there, not {base.next_seq} to {self._next_seq - 1}")
        return StoredEvents(base, tuple(_EVENTS.decode(data) for data in events.values()))

    def write(self, items: Sequence[Event | StoredState]) -> None:
        """Store events and states in one transaction.

        Raises:
            JournalFull, JournalUnwritable, JournalBroken: nothing is stored.
        """
        state: StoredState | None = None
        events: list[Event] = []
        for item in items:
            if isinstance(item, StoredState):
                state, events = item, []
            else:
                events.append(item)
        with _disk_errors("write", self.path), _transaction(self._connection) as connection:
            if state is not None:
                self._write_state(connection, state)
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

    def _write_state(self, connection: sqlite3.Connection, state: StoredState) -> None:
        connection.execute(f"PRAGMA application_id={APPLICATION}")
        connection.execute(f"PRAGMA user_version={FORMAT}")
        for table in ("state", "events"):
            key = "INTEGER PRIMARY KEY" + " AUTOINCREMENT" * (table == "events")  # SQLite then stores the last id
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (id {key}, data BLOB, checksum INTEGER)")
            connection.execute(f"DELETE FROM {table}")
        base = JournalBase(run=self._run, settings=self._settings, next_seq=self._next_seq, state=state)
        connection.execute("INSERT INTO state VALUES (?, ?, ?)", _with_checksum((_STATE_ROW, _ENCODER.encode(base))))


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: a table is missing
_ENCODER = msgspec.msgpack.Encoder()
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


async def open_journal(
    directory: Path, *, run: str, settings: Settings, config: JournalConfig, busy_s: float
) -> tuple[EventJournal, StoredEvents | None]:
    """Open the journal of a directory, or make one. Waits up to `busy_s` seconds for another process to end.

    Returns:
        The journal, and its contents; None if it is new. Its first write has to be a state (`EventJournal.rebase`).

    Raises:
        JournalBusy: the other process still has the journal open.
        JournalError: the file cannot be used; the message has the way out.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + busy_s
    while True:
        try:
            store = await asyncio.to_thread(EventStore, directory, run=run, settings=settings, config=config)
            break
        except JournalBusy:
            if clock() >= until:
                raise
        await asyncio.sleep(min(0.5, busy_s))
    journal = EventJournal(store)
    try:
        return journal, await asyncio.to_thread(store.read)
    except BaseException:
        await journal.close()
        raise


def check_owner(directory: Path, *, run: str) -> None:
    """Refuse a directory with a journal that this run cannot continue; changes nothing.

    Raises:
        JournalFormatError, JournalRunError: the journal is of another format or run.
        JournalError: its state is damaged, or there is no access.
    """
    path = directory / FILE
    with _disk_errors("read", path):
        if path.exists() and path.stat().st_size:
            with closing(_connected(path)) as connection:
                if not _is_empty(connection, path):
                    _read_base(connection, path, run=run)


def _connected(path: Path, *, pragmas: Sequence[str] = ()) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        _require_format(connection, path)
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


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


def _is_empty(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether nothing was ever committed to the file."""
    return not path.stat().st_size or not connection.execute("PRAGMA schema_version").fetchone()[0]


def _read_base(connection: sqlite3.Connection, path: Path, *, run: str) -> JournalBase:
    rows = _read_rows(connection, "state", path)
    if list(rows) != [_STATE_ROW]:
        raise _damaged(path, f"it has {len(rows)} states")
    base = msgspec.msgpack.decode(rows[_STATE_ROW], type=JournalBase)
    if base.run != run:
        raise JournalRunError(
            f"{path} is of run {base.run!r}, this run is {run!r}; give output_dir another directory, or remove the "
            "journal"
        )
    return base


def _read_rows(connection: sqlite3.Connection, table: str, path: Path) -> dict[int, bytes]:
    """Rows by id, in order."""
    rows: dict[int, bytes] = {}
    for key, data, checksum in connection.execute(f"SELECT id, CAST(data AS BLOB), checksum FROM {table} ORDER BY id"):
        if not isinstance(data, bytes) or _with_checksum((key, data))[2] != checksum:
            raise _damaged(path, f"row {key} of table {table} has a wrong checksum")
        rows[key] = data
    return rows


def _with_checksum(row: tuple[int, bytes]) -> tuple[int, bytes, int]:
    key, data = row
    return key, data, zlib.crc32(data, key & 0xFFFF_FFFF)


def _damaged(path: Path, cause: str) -> JournalBroken:
    return JournalBroken(
        f"{path} is damaged ({cause}); restore it from a backup, or remove the directory {path.parent}: then groups in "
        "flight are dropped, and their prompts admitted again from the last checkpoint"
    )


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
def _disk_errors(what: str, path: Path) -> Generator[None, None, None]:
    """Raise errors of SQLite and of the operating system as the journal's."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extension
        if isinstance(error, sqlite3.Error) and code in _DAMAGE:
            raise _damaged(path, str(error)) from error
        raise disk_error(error, what=what, path=str(path)) from error
