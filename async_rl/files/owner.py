"""One owner of a run directory: the process that holds the lock of its file `run.lock`.

The kernel frees the lock when its process ends, however that ends. Children of the process do not hold it. The lock is
that of the file, so every spelling of a path sees it, and every host if the file system has locks over hosts.
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

LOCK = "run.lock"
TRIES, WAIT_S = 5, 0.05  # `living_owner` holds the lock for a moment
_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


class OwnerError(ValueError):
    """A run directory cannot be owned; names the owner, or the fault, and the way out."""


@contextmanager
def owned(directory: Path) -> Generator[None]:
    """Own a run directory, which is made if it is missing; one that is made and left empty is removed at the end.

    Raises:
        OwnerError: another process owns it, it cannot be written, or its file system has no locks.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        descriptor = _locked(directory)
    except OSError as error:
        raise OwnerError(
            f"output_dir is {directory}, which cannot be written or locked ({error.strerror or error}); make it "
            "writable, make room, or give another one, on a file system with locks (flock)"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if made and [path.name for path in directory.iterdir()] == [LOCK]:
                (directory / LOCK).unlink()
                for path in made:
                    path.rmdir()
        _release(descriptor)


def identity(directory: Path) -> str:
    """Random text that a run directory keeps over all its starts; empty if no process ever owned it."""
    return str(_record(directory).get("id", ""))


def living_owner(directory: Path) -> str | None:
    """Text that names the process that owns a run directory; None if no other process does. Writes nothing."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        if not any(os.path.samestat(os.fstat(held), os.fstat(descriptor)) for held in _held):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        record = _record(directory)
        return f"process {record.get('pid', 'unknown')} on host {record.get('host', 'unknown')}"
    except OSError:
        return None  # the file system has no locks, so nobody has one
    finally:
        os.close(descriptor)
    return None


def _locked(directory: Path) -> int:
    """A descriptor that holds the lock of a run directory, in which its process is recorded."""
    for left in reversed(range(TRIES)):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        _held.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else the owner before has removed the file
                known = identity(directory) or secrets.token_hex(8)
                record = {"host": socket.gethostname(), "pid": os.getpid(), "id": known}
                os.pwrite(descriptor, f"{json.dumps(record)}\n".encode(), 0)
                return descriptor
        except BlockingIOError:
            pass
        except BaseException:
            _release(descriptor)
            raise
        _release(descriptor)
        time.sleep(WAIT_S * (left > 0))
    raise OwnerError(
        f"output_dir is {directory}, which {living_owner(directory) or 'another process'} owns for its run; wait for "
        "its end, stop it, or give another output_dir; if that host is down, its file server frees the lock in time"
    )


def _record(directory: Path) -> dict[str, Any]:
    """Content of the lock file; a longer record before may have left bytes after the first line."""
    try:
        return dict(json.loads((directory / LOCK).read_text().partition("\n")[0]))
    except (OSError, ValueError, TypeError):
        return {}


def _release(descriptor: int) -> None:
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def _release_all() -> None:
    for descriptor in tuple(_held):
        _release(descriptor)


os.register_at_fork(after_in_child=_release_all)  # a fork shares the open file, and with it the lock
