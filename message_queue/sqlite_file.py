"""What the SQLite files of the queue have in common: events in `journal`, the index of content in `content_format`."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from xxhash import xxh3_64

from message_queue.errors import JournalFormatError

BUSY_S = 60.0  # longest wait for another process that reads or writes the file


def connect(path: Path, *, make: bool = False, read_only: bool = False) -> sqlite3.Connection:
    """Open a file. A transaction that its writer left unfinished is rolled back, but not if the file is only read.

    Args:
        make: whether a file that is missing is made.
        read_only: whether nothing is written.

    Raises:
        sqlite3.Error: it cannot be opened.
    """
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc' if make else 'rw'}",
        uri=True,
        timeout=BUSY_S,
        isolation_level="IMMEDIATE",
        check_same_thread=False,
    )


def is_written(connection: sqlite3.Connection, path: Path, *, application: int, version: int) -> bool:
    """Whether anything was ever committed to the file.

    Raises:
        JournalFormatError: a foreign file, or one of another format.
        sqlite3.Error: it cannot be read.
    """
    (found,) = connection.execute("PRAGMA application_id").fetchone()
    (format_,) = connection.execute("PRAGMA user_version").fetchone()
    if (found, format_) == (application, version):
        return True
    if not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        return False
    what = f"has format {format_}" if found == application else f"is another program's file (id {found:#x})"
    raise JournalFormatError(
        f"{path} {what}, this program reads format {version}; continue the run with the program that wrote it, move "
        "the file away, or give output_dir another directory"
    )


def stamp(connection: sqlite3.Connection, *, application: int, version: int) -> None:
    """Write what `is_written` reads, in the transaction that is under way."""
    connection.execute(f"PRAGMA application_id={application}")
    connection.execute(f"PRAGMA user_version={version}")


def checksum(*parts: bytes | memoryview) -> bytes:
    """xxh3_64 of the parts, one after the other."""
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.digest()
