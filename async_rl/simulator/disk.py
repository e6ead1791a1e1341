"""The disk of a run: real files, and faults at the level of SQLite and of the content's data files.

A write that fails leaves its first half there; a process may die inside a transaction or right after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.rollout.content.format import data_path
from async_rl.simulator.processes import current_process
from message_queue import journal

if TYPE_CHECKING:
    from async_rl.simulator.world import World

SQLITE_CODES = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EIO: sqlite3.SQLITE_IOERR,
}


class ProcessDied(Exception):
    """The process was killed in the middle of a write."""


class Disk:
    """Decides which write fails."""

    def __init__(self, world: World) -> None:
        self.damaged_groups: set[int] = set()  # whose content has a flipped bit
        self.damaged_events = False  # whether a stored event, or the state before the events, has one
        self._world = world
        self._draw = random.Random(f"disk {world.scenario.config.seed}")
        self._error, self._broken_until = 0, 0.0

    @property
    def is_broken(self) -> bool:
        """Whether it refuses every write."""
        return asyncio.get_running_loop().time() < self._broken_until

    def repair(self) -> None:
        """It has room and can be written."""
        self._broken_until = 0.0

    def refusal(self, point: str) -> int | None:
        """Error number of the operation at `point`; None if it succeeds.

        Raises:
            ProcessDied: the process is killed there.
        """
        kind, seconds = self._world.fault(point)
        match kind:
            case "disk is full" | "disk stays full" | "disk is read-only":
                self._error = errno.EROFS if kind == "disk is read-only" else errno.ENOSPC
                self._broken_until = asyncio.get_running_loop().time() + seconds
            case "disk fails":
                return errno.EIO
            case "worker dies" | "queue dies" | "driver dies":
                process = current_process()
                self._world.kill("driver" if process is None or kind == "driver dies" else process.process_name)
                raise ProcessDied(point)
            case _:
                pass
        return self._error if self.is_broken else None

    def journal_removed(self) -> None:
        """The directory of the journal is gone, and all damage in it."""
        self.damaged_groups.clear()
        self.damaged_events = False

    def damage_events(self, directory: Path) -> None:
        """Flip a bit of a stored event, or of the state before the events."""
        path = directory / journal.FILE
        if not path.exists():
            return
        with closing(sqlite3.connect(path)) as connection, connection, contextlib.suppress(sqlite3.OperationalError):
            table = self._draw.choice(("state", "events", "events", "events"))
            rows = connection.execute(f"SELECT id, data FROM {table}").fetchall()  # unless it has no table yet
            if rows:
                key, data = self._draw.choice(rows)
                at = self._draw.randrange(len(data))
                flipped = data[:at] + bytes([data[at] ^ 1 << self._draw.randrange(8)]) + data[at + 1 :]
                connection.execute(f"UPDATE {table} SET data = ? WHERE id = ?", (flipped, key))
                self.damaged_events = True

    def damage_content(self, directory: Path) -> None:
        """Flip a bit of a stored record of the content."""
        columns = "group_id, file, start, length"
        query = f"SELECT {columns} FROM records WHERE length > 0 ORDER BY group_id, trajectory, number"
        records: list[tuple[Path, Any]] = []
        for path in sorted(directory.glob("*.sqlite")):
            with closing(sqlite3.connect(path)) as connection, contextlib.suppress(sqlite3.OperationalError):
                records += [(path, row) for row in connection.execute(query)]  # unless it has no table yet
        if records:
            path, (group, file, start, length) = self._draw.choice(records)
            self.damaged_groups.add(group)
            with data_path(path.parent, path.stem, file).open("r+b") as data:
                data.seek(start + self._draw.randrange(length))
                byte = data.read(1)[0] ^ 1 << self._draw.randrange(8)
                data.seek(-1, os.SEEK_CUR)
                data.write(bytes([byte]))


class _Connection(sqlite3.Connection):
    """A connection whose statements may fail."""

    disk: Disk
    point: str

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql.startswith("SELECT"):
            self._refuse("read")
        elif sql.startswith("INSERT"):
            self._refuse("write")
        return super().execute(sql, parameters)

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


def connect(disk: Disk, path: str, **options: Any) -> sqlite3.Connection:
    connection = sqlite3.connect(path, factory=_Connection, **options)
    connection.disk, connection.point = disk, "disk/queue" if journal.FILE in path else "disk/content"
    return connection


def pwritev(disk: Disk, descriptor: int, parts: list[memoryview], offset: int) -> int:
    number = disk.refusal("disk/content/data")
    if number is None:
        return os.pwritev(descriptor, parts, offset)
    os.pwritev(descriptor, parts[: len(parts) // 2], offset)
    raise OSError(number, os.strerror(number))
