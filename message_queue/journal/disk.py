"""The journal's directory and files: the only place that touches the disk."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

MAX_PARTS = 1024  # IOV_MAX of Linux
FLUSH_BYTES = 1 << 20  # written since the disk was last set to work


class DiskFile(Protocol):
    """A file by its offsets. Every method raises OSError."""

    def write(self, parts: Sequence[bytes | memoryview], offset: int) -> int:
        """Write at most MAX_PARTS parts; how many bytes were written, which may be fewer than there are."""
        ...

    def read(self, offset: int, size: int) -> memoryview:
        """What there is of `size` bytes at `offset`."""
        ...

    def size(self) -> int: ...
    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Return once what was written survives a loss of power."""
        ...

    def duplicate(self) -> DiskFile:
        """The same file, readable until it is closed, even after it was removed."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """A directory. Every method raises OSError."""

    def path(self, name: str) -> str:
        """For messages."""
        ...

    def lock(self) -> None:
        """Keep out others, also those of other processes.

        Raises:
            BlockingIOError: it is locked already.
        """
        ...

    def unlock(self) -> None: ...
    def names(self) -> list[str]: ...

    def create(self, name: str) -> DiskFile:
        """A new, empty file."""
        ...

    def open(self, name: str) -> DiskFile: ...
    def rename(self, name: str, new: str) -> None: ...
    def remove(self, name: str) -> None: ...

    def sync(self) -> None:
        """Return once names created, renamed and removed survive a loss of power."""
        ...


class OsFile:
    """A file of the operating system, which is told to keep none of it in memory: a journal is hardly ever read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._flushed = 0

    def write(self, parts: Sequence[bytes | memoryview], offset: int) -> int:
        count = os.pwritev(self._descriptor, parts, offset)
        if offset + count - self._flushed >= FLUSH_BYTES:  # the disk works while the next records gather
            self._let_go(self._flushed, offset + count - self._flushed)
            self._flushed = offset + count
        return count

    def read(self, offset: int, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        at = 0
        while at < size:
            count = os.preadv(self._descriptor, [data[at:]], offset + at)
            if not count:
                break
            at += count
        return data[:at].toreadonly()

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self._flushed = min(self._flushed, size)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)
        self._let_go(0, 0)

    def duplicate(self) -> OsFile:
        return OsFile(os.dup(self._descriptor))

    def close(self) -> None:
        os.close(self._descriptor)

    def _let_go(self, offset: int, size: int) -> None:
        """Linux writes what is not on the disk yet, without waiting for it, and forgets what is. size 0: to the end."""
        with suppress(OSError):  # advice
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)


class OsDisk:
    """A directory of the operating system, made where it does not exist."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: int | None = None

    def path(self, name: str) -> str:
        return str(self._directory / name)

    def lock(self) -> None:
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            _sync_folder(self._directory.parent)
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def names(self) -> list[str]:
        return [entry.name for entry in self._directory.iterdir()]

    def create(self, name: str) -> OsFile:
        return OsFile(os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def open(self, name: str) -> OsFile:
        return OsFile(os.open(self._directory / name, os.O_RDWR | os.O_CLOEXEC))

    def rename(self, name: str, new: str) -> None:
        (self._directory / name).rename(self._directory / new)

    def remove(self, name: str) -> None:
        (self._directory / name).unlink()

    def sync(self) -> None:
        _sync_folder(self._directory)


def _sync_folder(folder: Path) -> None:
    """Return once the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
