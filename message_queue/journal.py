"""The journal of events: one SQLite file. A restart rebuilds the state of the queue from it.

    <output_dir>/journal/events.sqlite
        state    one row: run, settings, and the state at the last checkpoint or start
        events   events since then, in order

Events that wait travel together in one transaction, in a separate thread. A call is answered after the commit, so a
kill of any process loses no answered call. After a failed write the journal refuses everything, because the state of
the queue is then ahead of the file. Every row has a checksum. A file with a damaged page, a wrong checksum or a missing
event is refused as a whole, with the way out; nothing is guessed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Awaitable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from message_queue.errors import JournalBroken, JournalError, JournalMismatch
from message_queue.events import Event
from message_queue.sqlite_file import checksum, connect, damaged, disk_errors, is_written, stamp
from message_queue.state import StoredState

Settings = Mapping[str, int | str]  # config field -> value

FILE, LOCK = "events.sqlite", "events.lock"
APPLICATION = 0x6172_6C65
FORMAT = 7  # 6 had reasons of drops without kind
_STATE_ROW = 0
_is_written = partial(is_written, application=APPLICATION, version=FORMAT)


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


StoredEvents = tuple[JournalBase, tuple[Event, ...]]
"""Contents of a journal: the state before the events, and the events after it, in order."""


class EventJournal:
    """Stores events of one queue, in a file that is locked against other processes.

    Its construction and `read` block. `read` comes before all else, and the first write of a new journal is a state.
    The rest belongs to one event loop.

    Args:
        directory: folder of the journal; made if it is missing.
        run: name of the run.
        settings: settings of the run, stored with each state.
        config: durability.

    Raises:
        JournalBusy: another process has it open.
        JournalError: it is of another format, or the disk refuses.
    """

    def __init__(self, directory: Path, *, run: str, settings: Settings, config: JournalConfig) -> None:
        self.path = directory / FILE
        self._run = run
        self._settings = dict(settings)
        self._next_seq = 0
        with disk_errors("open", self.path), ExitStack() as resources:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            resources.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._connection = resources.enter_context(closing(connect(self.path, make=True)))
            _is_written(self._connection, self.path)
            self._connection.execute("PRAGMA journal_mode=TRUNCATE")
            self._connection.execute(f"PRAGMA synchronous={'FULL' if config.fsync else 'OFF'}")
            self._resources = resources.pop_all()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._turn = asyncio.Lock()
        self._waiting: list[Event | StoredState] = []
        self._next_write: asyncio.Task[None] | None = None  # of `_waiting`
        self._error: JournalError | None = None

    def read(self) -> StoredEvents | None:
        """All that was stored; None if the journal is new.

        Raises:
            JournalMismatch: the file is of another run.
            JournalBroken: a page, a row or the sequence of the events is damaged.
        """
        with disk_errors("read", self.path):
            if not _is_written(self._connection, self.path):
                return None
            (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise damaged(self.path, str(found).splitlines()[-1])
            base = _read_base(self._connection, self.path, run=self._run)
            events = _read_rows(self._connection, "events", self.path)
            stored = self._connection.execute("SELECT CAST(max(seq) AS INTEGER) FROM sqlite_sequence").fetchone()[0]
        self._next_seq = 0 if stored is None else stored + 1
        if list(events) != list(range(base.next_seq, self._next_seq)) or self._next_seq < base.next_seq:
            raise damaged(self.path, f"{len(events)} events are there, not {base.next_seq} to {self._next_seq - 1}")
        return base, tuple(_EVENTS.decode(data) for data in events.values())

    def record(self, items: Iterable[Event | StoredState]) -> Awaitable[None]:
        """Store events in one transaction, after all before them; the result is awaited for their commit.

        A state replaces the one before it and all events since.

        Raises:
            JournalError: an earlier write failed, or the journal is closed. The awaitable raises it for this write.
        """
        if self._error is not None:
            raise self._error
        self._waiting += items
        if self._next_write is None:
            self._next_write = asyncio.create_task(self._write_waiting(), name="journal")
            self._next_write.add_done_callback(lambda task: task.cancelled() or task.exception())
        return asyncio.shield(self._next_write)

    async def close(self) -> None:
        """Store pending events and let other processes open the journal. Idempotent."""
        if self._next_write is not None:
            await asyncio.wait([self._next_write])
        async with self._turn:
            self._error = self._error or JournalError(f"the journal {self.path} is closed")
            await asyncio.get_running_loop().run_in_executor(self._thread, self.release)

    def release(self) -> None:
        """Let other processes open the file, without what waits to be stored. Idempotent."""
        self._resources.close()

    # ---- inside

    async def _write_waiting(self) -> None:
        async with self._turn:
            items, self._waiting, self._next_write = self._waiting, [], None
            if self._error is not None:
                raise self._error
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, items)
            except JournalError as error:
                self._error = error
                raise
            except Exception as error:
                self._error = JournalBroken(f"the writer of {self.path} failed; start the run again")
                raise self._error from error

    def _write(self, items: Iterable[Event | StoredState]) -> None:
        """Store events and states in one transaction: all or nothing."""
        state: StoredState | None = None
        events: list[Event] = []
        for item in items:
            if isinstance(item, StoredState):
                state, events = item, []
            else:
                events.append(item)
        with disk_errors("write", self.path), self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            if state is not None:
                self._write_state(connection, state)
            rows = [_row(key, event) for key, event in enumerate(events, self._next_seq)]
            connection.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
        self._next_seq += len(events)

    def _write_state(self, connection: sqlite3.Connection, state: StoredState) -> None:
        stamp(connection, application=APPLICATION, version=FORMAT)
        for table in ("state", "events"):
            key = "INTEGER PRIMARY KEY" + " AUTOINCREMENT" * (table == "events")  # SQLite then stores the last id
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (id {key}, data BLOB, checksum BLOB)")
            connection.execute(f"DELETE FROM {table}")
        base = JournalBase(run=self._run, settings=self._settings, next_seq=self._next_seq, state=state)
        connection.execute("INSERT INTO state VALUES (?, ?, ?)", _row(_STATE_ROW, base))


_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def check_owner(directory: Path, *, run: str) -> None:
    """Refuse a directory with a journal that this run cannot continue; changes nothing.

    A journal with an unfinished transaction, which only a start rolls back, is accepted.

    Raises:
        JournalFormatError, JournalMismatch: the journal is of another format or run.
        JournalError: its state is damaged, or there is no access.
    """
    path = directory / FILE
    with disk_errors("read", path):
        if path.exists():
            with closing(connect(path, read_only=True)) as connection:
                try:
                    if _is_written(connection, path):
                        _read_base(connection, path, run=run)
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                        raise


def _read_base(connection: sqlite3.Connection, path: Path, *, run: str) -> JournalBase:
    rows = _read_rows(connection, "state", path)
    if list(rows) != [_STATE_ROW]:
        raise damaged(path, f"it has {len(rows)} states")
    base = msgspec.msgpack.decode(rows[_STATE_ROW], type=JournalBase)
    if base.run != run:
        raise JournalMismatch(
            f"{path} is of run {base.run!r}, this run is {run!r}; give output_dir another directory, or remove the "
            "journal"
        )
    return base


def _read_rows(connection: sqlite3.Connection, table: str, path: Path) -> dict[int, bytes]:
    """Rows by id, in order."""
    rows: dict[int, bytes] = {}
    for key, data, stored in connection.execute(f"SELECT id, CAST(data AS BLOB), checksum FROM {table} ORDER BY id"):
        if not isinstance(data, bytes) or checksum(b"%d" % key, data) != stored:
            raise damaged(path, f"row {key} of table {table} has a wrong checksum")
        rows[key] = data
    return rows


def _row(key: int, item: Event | JournalBase) -> tuple[int, bytes, bytes]:
    """(id, data, checksum) of a row."""
    data = msgspec.msgpack.encode(item)
    return key, data, checksum(b"%d" % key, data)
