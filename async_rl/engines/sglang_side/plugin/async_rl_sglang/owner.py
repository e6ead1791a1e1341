"""Ends the server's processes with the process that owns the replica."""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading


def end_with(owner: int, *, folder: str) -> None:
    """Remove `folder` and kill this process's group when process `owner` is gone; the server leads its own group."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _end(folder)
        return

    def wait() -> None:
        select.select([handle], [], [])
        _end(folder)

    threading.Thread(target=wait, name="end-with-owner", daemon=True).start()


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
