"""What can be wrong with a journal. Every message names the file or directory and the way out."""

from __future__ import annotations

import errno


class JournalError(RuntimeError):
    """The journal refuses a call."""


class JournalFormatError(JournalError):
    """The directory holds a journal of another format version."""


class JournalRunError(JournalError):
    """The directory holds a journal of another run."""


class JournalStepError(JournalError):
    """The journal and the checkpoint do not belong together: it ends before the checkpoint, or is settled after it."""


class JournalBusy(JournalError):
    """Another process has the journal open."""


class JournalUnwritable(JournalError):
    """The directory cannot be written."""


class JournalFull(JournalError):
    """There was no room. What the call was to record is not recorded; it can be made again once there is room."""


class JournalBroken(JournalError):
    """The disk failed in a way that leaves unknown what it holds. Nothing is recorded any more; open it anew."""


class JournalClosed(JournalError):
    """The journal was closed."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def disk_error(error: OSError, *, what: str, path: str) -> JournalError:
    """`error` as one of the journal's.

    Args:
        what: was tried, "write 4096 bytes to".
    """
    cause = error.strerror or str(error)
    if error.errno in _FULL:
        return JournalFull(f"no room to {what} {path} ({cause}); what was begun is taken back: make room and go on")
    if error.errno in _UNWRITABLE:
        return JournalUnwritable(
            f"cannot {what} {path} ({cause}); make the directory writable, or give output_dir another one"
        )
    return JournalBroken(f"could not {what} {path} ({cause}); restart the run once the disk works again")
