"""The sessions of a rollout worker: served to the programs that it runs, or offered to agents outside of the run."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agent_loop.chat import Chat
from agent_loop.loop import Prompt
from agent_loop.programs.conversation import ChatRequest, ModelAccess, NoRolloutWaiting, SessionEnded
from agent_loop.programs.endpoint.config import EndpointConfig
from agent_loop.programs.session import AgentSession
from message_queue.trajectory import POLICY

MAX_ENDED = 65_536  # ended sessions that are remembered, so that late calls get 409
RETRY_S = 5.0  # advised wait of an agent for which no rollout waits


def new_key() -> str:
    """An API key with 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> bytes:
    """Digest to look a key up by: the time of a look-up shows nothing of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A new session, for the agent that asked for it."""

    id: str
    """Unique name; letters, digits, "_" and "-"."""
    api_key: str
    """Key of this session alone, from `new_key`."""
    prompt: Prompt
    """Task input; the agent sees its target, and the model only the messages that the agent sends."""


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

    def open(self) -> OpenedSession:
        """Give a waiting rollout to an agent.

        Raises:
            NoRolloutWaiting: there is none.
        """
        if not self._offered:
            raise NoRolloutWaiting(retry_after_s=RETRY_S)
        name, (prompt, opened) = self._offered.popitem(last=False)
        opened.set()
        return OpenedSession(id=name, api_key=self._keys[name], prompt=prompt)

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
