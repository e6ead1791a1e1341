"""No process of a Ray cluster outlives the driver that started it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from async_rl.cluster import remains
from async_rl.cluster.remains import GRACE_S

RAYLET = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"raylet")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.stdin.read()
"""
DRIVER = """
import contextlib, ray, sys
from async_rl.cluster.placement import start_ray
from async_rl.cluster.remains import no_remains
from async_rl.config import ClusterConfig

@ray.remote(num_cpus=0)
class Actor:
    def answer(self): return 1

with contextlib.ExitStack() as stack:
    start_ray(ClusterConfig(num_cpus=2, object_store_bytes=128 << 20))
    stack.enter_context(no_remains())
    stack.callback(ray.shutdown)
    actor = Actor.remote()
    ray.get(actor.answer.remote())
    print("ready", flush=True)
    sys.stdin.read()
"""


def started(code, **environment):
    """A process that runs `code`, after its first line of output, and that line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    return process, process.stdout.readline()


def alive(processes):
    """Those that run; a process that nobody has waited for does not."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def await_end(processes, *, timeout_s):
    deadline = time.monotonic() + timeout_s
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        assert not left, [(process.pid, process.cmdline()) for process in left]
    finally:
        for process in left:
            process.kill()


@pytest.mark.parametrize("dies_first", [False, True])
def test_processes_at_and_below_a_raylet_are_ended_after_the_driver(dies_first, monkeypatch):
    reading, writing = os.pipe()
    looked, wait = threading.Event(), select.select
    monkeypatch.setattr(remains, "GRACE_S", 0.1)
    monkeypatch.setattr(remains, "select", SimpleNamespace(select=lambda *of: looked.set() or wait(*of)))
    (raylet, child), (stranger, _) = started(RAYLET), started("import sys; print(); sys.stdin.read()")
    with os.fdopen(reading) as stdin, os.fdopen(writing, "wb") as driver, raylet, stranger:
        monkeypatch.setattr(remains, "sys", SimpleNamespace(stdin=stdin))
        watcher = threading.Thread(target=remains.main, args=(os.getpid(),))
        watcher.start()
        assert looked.wait(60)
        below = [psutil.Process(raylet.pid), psutil.Process(int(child))]
        if dies_first:
            raylet.kill()
        driver.close()
        watcher.join(60)
        await_end(below, timeout_s=1)
        assert not watcher.is_alive() and stranger.poll() is None


@pytest.mark.drawn(1)
@pytest.mark.parametrize("victim", ["gcs", "gcs and driver", "driver", "nothing"])
def test_no_process_of_ray_stays(victim):
    driver, ready = started(DRIVER, RAY_gcs_rpc_server_reconnect_timeout_s="3")
    with driver:
        assert ready == "ready\n"
        tree = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        names = [process.name() for process in tree]
        assert sum("Agent" in " ".join(process.cmdline()) for process in tree) == 2
        if "gcs" in victim:
            tree[names.index("gcs_server")].kill()
        if "driver" in victim:
            driver.send_signal(signal.SIGKILL)
        if victim == "nothing":
            driver.stdin.close()
        driver.wait(60)
        await_end(tree, timeout_s=GRACE_S + 15)
