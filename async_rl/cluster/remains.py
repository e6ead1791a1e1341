"""Ends the processes that a Ray cluster leaves behind: `python -m async_rl.cluster.remains PID`, next to the driver.

If the GCS is dead, Ray ends driver and raylet, but the raylet's two agents first report that to the GCS, and stay for a
minute or longer. The same holds if driver and GCS are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Generator

import psutil

EVERY_S = 2.0  # between two looks at the processes below the raylet
GRACE_S = 5.0  # in which they end by themselves


@contextlib.contextmanager
def no_remains() -> Generator[None]:
    """Context of a Ray cluster that this process started: after it, or after this process, nothing of Ray runs.

    The cluster is shut down inside.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its end closes the pipe and waits
        yield


def main(driver: int) -> None:
    """Wait until stdin is closed, hence the driver has ended, and then for all processes at and below its raylets."""
    below, ended = list[psutil.Process](), False
    while not ended:
        with contextlib.suppress(psutil.NoSuchProcess):
            raylets = [each for each in psutil.Process(driver).children() if each.name() == "raylet" and _runs(each)]
            below = [each for raylet in raylets for each in (raylet, *raylet.children(recursive=True))] or below
        ended = bool(select.select([sys.stdin], [], [], EVERY_S)[0])
    deadline = time.monotonic() + GRACE_S
    while left := [each for each in below if _runs(each)]:
        for each in left if time.monotonic() > deadline else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    """Whether a process is neither dead nor a zombie, and its id is not that of another one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    main(int(sys.argv[1]))
