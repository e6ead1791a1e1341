"""Tools of an MCP server (Model Context Protocol), over the pipes of a process or over HTTP.

    Task(tools=[McpServer("uvx", "mcp-server-fetch"), McpServer(url="http://127.0.0.1:9000/mcp")], ...)

    rollout ──> call ──> McpConnection ──> task that holds the client ──> pipes ──> guard ──> server
                                                                      └─> HTTP ──> server

The server is asked for its tools when the object is made. A rollout connects at its first call and disconnects at its
end; with `shared=True` all rollouts of a worker use one connection, which closes when none of them runs.

The guard leads the process group of the server. It kills the group when the server ends or when the pipe from the
worker closes, which the kernel does even if the worker is killed. Only a process that leaves its group escapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_loop.boundary import boundary
from agent_loop.loop import Prompt
from agent_loop.tools.tool import Tool
from agent_loop.user_errors import describe_error
from message_queue.errors import OvertimeError, RolloutError, ToolError

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

LIST_S = 120.0  # for the list of tools; this may include the download of the server
CLOSE_S = 2.0  # for a server to end by itself once its input is closed
MAX_PAGES = 100  # of a list of tools
MAX_LINE = 16 << 20  # bytes of one message over pipes
MAX_JUNK = 1 << 20  # bytes of a server on stdout that are no messages
MAX_TAIL = 500  # bytes of stderr that an error shows
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")  # variables; others may be secrets

_GUARD = """
import os, select, signal, sys
life, command = int(sys.argv[1]), sys.argv[2:]
server = os.fork()
if not server:
    os.close(life)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}".encode())
    os._exit(127)
os.close(0)
os.close(1)
select.select([life, os.pidfd_open(server)], [], [])
os.killpg(0, signal.SIGKILL)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool:
    """A Tool of a server."""

    name: str
    """Name of the tool."""
    description: str
    """Text for the model."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    call: Callable[[str, Mapping[str, Any]], Awaitable[str]] | None = None
    """Makes a call by name; None outside of a rollout."""

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """See `agent_loop.tools.tool.Tool`."""
        if self.call is None:
            raise RolloutError(f"{self.name} was called outside of a rollout; use the tools of McpServer.opened()")
        return await self.call(self.name, arguments)


class McpServer:
    """An MCP server whose tools are those of a task.

    Args:
        command: program and arguments of a server that speaks over its pipes.
        url: address of a server that speaks streamable HTTP.
        env: more variables for the command, which inherits only `INHERITED`.
        headers: more headers for the URL, such as Authorization.
        only: names of the tools to use; None uses all.
        shared: whether all rollouts of a worker use one connection. It is right if calls do not depend on earlier ones.
        repeatable: whether the same calls on a new connection make the same state; see `agent_loop.tools.functions`.

    Attributes:
        tools: descriptions of the tools.
        repeatable: None if the server is shared, as its calls are never repeated.

    Raises:
        ValueError: the arguments do not name one server, or the server gives no list of tools.
    """

    def __init__(
        self,
        *command: str,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        shared: bool = False,
        repeatable: bool = False,
    ) -> None:
        self.name = url or " ".join(command)
        if bool(command) == bool(url):
            raise ValueError(f"command is {command} and url is {url!r}; give one of them")
        if shared and repeatable:
            raise ValueError("repeatable is True for a shared server, whose calls are never repeated; leave out one")
        if (headers and command) or (env and url):
            raise ValueError(f"{self.name}: env is for a command, and headers are for a url; leave out the other")
        self._command, self._url = command, url
        self._env = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(env or {})
        self._headers = dict(headers or {})
        self.repeatable = None if shared else repeatable
        self._shared = McpConnection(self, reopens=True) if shared else None
        with ThreadPoolExecutor(1) as thread:  # in a separate event loop, as the caller may be on another one
            found = thread.submit(lambda: asyncio.run(self._list())).result()
        self.tools = [tool for tool in found if only is None or tool.name in only]
        names = [tool.name for tool in found]
        if only is not None and (absent := set(only) - set(names)):
            raise ValueError(f"only has {sorted(absent)}, and the tools of {self.name} are {', '.join(names)}")
        if not self.tools:
            raise ValueError(f"mcp server {self.name} has no tools; leave it out")

    def check(self, target: Mapping[str, Any]) -> None:
        """Nothing: a server takes no columns."""

    @asynccontextmanager
    async def opened(self, prompt: Prompt, *, timeout_s: float) -> AsyncGenerator[list[Tool]]:
        """The tools on a connection that is opened at the first call, under the time-out of that call."""
        async with self._shared or McpConnection(self, reopens=False) as connection:
            yield [replace(tool, call=connection.call) for tool in self.tools]

    def client(self, tail: bytearray) -> Client:
        """A client that is not connected; `tail` gets the end of stderr. A server with a state needs a session."""
        from mcp import Client

        transport = _over_http(self._url, self._headers) if self._url else _over_pipes(self._command, self._env, tail)
        return Client(transport, mode="auto" if self.repeatable is None else "legacy", cache=None)

    async def _list(self) -> list[McpTool]:
        session = McpSession(self)
        try:
            return await boundary(partial(self._pages, session), name=self.name, timeout_s=LIST_S)
        except ImportError as error:
            raise ValueError(f"mcp cannot be imported ({error}); pip install 'async-rl[mcp]'") from error
        except OvertimeError as error:
            raise ValueError(session.report(f"lists no tools in {LIST_S:g} s")) from error
        except (RolloutError, OSError) as error:
            raise ValueError(str(error)) from error
        except Exception as error:
            raise ValueError(session.report(f"lists no tools ({describe_error(error, with_line=False)})")) from error
        finally:
            await session.close()

    async def _pages(self, session: McpSession) -> list[McpTool]:
        """All tools of the server."""
        found = list[McpTool]()
        client, cursor = await session.client(), None
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for one in page.tools:
                found.append(McpTool(name=one.name, description=one.description or "", parameters=one.input_schema))
            if not (cursor := page.next_cursor):
                return found
        raise ValueError(f"mcp server {self.name} lists more than {MAX_PAGES} pages of tools")


class McpConnection:
    """The session of one rollout, or of all rollouts of a worker, from its first call to its end.

    Args:
        reopens: whether a call after the death of the server reconnects, as for a server without state. Otherwise
            calls are made one after the other, in the order of the turn.
    """

    def __init__(self, server: McpServer, *, reopens: bool) -> None:
        self._server = server
        self._reopens = reopens
        self._rollouts = 0
        self._turn = asyncio.Lock()
        self._session: McpSession | None = None

    async def __aenter__(self) -> McpConnection:
        self._rollouts += 1
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._rollouts -= 1
        if not self._rollouts and self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The reply to one call.

        Raises:
            ToolError: the server refuses the call or reports an error.
            RolloutError: the server cannot be reached or has died.
        """
        async with contextlib.nullcontext() if self._reopens else self._turn:
            session = before = self._session
            if session is None or (self._reopens and session.ends.is_set()):
                session = self._session = McpSession(self._server)
                if before is not None:
                    await before.close()
            return await session.call(name, arguments)


class McpSession:
    """A client that is open, held by a separate task: it has to be opened and closed by one task.

    Attributes:
        ends: set when it takes no more calls.
    """

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._tail = bytearray()
        self._cause = ""
        self.ends = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        self._task = asyncio.create_task(self._hold())

    async def client(self) -> Client:
        """The client, once it is connected. RolloutError: the server cannot be reached."""
        return await asyncio.shield(self._client)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `McpConnection.call`."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST

        client = await self.client()
        if self.ends.is_set():
            raise RolloutError(self.report("has ended"))
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code not in (CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST):
                raise ToolError(error.message) from error
            if error.code != INTERNAL_ERROR:
                await self.close()
            raise RolloutError(self.report(f"failed at a call of {name}: {error.message}")) from error
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        return text

    def report(self, cause: str) -> str:
        """A text that names the server, the cause and the end of its stderr."""
        said = " ".join(self._tail.decode(errors="replace").split())
        return f"mcp server {self._server.name} {cause}{self._cause}{f'; it wrote: {said}' if said else ''}"

    async def close(self) -> None:
        """Disconnect, and end a server that was started for this session. Idempotent."""
        self.ends.set()
        try:
            if self._client.done():
                await asyncio.wait([self._task], timeout=2 * CLOSE_S)
        finally:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=2 * CLOSE_S)

    async def _hold(self) -> None:
        try:
            async with self._server.client(self._tail) as client:
                self._client.set_result(client)
                await self.ends.wait()
        except ImportError as error:
            self._client.set_exception(error)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - the calls report it
            self._cause = f" ({describe_error(error, with_line=False)})"
        finally:
            self.ends.set()
            if not self._client.done():
                self._client.set_exception(RolloutError(self.report("cannot be reached")))


def _text_of(result: CallToolResult) -> str:
    """The text that the model sees; a note in place of images, sounds and binary files."""
    parts: list[str] = []
    for block in result.content:
        match block.type:
            case "text":
                parts.append(block.text)
            case "image" | "audio":
                parts.append(f"[{block.type} of type {block.mime_type}, which is not shown]")
            case "resource":
                text = getattr(block.resource, "text", None)
                parts.append(f"[file {block.resource.uri}, which is not shown]" if text is None else text)
            case "resource_link":
                parts.append(f"[link to {block.uri}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


@asynccontextmanager
async def _over_http(url: str, headers: Mapping[str, str]) -> AsyncGenerator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=httpx2.Timeout(30, read=None)) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams


class _Pipes(SubprocessStreamProtocol):
    """Pipes of a process, and its end."""

    def __init__(self) -> None:
        super().__init__(limit=MAX_LINE, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


@asynccontextmanager
async def _over_pipes(command: Sequence[str], env: Mapping[str, str], tail: bytearray) -> AsyncGenerator[Any]:
    """Messages of a process, one a line. Its group is killed at the end.

    The transport of the package `mcp` has no bound for a line and no end for lines that are no messages.
    """
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    incoming, received = anyio.create_memory_object_stream[Any](0)
    sent, outgoing = anyio.create_memory_object_stream[Any](0)

    async def read(stdout: asyncio.StreamReader) -> None:
        junk = 0
        async with incoming:
            try:
                while junk <= MAX_JUNK and (line := await stdout.readline()):
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        junk += len(line)
                    else:
                        await incoming.send(SessionMessage(message))
            except ValueError:
                junk = MAX_LINE
            if junk > MAX_JUNK:
                tail[:] = f"a message of more than {MAX_LINE} bytes, or {MAX_JUNK} bytes without any".encode()

    async def write(stdin: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            async with outgoing:
                async for item in outgoing:
                    text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(f"{text}\n".encode())
                    await stdin.drain()

    async def keep_tail(stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(1 << 16):
            tail[:] = (tail + chunk)[-MAX_TAIL:]

    async with _process(command, env) as pipes:
        assert pipes.stdin and pipes.stdout and pipes.stderr
        works = (read(pipes.stdout), write(pipes.stdin), keep_tail(pipes.stderr))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield received, sent
            pipes.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await pipes.exited.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for stream in (incoming, received, sent, outgoing):
                stream.close()


@asynccontextmanager
async def _process(command: Sequence[str], env: Mapping[str, str]) -> AsyncGenerator[_Pipes]:
    """A process behind the guard."""
    reading, writing = os.pipe()
    try:
        arguments = (sys.executable, "-ISc", _GUARD, str(reading), *command)
        options: dict[str, Any] = {"pass_fds": (reading,), "env": dict(env), "start_new_session": True}
        try:
            transport, pipes = await asyncio.get_running_loop().subprocess_exec(
                _Pipes, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, **options
            )
        finally:
            os.close(reading)
        try:
            yield pipes
        finally:
            if transport.get_returncode() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(transport.get_pid(), signal.SIGKILL)
            transport.close()
            await pipes.exited.wait()
    finally:
        os.close(writing)
