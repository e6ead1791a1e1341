"""Ends the processes that a Ray cluster leaves behind: `python -m async_rl.cluster.remains PID`, next to the driver.

If the GCS is dead, Ray ends driver and raylet, but the raylet's two agents first report that to the GCS, and stay for a
minute or longer. The same holds if driver and GCS are killed.
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

EVERY_S = 2.0  # between two looks at the processes below the raylet
GRACE_S = 5.0  # in which they end by themselves


@contextlib.contextmanager
def no_remains() -> Generator[None]:
    """Context of a Ray cluster that this process started: after it, or after this process, nothing of Ray runs.

    The cluster is shut down inside. Only Linux has `/proc`; on other systems nothing is done.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its end closes the pipe and waits
        yield


def main(driver: int) -> None:
    """Wait until stdin is closed, hence the driver has ended, and then for all processes at and below its raylets."""
    below, ended = dict[int, int](), False
    while not ended:
        running = _running()
        found = {pid for pid, (_, parent, name) in running.items() if parent == driver and name == "raylet"}
        while more := {pid for pid, (_, parent, _) in running.items() if parent in found} - found:
            found |= more
        below = {pid: running[pid][0] for pid in found} or below
        ended = bool(select.select([sys.stdin], [], [], EVERY_S)[0])
    deadline = time.monotonic() + GRACE_S
    while left := [pid for pid, (started, *_) in _running().items() if below.get(pid) == started]:
        for pid in left if time.monotonic() > deadline else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _running() -> dict[int, tuple[int, int, str]]:
    """Process id -> (time of its start, id of its parent, name), without those that are dead and not waited for."""
    found: dict[int, tuple[int, int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, fields = path.read_text(errors="replace").rpartition(") ")
            state, parent, *others = fields.split()
            if state not in "ZX":
                found[int(path.parent.name)] = int(others[17]), int(parent), head.partition(" (")[2]
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
