"""Errors of the files that the queue keeps. Every message names the file or directory and the way out."""

from __future__ import annotations

import errno
import sqlite3


class JournalError(RuntimeError):
    """The journal refuses a call."""


class JournalFormatError(JournalError):
    """The directory holds a journal of another format version."""


class JournalRunError(JournalError):
    """The directory holds a journal of another run."""


class JournalStepError(JournalError):
    """The journal and the checkpoint do not belong together: it ends before the checkpoint, or is settled after it."""


class JournalSettingsError(JournalError):
    """A setting changed that groups in flight depend on."""


class JournalBusy(JournalError):
    """Another process has the journal open."""


class JournalUnwritable(JournalError):
    """The directory cannot be written."""


class JournalFull(JournalError):
    """The disk has no room. Nothing of the call is recorded; it can be made again once there is room."""


class JournalBroken(JournalError):
    """The journal is damaged, or the disk failed in a way that leaves its content unknown. Nothing more is recorded."""


class JournalClosed(JournalError):
    """The journal was closed."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_SQLITE_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)


def disk_error(error: OSError | sqlite3.Error, *, what: str, path: str) -> JournalError:
    """The journal error that stands for `error`.

    Args:
        what: the attempt, such as "write 4096 bytes to".
        path: the file or directory.
    """
    if isinstance(error, OSError):
        cause = error.strerror or str(error)
        full, unwritable, busy = error.errno in _FULL, error.errno in _UNWRITABLE, error.errno == errno.EAGAIN
    else:
        cause = str(error)
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without the extension
        full, unwritable, busy = code == sqlite3.SQLITE_FULL, code in _SQLITE_UNWRITABLE, code == sqlite3.SQLITE_BUSY
    if full:
        return JournalFull(f"no room to {what} {path} ({cause}); nothing of it is recorded: make room and continue")
    if unwritable:
        return JournalUnwritable(
            f"cannot {what} {path} ({cause}); make the directory writable, or give output_dir another one"
        )
    if busy:
        return JournalBusy(
            f"cannot {what} {path} ({cause}); end the other process that has it open, or give output_dir another one"
        )
    return JournalBroken(f"could not {what} {path} ({cause}); restart the run once the disk works again")
