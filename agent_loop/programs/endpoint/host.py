"""The sessions of a rollout worker: served to the programs that it runs, or offered to agents outside of the run."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

from annotated_types import Ge, Lt

from agent_loop.bounds import Count, Seconds, bounded
from agent_loop.chat import Chat
from agent_loop.loop import Prompt
from agent_loop.programs.conversation import ChatRequest, ModelAccess, NoRolloutWaiting, SessionEnded
from agent_loop.programs.session import AgentSession
from message_queue.trajectory import POLICY

MAX_ENDED = 65_536  # ended sessions that are remembered, so that late calls get 409
RETRY_S = 5.0  # advised wait of an agent for which no rollout waits


@bounded("endpoint")
class EndpointConfig:
    """Address and limits of the endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on, also given to agents."""
    port: Annotated[int, Ge(0), Lt(2**16)] = 0
    """Port; 0 lets the system choose."""
    run_key: str | None = None
    """Key for agents outside of the run to open sessions; None if there are none."""
    max_body_bytes: Count = 32 * 2**20
    """Size of a request's body."""
    max_head_bytes: Count = 32 * 2**10
    """Size of a request's line and headers."""
    max_connections: Count = 1024
    """Connections at once. Beyond it, and beyond half as many without a valid key, the oldest without one is closed."""
    head_timeout_s: Seconds = 30.0
    """Seconds for the line and headers of a request."""
    body_timeout_s: Seconds = 60.0
    """Seconds for the body of a request, and for a client that does not read its response."""
    keep_alive_s: Seconds = 15.0
    """Seconds between the comments or pings of a stream that waits for its answer."""

    def __post_init__(self) -> None:
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError(f"endpoint.host is {self.host!r}; agents connect to it, so give one address or name")


def new_key() -> str:
    """An API key with 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> bytes:
    """Digest to look a key up by: the time of a look-up shows nothing of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class EndedSession(AgentSession):
    """An ended session, whose calls and tokens are gone. Each call raises SessionEnded."""

    def __init__(self, session: AgentSession) -> None:
        self.name, self.agents, self.ended, self.failure = session.name, session.agents, session.ended, None
        self._declared, self._running = frozenset[str](), set[asyncio.Task[Any]]()

    def _chat_of(self, request: ChatRequest) -> Chat:
        raise SessionEnded(self.name)


class Sessions:
    """Opens sessions, finds them, and serves them over HTTP. The server starts with the first session.

    Attributes:
        run_key: key for `POST /sessions`.
    """

    def __init__(self, config: EndpointConfig) -> None:
        from agent_loop.programs.endpoint.server import serve  # imports starlette and uvicorn, for runs with a program

        self._serve = serve
        self.run_key = config.run_key or new_key()
        self._config = config
        self._by_key: dict[bytes, AgentSession] = {}
        self._ended: OrderedDict[bytes, EndedSession] = OrderedDict()
        self._keys: dict[str, str] = {}  # name of a session -> its key
        self._offered: OrderedDict[str, tuple[Prompt, asyncio.Event]] = OrderedDict()  # by name, oldest first
        self._server = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._base_url: str | None = None

    # ---- for agent loops

    @asynccontextmanager
    async def serve(self, session: AgentSession) -> AsyncGenerator[ModelAccess]:
        """Context in which a program can make the calls of a session; the session ends with it."""
        base_url, key = await self._start(), new_key()
        digest = key_digest(key)
        self._by_key[digest], self._keys[session.name] = session, key
        try:
            yield ModelAccess(base_url=base_url, api_key=key, model=POLICY)
        finally:
            await session.close()
            del self._by_key[digest], self._keys[session.name]
            self._ended[digest] = EndedSession(session)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    async def offer(self, session: AgentSession, prompt: Prompt) -> None:
        """Return when an agent outside of the run has opened a session that is being served."""
        opened = asyncio.Event()
        self._offered[session.name] = prompt, opened
        try:
            await opened.wait()
        finally:
            self._offered.pop(session.name, None)

    async def close(self) -> None:
        """Stop the server, if it was started. A later session restarts it."""
        async with self._starting:
            self._base_url = None
            await self._server.aclose()

    # ---- for the server

    def open(self) -> tuple[str, str, Prompt]:
        """Give a waiting rollout to an agent: name and key of its session, and the prompt.

        The agent sees the target of the prompt, and the model only the messages that the agent sends.

        Raises:
            NoRolloutWaiting: there is none.
        """
        if not self._offered:
            raise NoRolloutWaiting(retry_after_s=RETRY_S)
        name, (prompt, opened) = self._offered.popitem(last=False)
        opened.set()
        return name, self._keys[name], prompt

    def session_of(self, key: str) -> AgentSession | None:
        """The session of a key. An ended session is still found, so that late calls get 409."""
        digest = key_digest(key)
        return self._by_key.get(digest) or self._ended.get(digest)

    async def _start(self) -> str:
        """The base URL of the server; start the server first if it does not run."""
        async with self._starting:
            if self._base_url is None:
                running = self._serve(self, run_key=self.run_key, config=self._config)
                self._base_url = await self._server.enter_async_context(running)
            return self._base_url
