"""Programs that misbehave in a sandbox: each is bounded, and leaves nothing behind."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agent_loop.tools import sandbox
from agent_loop.tools.sandbox import SandboxLimits, check_sandbox, run_python, run_shell
from message_queue.errors import SandboxError

try:
    check_sandbox()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

SOCKET_BUFFER = Path("/proc/sys/net/core/wmem_default").read_text().strip()
STAYS = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
"""


def children():
    """Processes below this one; a program that remains is one, as is its sandbox."""
    return {(one.pid, one.create_time()) for one in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_remains(monkeypatch):
    before, open_files = children(), len(list(Path("/proc/self/fd").iterdir()))
    uids, unused_uid = [], sandbox._unused_uid
    monkeypatch.setattr(sandbox, "_unused_uid", lambda: uids.append(unused_uid()) or uids[-1])
    yield
    remaining = [one.pid for one in psutil.process_iter(["uids"]) if one.info["uids"].real in uids]
    assert not remaining and children() <= before
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files + 4  # of the event loop


TEXT = "é" * 300_000
WORKS = {  # source, input, output
    "packages of the caller": ("import numpy\nprint(numpy.ones(3).sum())", "", "3.0\n"),
    "descendants end with the program": (STAYS + "print('done')", "", "done\n"),
    "descendants keep the output open": ("import os\nos.system('sleep 1000 & disown; echo done')", "", "done\n"),
    "large source and input": (f"text = '{TEXT}'\nprint(len(text), len(input()))", TEXT, "300000 300000\n"),
    "event loop": (
        "import asyncio\nasync def main():\n    one = await asyncio.create_subprocess_exec('echo', 'a', stdout=-1)\n"
        "    print((await one.communicate())[0])\nasyncio.run(main())",
        "",
        "b'a\\n'\n",
    ),
    "files in memory": (
        "import mmap\nwith open('a', 'w+b') as file:\n    file.truncate(4096)\n"
        "    mmap.mmap(file.fileno(), 4096)[:2] = b'ab'\n"
        "print(open('a', 'rb').read(2), mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)[:1])",
        "",
        "b'ab' b'\\x00'\n",
    ),
    "threads and subprocesses": (
        "import subprocess, threading\n"
        "thread = threading.Thread(target=lambda: print('thread', flush=True))\nthread.start()\nthread.join()\n"
        "print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout, end='')",
        "",
        "thread\nprocess\n",
    ),
}


@pytest.mark.parametrize(("source", "given", "shown"), WORKS.values(), ids=WORKS)
async def test_a_program_works_and_ends_with_all_that_it_started(source, given, shown):
    result = await run_python(source, stdin=given, limits=SandboxLimits(memory_mb=256, wall_s=60))
    assert (result.stopped, result.exit_code, result.stdout) == ("", 0, shown), result.stderr


async def test_run_python_returns_output_and_exit_code():
    result = await run_python("import sys\nprint(input() * 2)\nprint('bad', file=sys.stderr)\nsys.exit(3)", stdin="ab")
    assert (result.exit_code, result.stopped, result.stdout, result.stderr) == (3, "", "abab\n", "bad\n")


async def test_run_shell_returns_the_signal_that_ended_the_command():
    assert (await run_shell("echo $((6 * 7))")).stdout == "42\n"
    assert (await run_shell("kill -9 $$")).exit_code == 137


async def test_packages_below_the_working_directory_of_programs_are_seen(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("VALUE = 7")
    tmp_path.chmod(0o755)  # programs of root have another user
    monkeypatch.setattr(sandbox.sysconfig, "get_path", lambda name: str(tmp_path))
    assert tmp_path.is_relative_to(sandbox.WORK)
    assert (await run_python("import mine\nprint(mine.VALUE)")).stdout == "7\n"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1000)",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)",
        "input()\nwhile True: pass",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        STAYS + "time.sleep(1000)",
    ],
    ids=["sleeps", "ignores_sigterm", "computes", "fork_bomb", "leaves_the_session"],
)
async def test_a_program_without_end_is_stopped_with_its_descendants(source):
    result = await run_python(source, stdin="go\n", limits=SandboxLimits(wall_s=1.5, processes=8, cpu_s=100))
    assert result.stopped == "wall_s" and result.exit_code is None


async def test_cpu_time_memory_and_the_number_of_processes_are_bounded():
    result = await run_python("while True: pass", limits=SandboxLimits(cpu_s=1, wall_s=60))
    assert result.stopped == "" and result.exit_code == 137
    result = await run_python("data = bytearray(1 << 30)", limits=SandboxLimits(memory_mb=256))
    assert result.exit_code == 1 and "MemoryError" in result.stderr
    source = "import os, time\nfor n in range(100):\n    print(n, flush=True)\n    os.fork() or time.sleep(1000)"
    result = await run_python(source, limits=SandboxLimits(processes=5))
    assert result.stdout.split()[-1] == "4" and "BlockingIOError" in result.stderr


async def test_memory_of_all_processes_together_is_bounded():
    source = (
        "import os, time\n"
        "for _ in range(4):\n    if os.fork() == 0: break\n"
        "data = bytearray(90 << 20)\nos.write(1, b'.')\ntime.sleep(1000)"
    )
    result = await run_python(source, limits=SandboxLimits(memory_mb=256, wall_s=120))
    assert (result.stopped, result.exit_code) == ("memory_mb", None)


def test_pages_that_processes_share_are_counted_once():
    source = (
        "import os, sys\ndata = bytearray(64 << 20)\n"
        "for _ in range(3):\n    if os.fork() == 0: break\nos.write(1, b'.')\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert len(os.read(process.stdout.fileno(), 1) + process.stdout.read(3)) == 4
        assert sandbox.memory_of_tree(process.pid, 1 << 40) > 4 * 64 << 20
        assert 64 << 20 < sandbox.memory_of_tree(process.pid, 0) < 128 << 20
        process.stdin.close()


SOCKETS = """
import array, os, socket, sys, time
kept = []
def pair():
    kept.extend(socket.socketpair())
    kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 26)
    kept[-1].setblocking(False)
    try:
        while True: kept[-1].send(b"x" * 65536)
    except BlockingIOError: pass
def send(carrier, sockets):
    carrier.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [s.fileno() for s in sockets]))])
"""


@pytest.mark.parametrize(
    ("source", "memory_mb"),
    [
        ("for _ in range(9):\n    if os.fork() == 0: break\nwhile len(kept) < 100: pair()", 256),
        (
            "other, carrier = socket.socketpair()\n"  # sockets that are in no process
            "for _ in range(6):\n    while len(kept) < 18: pair()\n    send(carrier, kept)\n"
            "    [s.close() for s in kept]\n    kept.clear()\nwhile len(kept) < 100: pair()",
            80,
        ),
    ],
    ids=["of several processes", "under way"],
)
async def test_memory_of_sockets_is_bounded(source, memory_mb):
    limits = SandboxLimits(memory_mb=memory_mb, wall_s=120)
    result = await run_python(f"{SOCKETS}{source}\nos.write(1, b'.')\ntime.sleep(1000)", limits=limits)
    assert (result.stopped, result.exit_code, result.stderr) == ("memory_mb", None, "")


async def test_buffers_of_sockets_and_pipes_cannot_grow():
    source = (
        f"{SOCKETS}import fcntl\npair()\nprint(kept[1].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))\n"
        "r, w = os.pipe()\ntry: fcntl.fcntl(w, 1031, 1 << 20)\nexcept PermissionError: print('refused')\n"
        "print(fcntl.fcntl(w, 1032))"
    )
    assert (await run_python(source)).stdout.split() == [SOCKET_BUFFER, "refused", "65536"]


LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
PERMISSION = " == -1 and ctypes.get_errno() == 1\nraise PermissionError"
REFUSED = {
    "shared_mapping": "import mmap\nmmap.mmap(-1, 4096)",
    "huge_pages": "import mmap\nmmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | 0x40000)",
    "dev_zero": "import mmap\nmmap.mmap(open('/dev/zero', 'r+b').fileno(), 4096)",
    "vmsplice_and_inotify": f"{LIBC}assert libc.vmsplice(1, None, 0, 0) == libc.inotify_init(){PERMISSION}",
    "memfd": "import os\nos.memfd_create('a')",
    "unshare_is_absent": "import os\nos.unshare",
    "shared_memory": f"{LIBC}assert libc.shmget(0, 1 << 20, 0o1600){PERMISSION}",
    "user_namespace": f"{LIBC}assert libc.unshare(0x10000000){PERMISSION}",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
async def test_memory_outside_of_the_address_space_is_refused(source):
    result = await run_python(source)
    assert result.exit_code == 1 and ("PermissionError" in result.stderr or "AttributeError" in result.stderr)


@pytest.mark.parametrize(
    ("file", "last"), [("open(str(n), 'wb').write(b'x' * (1 << 20))", "1"), ("open(str(n), 'w').close()", "19")]
)
async def test_the_disk_is_bounded_in_size_and_number_of_files(file, last):
    source = f"for n in range(99):\n    {file}\n    print(n, flush=True)"
    result = await run_python(source, limits=SandboxLimits(disk_mb=2, files=20))
    assert result.stdout.split()[-1] == last and "No space left" in result.stderr


async def test_no_other_place_can_be_written():
    result = await run_shell(
        "for d in / /dev /dev/shm /usr /usr/bin /etc /program /proc /proc/sys /run /var/tmp "
        "$(dirname $(command -v python3)); do touch $d/x 2>/dev/null && echo $d; done; echo end"
    )
    assert result.stdout == "end\n"


async def test_output_without_end_is_stopped():
    result = await run_shell("yes", limits=SandboxLimits(output_bytes=1000, wall_s=60))
    assert result.stopped == "output_bytes" and result.stdout == "y\n" * 500
    result = await run_shell("yes >&2", limits=SandboxLimits(output_bytes=1000, wall_s=60))
    assert result.stopped == "output_bytes" and result.stderr == "y\n" * 500


async def test_a_program_has_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0of the host")
        local.listen()
        source = (
            "import socket\n"
            f"for family, place in ((socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]})),\n"
            "                      (socket.AF_INET, ('1.1.1.1', 53)), (socket.AF_UNIX, '\\0of the host'),\n"
            "                      (socket.AF_VSOCK, (2, 22))):\n"
            "    try:\n        socket.socket(family).connect(place)\n"
            "    except OSError as error:\n        print(error.errno)\n"
            "    else:\n        print('open')"
        )
        assert (await run_python(source)).stdout.split() == ["97", "97", "111", "97"]


async def test_a_program_sees_no_file_or_variable_of_the_caller(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("of the host")
    (tmp_path / "secret").chmod(0o644)
    monkeypatch.setenv("SECRET", "of the host")
    result = await run_shell(
        f"cat {tmp_path}/secret; cat /etc/passwd /etc/shadow; ls -A ~ /home /srv {tmp_path.parent}; env; "
        "ls /proc/self/fd; cat /proc/*/environ; ls -d /proc/[0-9]*; cat /proc/1/root/etc/passwd; id -u"
    )
    assert "of the host" not in result.stdout + result.stderr and "root:" not in result.stdout
    assert "SECRET" not in result.stdout and f"\n{tmp_path.name}" not in result.stdout
    processes = [line for line in result.stdout.splitlines() if line.startswith("/proc/")]
    assert 1 <= len(processes) <= 5


async def test_a_program_has_a_clean_environment(monkeypatch):
    monkeypatch.chdir("/usr/lib")
    for name in ("OLDPWD", "BASH_ENV", "ENV", "LD_PRELOAD", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, "/usr/lib")
    result = await run_python("import os\nprint(dict(os.environ, LC_CTYPE=''))")
    names = ("HOME", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PWD", "PYTHONPATH")
    environment = eval(result.stdout)
    assert tuple(sorted(environment)) == names and environment["PWD"] == "/tmp"


async def test_a_program_inherits_no_file_of_the_caller(tmp_path):
    with (tmp_path / "open").open("w+") as file, socket.create_server(("127.0.0.1", 0)) as server:
        for number in (file.fileno(), server.fileno()):
            os.set_inheritable(number, True)
        source = (
            "import os\nfor n in range(3, 1000):\n"
            "    try: os.write(n, b'leak')\n    except OSError: pass\n    else: print(n)\n"
            "print(sorted(map(int, os.listdir('/proc/self/fd')))[:3])\n"
            "for n in map(int, os.listdir('/proc/self/fd')):\n"
            "    try: print(os.readlink(f'/proc/self/fd/{n}'))\n    except OSError: pass"
        )
        result = await run_python(source)
        first, *links = result.stdout.splitlines()
        assert first == "[0, 1, 2]" and all(link.startswith("pipe:") for link in links) and len(links) == 3
        assert not file.read()


async def test_a_program_has_no_socket_file_of_the_host(tmp_path):
    with socket.socket(socket.AF_UNIX) as local:
        tmp_path.chmod(0o755)
        local.bind(f"{tmp_path}/socket")
        local.listen()
        source = f"import socket\nsocket.socket(socket.AF_UNIX).connect('{tmp_path}/socket')"
        assert "FileNotFoundError" in (await run_python(source)).stderr


async def test_a_program_has_no_capability_and_cannot_end_process_1():
    source = (
        "import os, signal\n"
        "for number in (signal.SIGKILL, signal.SIGTERM):\n"
        "    try: os.kill(1, number); os.kill(os.getppid(), number)\n"
        "    except PermissionError: pass\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNew'))])"
    )
    result = await run_python(source)
    assert eval(result.stdout) == ["0" * 16] * 5 + ["1"]


async def test_a_cancelled_caller_stops_the_program():
    task = asyncio.create_task(run_python(STAYS + "time.sleep(1000)", limits=SandboxLimits(wall_s=1000)))
    deadline = time.monotonic() + 60
    while sum(psutil.Process(pid).name() == "python3.11" for pid, _ in children()) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("turns", range(6))
async def test_a_caller_may_be_cancelled_at_any_time(turns):
    task = asyncio.create_task(run_python("import time\ntime.sleep(1000)", limits=SandboxLimits(wall_s=1000)))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_programs_run_side_by_side_and_do_not_see_each_other():
    source = "import os\nopen(input(), 'w')\nprint(os.listdir('.'))"
    results = await asyncio.gather(*(run_python(source, stdin=f"{n}\n") for n in range(4)))
    assert [eval(result.stdout) for result in results] == [[str(n)] for n in range(4)]


@pytest.mark.parametrize("command", ["false", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1"])
async def test_a_machine_without_isolation_is_refused_and_runs_nothing(command, tmp_path, monkeypatch):
    broken = tmp_path / "bwrap"
    broken.write_text(f"#!/bin/sh\n{command}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxError, match="isolated"):
        sandbox.check_sandbox.__wrapped__()
    with pytest.raises(SandboxError, match="isolated"):
        await run_python("print('it ran')")


async def test_a_machine_without_bubblewrap_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="bubblewrap"):
        await run_shell("true")


@pytest.mark.parametrize("name", ["wall_s", "memory_mb", "processes", "files"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=name):
        SandboxLimits(**{name: 0})
