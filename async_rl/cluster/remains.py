"""Ends the processes that a raylet leaves behind: `python -m async_rl.cluster.remains PID`, next to the driver.

A raylet ends its workers and its two agents when it shuts down. If the GCS is dead, the raylet ends too, but its agents
report that to the GCS first, and stay for a minute or longer. Ray kills the driver in this case, so that the driver can
end nothing. The same holds if driver and GCS are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

EVERY_S = 2.0  # between two looks at the processes below the raylet
GRACE_S = 5.0  # in which they end by themselves


class _Process(NamedTuple):
    """A line of `/proc/PID/stat`."""

    name: str
    """Name of the program."""
    parent: int
    """Process id of its parent."""
    started: int
    """Time of its start; process ids are used several times."""


@contextlib.contextmanager
def no_remains() -> Generator[None]:
    """Context of a Ray cluster that this process started; after it, or after this process, none of its processes runs.

    The cluster is shut down inside. Only Linux has `/proc`; on other systems nothing is done.
    """
    running = _running()
    raylets = [pid for pid, found in running.items() if found.parent == os.getpid() and found.name == "raylet"]
    if not raylets:
        yield
        return
    newest = max(raylets, key=lambda pid: running[pid].started)
    command = [sys.executable, "-m", __name__, str(newest)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its end closes the pipe and waits
        yield


def main(raylet: int) -> None:
    """Wait for the end of the raylet or of the process that holds stdin open, and then for all below the raylet."""
    below: dict[int, _Process] = {}
    while raylet in (running := _running()):
        below = {pid: running[pid] for pid in _below(raylet, running)}
        if select.select([sys.stdin], [], [], EVERY_S)[0]:
            break
    deadline = time.monotonic() + GRACE_S
    while left := [pid for pid, found in _running().items() if _same(below.get(pid), found)]:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _running() -> dict[int, _Process]:
    """All processes by id, without those that are dead and not waited for."""
    found: dict[int, _Process] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = path.read_text(errors="replace").partition(" (")
            name, _, fields = rest.rpartition(") ")
            state, parent, *others = fields.split()
            if state not in "ZX":
                found[int(number)] = _Process(name, int(parent), int(others[17]))
    return found


def _below(root: int, running: dict[int, _Process]) -> set[int]:
    """A process and all its descendants."""
    found = {root}
    while more := {pid for pid, process in running.items() if process.parent in found} - found:
        found |= more
    return found


def _same(before: _Process | None, now: _Process) -> bool:
    return before is not None and before.started == now.started


if __name__ == "__main__":
    main(int(sys.argv[1]))
