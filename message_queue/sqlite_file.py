"""The SQLite files of queue and content: how one is opened and recognised, and the errors of its disk.

Every error names the file or directory and the way out.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_64

from message_queue.errors import JournalBroken, JournalBusy, JournalError, JournalFormatError, JournalUnwritable

BUSY_S = 60.0  # longest wait for another process that reads or writes the file

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_SQLITE_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_SQLITE_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_SQLITE_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: a table is missing


@contextmanager
def disk_errors(what: str, path: Path) -> Generator[None]:
    """Raise errors of SQLite and of the operating system as the error that stands for them.

    Args:
        what: the attempt, such as "write 4096 bytes to".
        path: the file or directory.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise disk_error(error, what=what, path=path) from error


def disk_error(error: Exception, *, what: str, path: Path) -> JournalError:
    """The journal error that stands for `error`; arguments as of `disk_errors`."""
    cause, number, code = str(error), None, None
    if isinstance(error, OSError):
        cause, number = error.strerror or cause, error.errno
    else:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extension
    if number in _FULL or code == sqlite3.SQLITE_FULL:
        return JournalUnwritable(
            f"no room to {what} {path} ({cause}); nothing of it is recorded: make room and continue"
        )
    if number in _UNWRITABLE or code in _SQLITE_UNWRITABLE:
        return JournalUnwritable(
            f"cannot {what} {path} ({cause}); make the directory writable, or give output_dir another one"
        )
    if number == errno.EAGAIN or code in _SQLITE_BUSY:
        return JournalBusy(
            f"cannot {what} {path} ({cause}); end the other process that has it open, or give output_dir another one"
        )
    if code in _SQLITE_DAMAGED:
        return damaged(path, cause)
    return JournalBroken(f"could not {what} {path} ({cause}); restart the run once the disk works again")


def damaged(path: Path, cause: str) -> JournalBroken:
    """The error of a file that was read and is not as it was written."""
    return JournalBroken(
        f"{path} is damaged ({cause}); restore it from a backup, or remove the directory {path.parent}: then groups in "
        "flight are dropped, and their prompts admitted again from the last checkpoint"
    )


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
