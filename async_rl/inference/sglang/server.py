"""Process of an SGLang server: starts it, calls it over HTTP, detects its death and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from async_rl.inference.nodes import NodePlace, NodeProcess, reserve_port
from async_rl.inference.sglang.config import (
    SGLANG_VERSION,
    VENV_PYTHON,
    SglangConfig,
    server_arguments,
    server_environment,
)
from message_queue.errors import EngineError

LOOPBACK = "127.0.0.1"
CONNECT_S = 0.2  # between two attempts to reach a starting server
VERSION_TIMEOUT_S = 60.0


class CallError(Exception):
    """The server refused a call; the message has the status and the text of its answer."""


class SglangServer:
    """One running server and the HTTP calls to it. `start` creates it; it belongs to one event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], *, port: int, folder: Path, session: aiohttp.ClientSession
    ) -> None:
        self._process = process
        self._port = port
        self._folder = folder
        self._session = session
        self._pidfd: int | None = os.pidfd_open(process.pid)
        self._dead = asyncio.Event()
        self._on_death: Callable[[str], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._died)
        self.report: dict[str, Any] = {}
        """The plugin's report on the first load and on its hooks; see `async_rl.inference.sglang.update.first_load`."""

    @classmethod
    async def start(
        cls,
        config: SglangConfig,
        checkpoint: Path,
        *,
        name: str,
        label: str,
        capture_routing: bool,
        place: NodePlace | None = None,
    ) -> SglangServer:
        """Start a server and return when it answers. The caller bounds the time.

        Args:
            name: name of the replica.
            label: version label of the first weights in the server's answers.
            capture_routing: whether the server returns routing rows.
            place: of this node, the first of several; None if the replica has one.

        Raises:
            EngineError: SGLang is not installed or has the wrong version, or the server ended during the start.
        """
        python = interpreter(config)
        await check_version(python)
        folder = Path(tempfile.mkdtemp(prefix="async-rl-sglang-"))
        served_name = f"{name}-{uuid.uuid4().hex}"  # unique, to recognise this server
        reserved = reserve_port(LOOPBACK)
        port = int(reserved.getsockname()[1])
        command = server_arguments(
            config,
            checkpoint,
            port=port,
            served_name=served_name,
            label=label,
            capture_routing=capture_routing,
            place=place,
        )
        # Not in a thread: if the start were cancelled, the thread would leave a server behind.
        process = _launch([str(python), "-m", "sglang.launch_server", *command], config, folder)
        server = cls(process, port=port, folder=folder, session=_session())
        try:
            await server._until_serving(served_name)
        except BaseException:
            await server.stop()
            raise
        finally:
            reserved.close()
        return server

    @property
    def folder(self) -> Path:
        """Folder for temporary files; `stop` removes it."""
        return self._folder

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with the reason when the server's process ends."""
        self._on_death = on_death
        if self._dead.is_set():
            self._died()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request and return the decoded answer.

        Raises:
            CallError: the server refused the call.
            aiohttp.ClientError: no connection, most likely because the server died.
        """
        async with self._session.post(f"http://{LOOPBACK}:{self._port}{path}", json=body) as response:
            return await _answer(response)

    async def get(self, path: str) -> Any:
        """Send a GET request and return the decoded answer; see `post` for the errors."""
        async with self._session.get(f"http://{LOOPBACK}:{self._port}{path}") as response:
            return await _answer(response)

    async def until_dead(self) -> None:
        """Return when the server's process has ended."""
        await self._dead.wait()

    async def stop(self) -> None:
        """Kill all processes of the server and remove its folder."""
        self._unwatch()
        await self._session.close()
        await asyncio.to_thread(self._end)

    # ---- inside

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _died(self) -> None:
        self._unwatch()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the rest of its group
        self._dead.set()
        if self._on_death is not None:
            self._on_death(f"server process {self._process.pid} died, exit code {self._process.wait()}")

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def _until_serving(self, served_name: str) -> None:
        """Return when the server answers and has the name `served_name`."""
        while True:
            if self._dead.is_set():
                raise EngineError(f"the server ended with exit code {self._process.wait()}")
            with contextlib.suppress(aiohttp.ClientError, CallError):
                info = await self.get("/model_info")
                if info["served_model_name"] != served_name:
                    raise EngineError(f"another server, {info['served_model_name']}, uses port {self._port}")
                self.report = (await self.get("/server_info")).get("async_rl") or {}
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await self._dead.wait()


async def start_node(config: SglangConfig, place: NodePlace, *, checkpoint: Path, capture_routing: bool) -> NodeProcess:
    """Start the process of the ranks of a node but the first; it meets the server of node 0.

    Raises:
        EngineError: SGLang is not installed or has the wrong version.
    """
    python = interpreter(config)
    await check_version(python)
    folder = Path(tempfile.mkdtemp(prefix="async-rl-sglang-"))
    reserved = reserve_port(LOOPBACK)  # where it only tells that it lives
    command = server_arguments(
        config,
        checkpoint,
        port=int(reserved.getsockname()[1]),
        served_name=f"node-{place.index}",
        label="",
        capture_routing=capture_routing,
        place=place,
    )
    process = _launch([str(python), "-m", "sglang.launch_server", *command], config, folder)

    def wait() -> int:
        code = process.wait()
        reserved.close()
        shutil.rmtree(folder, ignore_errors=True)
        return code

    return NodeProcess(process.pid, wait=wait)


def interpreter(config: SglangConfig) -> Path:
    """The Python of SGLang's virtualenv.

    Raises:
        EngineError: no interpreter was found.
    """
    if config.python is not None:
        candidates: Sequence[Path] = [config.python]
    else:
        candidates = [Path(sys.prefix).parent / VENV_PYTHON, Path.cwd() / VENV_PYTHON]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate.absolute()
    raise EngineError(
        f"no interpreter of SGLang's virtualenv at {' or '.join(map(str, candidates))}; "
        "create it with `make setup-sglang`, or set engine.python"
    )


async def check_version(python: Path) -> None:
    """Raise EngineError unless `python` has SGLang of version SGLANG_VERSION."""
    script = "import importlib.metadata as m; print(m.version('sglang'))"
    asked = await asyncio.create_subprocess_exec(
        str(python), "-I", "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(VERSION_TIMEOUT_S):
            answer, _ = await asked.communicate()
    finally:
        if asked.returncode is None:
            asked.kill()
            await asked.wait()
    version = answer.decode().strip() if asked.returncode == 0 else "no sglang"
    if version != SGLANG_VERSION:
        raise EngineError(
            f"{python} has {version}, but the replica needs sglang {SGLANG_VERSION}; "
            "create a virtualenv with `make setup-sglang`, or set engine.python"
        )


def _launch(command: list[str], config: SglangConfig, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process in a new process group, so that all its children can be killed together.

    Its output goes to the standard error of this process: the replica's log.
    """
    environment = server_environment(config, owner=os.getpid(), folder=folder)
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)


def _session() -> aiohttp.ClientSession:
    """An HTTP session without limits on connections or time; callers bound each call.

    It drops idle connections before the server does (see SGLANG_TIMEOUT_KEEP_ALIVE).
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=600)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)


async def _answer(response: aiohttp.ClientResponse) -> Any:
    if response.status != 200:
        raise CallError(f"HTTP {response.status}: {(await response.text())[:2000]}")
    if response.content_type != "application/json":
        return await response.text()
    return await response.json()
