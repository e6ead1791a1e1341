"""Logs of a run's processes: each writes its output to a file in `logs/`, whose end explains why it failed.

Imports little: the queue's process starts fast.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Generator
from datetime import datetime
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 32 << 10


def open_log(path: Path | None) -> None:
    """Append the output of this process and of its children to `path`, from now on.

    If the file cannot be opened, the output stays where it was, and says so.
    """
    if path is None:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        sys.stderr.write(f"{path} cannot be opened ({error.strerror}); the output of this process stays here\n")
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a kill loses nothing
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    os.environ["PYTHONUNBUFFERED"] = "1"  # the same for children
    os.write(2, f"--- process {os.getpid()} started at {datetime.now().astimezone():%F %T%z}\n".encode())


@contextlib.contextmanager
def log_failure() -> Generator[None]:
    """Write the traceback of an exception into the log of this process."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise


def log_end(path: Path) -> str:
    """The last lines of a log, below a line with its path."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError as error:
        return f"no log at {path} on this machine ({error.strerror})"
    return "\n".join([f"the end of {path}:", *(f"    {line}" for line in lines)])


def with_notes(error: BaseException) -> str:
    """Text of an error, and below it the notes that it carries: the end of a log."""
    return "\n".join([str(error), *notes_of(error)])


def notes_of(error: BaseException) -> tuple[str, ...]:
    """What was added to an error by `add_note`."""
    return tuple(getattr(error, "__notes__", ()))
