"""The disk of a run: real files, and faults at the level of SQLite and of the content's data files.

While a world runs, `installed` puts connections and a write call of its own into the modules that store. A write that
fails leaves half of it there; a process may die inside a transaction or right after it.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.simulate.processes import current_process
from message_queue import content, content_format, journal

if TYPE_CHECKING:
    from async_rl.simulate.world import World

SQLITE_CODES = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EIO: sqlite3.SQLITE_IOERR,
}


class ProcessDied(Exception):
    """The process was killed in the middle of a write."""


class Disk:
    """Decides which write fails.

    Args:
        clock: virtual seconds.
    """

    def __init__(self, world: World, *, seed: int, clock: Callable[[], float]) -> None:
        self.damaged_groups: set[int] = set()  # whose content has a flipped bit
        self.damaged_events = False  # whether the journal of events has one
        self._world = world
        self._draw = random.Random(f"disk {seed}")
        self._clock = clock
        self._broken: tuple[int, float] | None = None  # errno, until when

    @property
    def is_broken(self) -> bool:
        """Whether it refuses every write."""
        return self._broken is not None and self._clock() < self._broken[1]

    def repair(self) -> None:
        """It has room and can be written again."""
        self._broken = None

    def refusal(self, point: str) -> int | None:
        """Error number of what is done at `point`; None if it succeeds.

        Raises:
            ProcessDied: the process is killed there.
        """
        fault = self._world.fault(point)
        match fault and fault.kind:
            case "disk is full" | "disk stays full":
                assert fault is not None
                self._broken = (errno.ENOSPC, self._clock() + fault.amount)
            case "disk is read-only":
                assert fault is not None
                self._broken = (errno.EROFS, self._clock() + fault.amount)
            case "disk fails":
                return errno.EIO
            case "worker dies":
                process = current_process()
                assert process is not None
                process.die("killed")
                raise ProcessDied(point)
            case "queue dies" | "driver dies":
                self._world.kill("queue" if "/queue/" in point else "driver")
                raise ProcessDied(point)
            case _:
                pass
        return self._broken[0] if self.is_broken and self._broken is not None else None

    def flip_a_bit(self, directory: Path) -> None:
        """Of a stored row of the journal, or of a record of the content."""
        indexes = sorted((directory / "content").glob("*.sqlite"))
        events = directory / journal.FILE
        if self._draw.random() < 0.5 and indexes:
            self._flip_content(self._draw.choice(indexes))
        elif events.exists() and events.stat().st_size:
            self._flip_event(events)

    def _flip_event(self, path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            table = self._draw.choice(("state", "events", "events", "events"))
            rows = connection.execute(f"SELECT id, data FROM {table} ORDER BY id").fetchall()
            if rows:
                key, data = rows[-1 - int(len(rows) * self._draw.random() ** 2)]  # the newest are damaged more often
                connection.execute(f"UPDATE {table} SET data = ? WHERE id = ?", (self._flipped(data), key))
                self.damaged_events = True

    def _flip_content(self, path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                return
            columns = "group_id, trajectory, number, fields, file, start, length"
            rows = connection.execute(f"SELECT {columns} FROM records ORDER BY group_id, trajectory, number").fetchall()
            if not rows:
                return
            group, trajectory, number, fields, file, start, length = self._draw.choice(rows)
            self.damaged_groups.add(group)
            if not length:
                where = "WHERE group_id = ? AND trajectory = ? AND number = ?"
                update = f"UPDATE records SET fields = ? {where}"
                connection.execute(update, (self._flipped(fields), group, trajectory, number))
                return
        with content_format.data_path(path.parent, path.stem, file).open("r+b") as data:
            data.seek(start)
            record = data.read(length)
            data.seek(start)
            data.write(self._flipped(record))

    def _flipped(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[self._draw.randrange(len(damaged))] ^= 1 << self._draw.randrange(8)
        return bytes(damaged)

    @contextmanager
    def installed(self, *, file_bytes: int) -> Generator[None]:
        """Store through this disk.

        Args:
            file_bytes: of a data file of the content, after which a new one is started.
        """
        changed: list[tuple[Any, str, object]] = [
            (journal, "sqlite3", _Module(sqlite3, connect=partial(_connect, self, "disk/queue"))),
            (content_format, "sqlite3", _Module(sqlite3, connect=partial(_connect, self, "disk/content"))),
            (content, "os", _Module(os, pwritev=partial(_pwritev, self))),
            (content, "FILE_BYTES", file_bytes),
        ]
        before = [(module, name, getattr(module, name)) for module, name, _ in changed]
        try:
            for module, name, value in changed:
                setattr(module, name, value)
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


class _Module:
    """A module with some functions replaced."""

    def __init__(self, module: object, **replaced: object) -> None:
        vars(self).update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Connection(sqlite3.Connection):
    """A connection whose statements may fail."""

    disk: Disk
    point: str

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql.startswith("SELECT"):
            self._refuse("read")
        elif sql.startswith("INSERT"):
            self._refuse("write")
        cursor = super().execute(sql, parameters)
        if sql == "COMMIT":
            self._refuse("commit", only_death=True)
        return cursor

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        cursor = super().executemany(sql, parameters)
        self._refuse("write")
        return cursor

    def __exit__(self, *exception: Any) -> Any:
        handled = super().__exit__(*exception)
        if exception[0] is None:
            self._refuse("commit", only_death=True)
        return handled

    def _refuse(self, what: str, *, only_death: bool = False) -> None:
        number = self.disk.refusal(f"{self.point}/{what}")
        if number is None or only_death or (what == "read" and number != errno.EIO):
            return
        error = sqlite3.OperationalError(os.strerror(number))
        error.sqlite_errorcode = SQLITE_CODES[number]
        raise error


def _connect(disk: Disk, point: str, *args: Any, **options: Any) -> sqlite3.Connection:
    connection = sqlite3.connect(*args, factory=_Connection, **options)
    connection.disk, connection.point = disk, point
    return connection


def _pwritev(disk: Disk, descriptor: int, parts: list[memoryview], offset: int) -> int:
    number = disk.refusal("disk/content/data")
    if number is None:
        return os.pwritev(descriptor, parts, offset)
    os.pwritev(descriptor, parts[: len(parts) // 2], offset)
    raise OSError(number, os.strerror(number))
