"""Process of an SGLang server: starts it, calls it over HTTP, detects its death and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from functools import partial
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
    """One running server and the HTTP calls to it. `start` creates it; it belongs to one event loop.

    Attributes:
        folder: for temporary files; removed when the server has ended.
        report: the plugin's report on the first load and on its hooks; see `async_rl.inference.sglang.update`.
    """

    def __init__(self, process: NodeProcess, *, port: int, folder: Path) -> None:
        self.folder = folder
        self.report: dict[str, Any] = {}
        self._process = process
        self._url = f"http://{LOOPBACK}:{port}"
        # No limits on connections or time, as callers bound each call. Idle connections end before the server ends them
        # (SGLANG_TIMEOUT_KEEP_ALIVE).
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )
        self.watch = process.watch
        self.until_dead = process.until_dead

    @classmethod
    async def start(cls, config: SglangConfig, checkpoint: Path, *, name: str, **arguments: Any) -> SglangServer:
        """Start a server and return when it answers. The caller bounds the time.

        Args:
            name: name of the replica.
            **arguments: further ones of `server_arguments`.

        Raises:
            EngineError: SGLang is not installed or has the wrong version, or the server ended during the start.
        """
        served_name = f"{name}-{uuid.uuid4().hex}"  # unique, to recognise this server
        process, port, folder = await _launch(config, checkpoint, served_name=served_name, **arguments)
        server = cls(process, port=port, folder=folder)
        try:
            await server._until_serving(served_name)
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST request and return the decoded answer.

        Raises:
            CallError: the server refused the call.
            aiohttp.ClientError: no connection, most likely because the server died.
        """
        async with self._session.post(self._url + path, json=body) as response:
            return await _answer(response)

    async def get(self, path: str) -> Any:
        """Send a GET request and return the decoded answer; see `post` for the errors."""
        async with self._session.get(self._url + path) as response:
            return await _answer(response)

    async def stop(self) -> None:
        """Kill all processes of the server and remove its folder."""
        await self._session.close()
        await self._process.stop()

    async def _until_serving(self, served_name: str) -> None:
        """Return when the server answers and has the name `served_name`."""
        while self._process.death is None:
            with contextlib.suppress(aiohttp.ClientError, CallError):
                info = await self.get("/model_info")
                if info["served_model_name"] != served_name:
                    raise EngineError(f"another server, {info['served_model_name']}, answers at {self._url}")
                self.report = (await self.get("/server_info")).get("async_rl") or {}
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await self.until_dead()
        raise EngineError(self._process.death)


async def start_node(config: SglangConfig, place: NodePlace, *, checkpoint: Path, capture_routing: bool) -> NodeProcess:
    """Start the process of the ranks of a node but the first; it meets the server of node 0.

    Raises:
        EngineError: SGLang is not installed or has the wrong version.
    """
    name = f"node-{place.index}"
    process, _, _ = await _launch(
        config, checkpoint, served_name=name, label="", capture_routing=capture_routing, place=place
    )
    return process


async def _launch(config: SglangConfig, checkpoint: Path, **arguments: Any) -> tuple[NodeProcess, int, Path]:
    """Start a server in a new process group; return it, its port and its folder.

    The output goes to the standard error of this process: the replica's log.
    """
    python = interpreter(config)
    await check_version(python)
    folder = Path(tempfile.mkdtemp(prefix="async-rl-sglang-"))
    reserved = reserve_port(LOOPBACK)
    port = int(reserved.getsockname()[1])
    command = server_arguments(config, checkpoint, port=port, **arguments)
    process = subprocess.Popen(  # noqa: ASYNC220 - in a thread, a cancelled start would leave a server behind
        [str(python), "-m", "sglang.launch_server", *command],
        env=server_environment(config, owner=os.getpid(), folder=folder),
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
    )

    def wait() -> int:
        code = process.wait()
        reserved.close()
        shutil.rmtree(folder, ignore_errors=True)
        return code

    return NodeProcess(process.pid, wait=wait), port, folder


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
    command = [str(python), "-I", "-c", "import importlib.metadata as m; print(m.version('sglang'))"]
    asked = partial(subprocess.run, command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True)
    try:
        version = (await asyncio.to_thread(asked)).stdout.strip()
    except subprocess.SubprocessError:
        version = "no sglang"
    if version != SGLANG_VERSION:
        raise EngineError(
            f"{python} has {version}, but the replica needs sglang {SGLANG_VERSION}; "
            "create a virtualenv with `make setup-sglang`, or set engine.python"
        )


async def _answer(response: aiohttp.ClientResponse) -> Any:
    if response.status != 200:
        raise CallError(f"HTTP {response.status}: {(await response.text())[:2000]}")
    if response.content_type != "application/json":
        return await response.text()
    return await response.json()
