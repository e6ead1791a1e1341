"""One owner of a run directory: the process that holds the lock of its file `run.lock`.

The kernel frees the lock when the process ends, however it ends. Its children do not hold the lock. Every spelling of
a path leads to the same lock, on every host if the file system has locks over hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_rl.files.command import ON_STOP

LOCK = "run.lock"
TRIES, WAIT_S = 5, 0.05  # `living_owner` holds the lock for a moment
_held: set[int] = set()
"""Descriptors of the locks of this process."""


@contextmanager
def owned(directory: Path) -> Generator[None]:
    """Own a run directory. It is made if it is missing, and removed at the end if nothing else is in it then.

    Raises:
        ValueError: another process owns it, it cannot be written, or its file system has no locks.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        descriptor = _locked(directory)
        record = {"host": socket.gethostname(), "pid": os.getpid(), "id": identity(directory) or secrets.token_hex(8)}
        os.pwrite(descriptor, f"{json.dumps(record)}\n".encode(), 0)
    except OSError as error:
        raise ValueError(
            f"output_dir is {directory}, which cannot be written or locked ({error.strerror or error}); make it "
            "writable, make room, or give another one, on a file system with locks (flock)"
        ) from error

    def release() -> None:
        with contextlib.suppress(OSError):
            if made and [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                for path in made:
                    path.rmdir()
        _close(descriptor)

    ON_STOP.append(release)
    try:
        yield
    finally:
        ON_STOP.remove(release)
        release()


def identity(directory: Path) -> str:
    """Random text that a run directory keeps over all its starts; empty if no process ever owned it."""
    return str(_record(directory).get("id", ""))


def living_owner(directory: Path) -> str | None:
    """Text that names the other process that owns a run directory; None if none does. Writes nothing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), (directory / LOCK).open() as file:
        if not any(os.path.samestat(os.fstat(held), os.fstat(file.fileno())) for held in _held):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "process {pid} on host {host}".format_map({"pid": "?", "host": "?"} | _record(directory))
    return None


def _locked(directory: Path) -> int:
    """Descriptor of the lock of a run directory."""
    for _ in range(TRIES):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        _held.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else the owner before has removed the file
                return descriptor
        except BlockingIOError:
            time.sleep(WAIT_S)
        _close(descriptor)
    raise ValueError(
        f"output_dir is {directory}, which {living_owner(directory) or 'another process'} owns for its run; wait for "
        "its end, stop it, or give another output_dir; if that host is down, its file server frees the lock in time"
    )


def _record(directory: Path) -> dict[str, Any]:
    """First line of the lock file; a longer one before it may have left more."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads((directory / LOCK).read_text().partition("\n")[0]))
    return {}


def _close(*descriptors: int) -> None:
    for descriptor in _held & {*descriptors}:
        _held.remove(descriptor)
        os.close(descriptor)


os.register_at_fork(after_in_child=lambda: _close(*_held))  # a fork shares the open file, and with it the lock
