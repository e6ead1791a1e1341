"""Runs programs that a model wrote, apart from this machine.

    result = await run_python("print(6 * 7)", limits=SandboxLimits(wall_s=5))
    result.stdout                                         "42\\n"

    caller ──> bwrap ──> sh, process 1 of new namespaces ──> setpriv ──> prlimit ──> the program
                 │        mounts the working directory         no rights   limits
                 └── ends when process 1 ends, and then the kernel has killed every process of the namespace

The program sees `/usr`, the Python installation with its packages (all read-only) and an empty working directory in
memory. It has no network, no other file, process or environment variable of this machine, and no privilege. When it
ends, is stopped or its caller is cancelled, all its descendants are killed before the function returns.

The kernel bounds the address space of each process. A thread of the caller measures the memory of all together,
0.1 s after each measurement, and stops the program if it is above the bound. In between, n processes can use up to n
times the bound. Each socket counts as the largest size of its buffer; there are only local sockets. A pipe holds at
most 64 KiB, which are not counted. Memory that no process shows is refused: anonymous shared mappings, also of
`/dev/zero`, huge pages, memory files, IPC of System V, and larger buffers of pipes and sockets.

It needs Linux with bubblewrap (`bwrap`) and util-linux. Root needs CAP_SYS_ADMIN, another user needs unprivileged user
namespaces. `check_sandbox` says what is missing; no program ever runs with less isolation.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import platform
import re
import secrets
import shutil
import signal
import struct
import sys
import sysconfig
from asyncio.subprocess import PIPE
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agent_loop.bounds import Count, Seconds, bounded
from message_queue.errors import SandboxError

STARTED = b"started\n"  # first line on stderr, written just before the program is started
PROGRAM = "/program/main"  # read-only
PACKAGES = "/packages"  # read-only; not under their own path, which may be below the working directory
WORK = "/tmp"  # working directory
PYTHON = os.path.realpath(sys.executable)
SHELL = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
OPEN_FILES = 128  # of each process
MEASURE_S = 0.1  # time between two measurements of the memory of a program

GO = b"\n"  # on stdin: starts the program, once the caller can stop it

# Mounts the working directory, then waits for the program as process 1; its end kills all others.
_INIT = f'mount -t tmpfs -o "$1",mode=1777,nosuid,nodev tmpfs {WORK}; cd {WORK}; shift; read -r go; "$@"; exit $?'
_START = 'unset OLDPWD; echo started >&2; exec "$@"'

# System calls by name, for which the limits do not hold or which need not be open: number on x86_64, on aarch64.
_DENIED = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "fanotify_init": (300, 262),
    "inotify_init": (253, 0xFFFF),  # none on aarch64
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
_CLONE3, _SOCKET = (435, 435), (41, 198)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH of the kernel
_FAMILIES = (1, 16)  # sockets: unix, netlink; buffers of others have other bounds, and vsock is in no namespace
_DONE, _EPERM, _ENOSYS, _EAFNOSUPPORT = 0, 1, 38, 97
# Calls that are refused for an argument: numbers, place of the argument, mask, its bits under the mask, error.
_REFUSED = (
    ((56, 220), 0, 0x10000000, 0x10000000, _EPERM),  # clone: a user namespace
    ((9, 222), 3, 0x2F, 0x21, _EPERM),  # mmap: shared and anonymous
    ((9, 222), 3, 0x40000, 0x40000, _EPERM),  # mmap: huge pages
    ((72, 25), 1, 0xFFFFFFFF, 1031, _EPERM),  # fcntl: size of a pipe
    ((54, 208), 2, 0xFFFFFFFF, 7, _DONE),  # setsockopt: size of the buffers, a wish that need not be met
    ((54, 208), 2, 0xFFFFFFFF, 8, _DONE),
)
_MEASURING = ThreadPoolExecutor(1, "sandbox-memory")  # separate, as tools may use all threads of the event loop


@bounded("limits")
class SandboxLimits:
    """Bounds of one program.

    A program with processes=16 and memory_mb=512 is stopped if a measurement finds more than 512 MiB in its processes
    together. Between two measurements it may have up to 16 * 512 MiB. Its files have disk_mb in addition.
    """

    wall_s: Seconds = 10.0
    """Seconds from start to end."""
    cpu_s: Count = 10
    """Seconds of CPU time of each process."""
    memory_mb: Count = 1024
    """Memory of all processes together, and address space of each process, in MiB."""
    processes: Count = 16
    """Processes and threads at once."""
    disk_mb: Count = 64
    """Size of all files in the working directory, in MiB. They are in memory."""
    files: Count = 1000
    """Files and folders in the working directory."""
    output_bytes: Count = 1_000_000
    """Bytes on stdout, and on stderr. A program that writes more is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a program ended."""

    exit_code: int | None
    """Of the program; 128 + n if signal n ended it; None if it was stopped."""
    stopped: str
    """The limit for which it was stopped, `wall_s`, `memory_mb` or `output_bytes`; "" if it ended by itself."""
    stdout: str
    """What it wrote to stdout, at most `output_bytes` bytes."""
    stderr: str
    """What it wrote to stderr, at most `output_bytes` bytes."""


async def run_python(
    source: str, *, stdin: str = "", limits: SandboxLimits | None = None, inherited: Sequence[int] = ()
) -> SandboxResult:
    """Run Python source with the Python version and the packages of the caller.

    Args:
        inherited: open files of the caller that the program has too, under their numbers.

    Raises:
        SandboxError: the program was not started, because it cannot be isolated.
    """
    return await _run([PYTHON, "-sB", PROGRAM], source, stdin=stdin, limits=limits, inherited=inherited)


async def run_shell(command: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Run a command with bash if there is one, otherwise with sh.

    Raises:
        SandboxError: the command was not started, because it cannot be isolated.
    """
    return await _run([SHELL, PROGRAM], command, stdin=stdin, limits=limits)


@functools.cache
def check_sandbox() -> None:
    """Check that programs can be isolated on this machine.

    Raises:
        SandboxError: they cannot; says what is missing.
    """
    try:
        with ThreadPoolExecutor(1) as thread:  # in a separate event loop, as the caller may be on another one
            running = thread.submit(lambda: asyncio.run(run_python("print(6 * 7)", limits=SandboxLimits(wall_s=60))))
            result = running.result()
    except OSError as error:
        raise SandboxError(_refusal(str(error))) from error
    if (result.stdout, result.stderr) != ("42\n", ""):
        raise SandboxError(_refusal(result.stopped or result.stderr + result.stdout))


async def _run(
    program: Sequence[str], source: str, *, stdin: str, limits: SandboxLimits | None, inherited: Sequence[int] = ()
) -> SandboxResult:
    running = _Running(limits=limits or SandboxLimits(), inherited=inherited)
    ended = asyncio.create_task(running.run(program, source, stdin.encode(errors="replace")))
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        running.stop("cancelled")
        await asyncio.wait([ended])
        raise


class _Running:
    """One program, until it and all its descendants are gone."""

    def __init__(self, *, limits: SandboxLimits, inherited: Sequence[int]) -> None:
        self._limits = limits
        self._inherited = inherited
        self._stopped = ""
        self._first: int | None = None  # pidfd of process 1 of the namespace, while it is open

    def stop(self, reason: str) -> None:
        """Kill all processes; nothing if they were stopped before."""
        self._stopped = self._stopped or reason
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def run(self, program: Sequence[str], source: str, stdin: bytes) -> SandboxResult:
        """Ends after the last process. It must not be cancelled, but stopped."""
        timer = asyncio.get_running_loop().call_later(self._limits.wall_s, self.stop, "wall_s")
        out, err = bytearray(), bytearray()
        async with AsyncExitStack() as stack:
            stack.callback(timer.cancel)
            process, status = await self._start(program, source, stack=stack)
            assert process.stdin and process.stdout and process.stderr
            await self._find_first(status, stack)
            feed = _feed(process.stdin, b"" if self._stopped else GO + stdin)
            await asyncio.gather(feed, self._read(process.stdout, out), self._read(process.stderr, err))
            code = await process.wait()
        if not self._stopped and not err.startswith(STARTED):
            raise SandboxError(_refusal(err.decode(errors="replace")))
        bound = self._limits.output_bytes
        return SandboxResult(
            exit_code=None if self._stopped else code,
            stopped=self._stopped,
            stdout=out[:bound].decode(errors="replace"),
            stderr=err.removeprefix(STARTED)[:bound].decode(errors="replace"),
        )

    async def _start(
        self, program: Sequence[str], source: str, *, stack: AsyncExitStack
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        """Start bwrap; returns it and the reports that it writes."""
        reading, writing = os.pipe()
        reports = stack.enter_context(os.fdopen(reading, "rb", buffering=0))
        with _prepared(program, source, limits=self._limits, status=writing) as (command, inherited):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                pass_fds=(*inherited, *self._inherited),
                env={},
            )
        status = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(status), reports
        )
        stack.callback(pipe.close)  # at the end, when bwrap has written its last report
        return process, status

    async def _find_first(self, status: asyncio.StreamReader, stack: AsyncExitStack) -> None:
        """Learn process 1 from bwrap, which reports it unless it fails, and watch its memory."""
        if line := await status.readline():
            with contextlib.suppress(ProcessLookupError):
                pid = json.loads(line)["child-pid"]
                self._first = os.pidfd_open(pid)
                stack.callback(os.close, self._first)
                stack.callback(setattr, self, "_first", None)
                stack.callback(asyncio.create_task(self._watch_memory(pid)).cancel)
        if self._stopped:
            self.stop(self._stopped)

    async def _watch_memory(self, first: int) -> None:
        bound, loop = self._limits.memory_mb << 20, asyncio.get_running_loop()
        while not self._stopped:
            if await loop.run_in_executor(_MEASURING, _memory_of_sandbox, first, bound) > bound:
                self.stop("memory_mb")
            await asyncio.sleep(MEASURE_S)

    async def _read(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        while chunk := await stream.read(1 << 16):  # to the end; otherwise asyncio does not end the process
            if len(into) <= self._limits.output_bytes + len(STARTED):
                into += chunk
            else:
                self.stop("output_bytes")


def _memory_of_sandbox(first: int, enough: int) -> int:
    """Bytes of memory of the processes of a sandbox and of its sockets, also of sockets that are in no process."""
    try:
        found = re.search(r"used (\d+)", Path(f"/proc/{first}/net/sockstat").read_text())
    except OSError:  # it has ended
        return 0
    sockets = int(found[1]) * 2 * int(Path("/proc/sys/net/core/wmem_default").read_text()) if found else 0
    return sockets + memory_of_tree(first, enough - sockets)


def memory_of_tree(pid: int, enough: int) -> int:
    """Bytes of memory of a process and its descendants, each shared page counted once.

    Args:
        enough: a sum below it may count shared pages several times, which is faster to read.
    """
    pids = _tree(pid)
    sizes = dict[int, int]()
    for each in pids:
        with contextlib.suppress(OSError):  # it is gone
            sizes[each] = int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    total = sum(sizes.values())
    return total if total <= enough else sum(_proportional(each, size) for each, size in sizes.items())


def _tree(pid: int) -> list[int]:
    """A process and its descendants, as far as they are still there."""
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
    return pids


def _proportional(pid: int, size: int) -> int:
    """Bytes of a process with its share of the pages that it has in common with others; `size` if that is secret."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return size
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


async def _feed(pipe: asyncio.StreamWriter, stdin: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the program need not read it
        pipe.write(stdin)
        await pipe.drain()
    pipe.close()


@contextlib.contextmanager
def _prepared(
    program: Sequence[str], source: str, *, limits: SandboxLimits, status: int
) -> Generator[tuple[list[str], list[int]]]:
    """The command of the sandbox, and the files that it inherits; they are closed here at the end.

    bwrap reports its processes on the file `status`.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, status)
        bwrap = shutil.which("bwrap")
        if sys.platform != "linux" or bwrap is None:
            raise SandboxError(_refusal("bubblewrap (bwrap) is not installed"))
        if not Path("/proc/thread-self/children").exists():
            raise SandboxError(_refusal("/proc has no list of children (CONFIG_PROC_CHILDREN)"))
        contents = (source.encode(errors="replace"), _system_call_rules(), b"")
        text, rules, nothing = (_file(stack, content) for content in contents)
        uid = _unused_uid()
        command = [bwrap, *_namespaces(uid), *_view(nothing), "--seccomp", str(rules)]
        command += ["--perms", "0444", "--ro-bind-data", str(text), PROGRAM]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--as-pid-1"]
        command += ["--json-status-fd", str(status)]
        mount = f"size={limits.disk_mb}m,nr_inodes={limits.files + 1}"  # one is the directory itself
        command += ["--", "/bin/sh", "-ec", _INIT, "sh", mount, *_bounds(limits, uid=uid)]
        yield [*command, "/bin/sh", "-c", _START, "sh", *program], [text, rules, nothing, status]


def _namespaces(uid: int | None) -> list[str]:
    """Options of bwrap. Process 1 keeps the capabilities that it needs to mount and to give them up."""
    keep = ["CAP_SYS_ADMIN", "CAP_SETPCAP", *([] if uid is None else ["CAP_SETUID", "CAP_SETGID"])]
    return [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *(("--unshare-user", "--uid", "0", "--gid", "0") if uid is None else ()),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *(option for name in keep for option in ("--cap-add", name)),
    ]


def _view(nothing: int) -> list[str]:
    """Options of bwrap for the files and variables that the program sees; `nothing` is an empty file."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if Path(name).is_symlink():
            options += ["--symlink", str(Path(name).readlink()), name]
        elif Path(name).is_dir():
            options += ["--ro-bind", name, name]
    options += ["--perms", "0755", "--dir", "/etc"]
    for name in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"):
        options += ["--ro-bind-try", name, name]
    python = os.path.realpath(sys.base_prefix)
    if not python.startswith("/usr/") and python != "/usr":
        for parent in reversed(Path(python).parents[:-1]):  # bwrap may make them unreadable
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", python, python]
    options += ["--ro-bind", os.path.realpath(sysconfig.get_path("purelib")), PACKAGES]
    options += ["--proc", "/proc", "--dev", "/dev", "--perms", "0000", "--ro-bind-data", str(nothing), "/dev/zero"]
    options += ["--perms", "1777", "--dir", WORK, "--clearenv"]
    variables = {
        "HOME": WORK,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # numpy would start a thread for each core
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": f"{Path(PYTHON).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": PACKAGES,
    }
    return [*options, *(part for name, value in variables.items() for part in ("--setenv", name, value))]


def _bounds(limits: SandboxLimits, *, uid: int | None) -> list[str]:
    """Commands that drop all rights and set the limits."""
    number = "" if uid is None else str(uid)
    user = ["--reuid", number, "--regid", number, "--clear-groups"] if number else []
    processes = limits.processes + (not number)  # process 1 has the same user, unless the caller is root
    return [
        *("setpriv", *user, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"),
        *("prlimit", f"--nproc={processes}", f"--as={limits.memory_mb << 20}", f"--fsize={limits.disk_mb << 20}"),
        *(f"--cpu={limits.cpu_s}", f"--nofile={OPEN_FILES}", "--core=0", "--msgqueue=0", "--"),
    ]


def _unused_uid() -> int | None:
    """A user that owns no process, for a caller who is root: the kernel does not bound the processes of root.

    None for another caller, whose user is counted in each user namespace apart.
    """
    if os.geteuid():
        return None
    ranges = [[int(part) for part in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    start, _, count = max(ranges, key=lambda each: each[2])
    return start + count // 4 + secrets.randbelow(count // 2) if count > 1000 else None


def _system_call_rules() -> bytes:
    """A filter of system calls for seccomp (BPF) that closes the ways around the limits.

    User namespaces would allow file systems without a bound, and `memory_mb` lacks memory that no process shows.
    """
    if platform.machine() not in _MACHINES:
        raise SandboxError(_refusal(f"the processor is {platform.machine()}, not one of {', '.join(_MACHINES)}"))
    column, arch = _MACHINES[platform.machine()]

    def load(offset: int) -> tuple[int, int, int, int]:
        return 0x20, 0, 0, offset

    def fails(error: int) -> tuple[int, int, int, int]:
        return 0x06, 0, 0, 0x00050000 | error

    allowed = (0x06, 0, 0, 0x7FFF0000)
    rules = [load(4), (0x15, 1, 0, arch), fails(_ENOSYS), load(0)]
    rules += [(0x35, 0, 1, 0x40000000), fails(_ENOSYS)]  # the second numbering of x86_64
    for numbers in _DENIED.values():
        rules += [(0x15, 0, 1, numbers[column]), fails(_EPERM)]
    rules += [(0x15, 0, 1, _CLONE3[column]), fails(_ENOSYS)]  # its flags cannot be read; libraries use clone then
    for numbers, place, mask, bits, error in _REFUSED:
        rules += [(0x15, 0, 5, numbers[column]), load(16 + 8 * place), (0x54, 0, 0, mask)]
        rules += [(0x15, 0, 1, bits), fails(error), load(0)]
    rules += [(0x15, 0, len(_FAMILIES) + 3, _SOCKET[column]), load(16)]
    rules += [(0x15, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    rules += [fails(_EAFNOSUPPORT), allowed, allowed]
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)


def _file(stack: contextlib.ExitStack, content: bytes) -> int:
    """A file in memory that bwrap inherits."""
    number = os.memfd_create("sandbox")
    stack.callback(os.close, number)
    with os.fdopen(number, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _refusal(cause: str) -> str:
    said = " ".join(cause.removeprefix(STARTED.decode()).split()) or "no output"
    return (
        f"programs of a model cannot be isolated on this machine: {said}. Install bubblewrap and util-linux, and allow "
        "namespaces: CAP_SYS_ADMIN for root (a privileged container), unprivileged user namespaces for another user"
    )
