"""Ends the server's processes when the replica's process ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading


def end_with(owner: int, *, folder: str) -> None:
    """Kill this process's group and remove `folder` when process `owner` ends; the server has its own group."""
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
