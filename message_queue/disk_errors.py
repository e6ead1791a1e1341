"""Errors of the files that the queue keeps. Every message names the file or directory and the way out."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from message_queue.errors import JournalBroken, JournalBusy, JournalError, JournalUnwritable

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
