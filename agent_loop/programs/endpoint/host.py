"""The sessions of a rollout worker: served to the programs that it runs, or offered to agents outside of the run."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from agent_loop.loop import Prompt
from agent_loop.programs import session as calls
from agent_loop.programs.conversation import ChatAnswer, ChatRequest, TokenAnswer, TokenRequest
from agent_loop.programs.endpoint.config import EndpointConfig
from agent_loop.programs.endpoint.errors import (
    ContextFull,
    EndpointError,
    NoRolloutWaiting,
    RequestError,
    SessionEnded,
    SessionFailed,
)
from agent_loop.programs.endpoint.sessions import OpenedSession, SessionHandle, SessionStatus, key_digest, new_key
from agent_loop.programs.program import ModelAccess
from agent_loop.programs.session import AgentSession
from message_queue.trajectory import POLICY

MAX_ENDED = 65_536  # ended sessions that are remembered, so that late calls get 409
RETRY_S = 5.0  # advised wait of an agent for which no rollout waits

T = TypeVar("T")


class Handle:
    """A session, as the endpoint sees it."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self.id = session.name
        self.agents: Sequence[str] = session.agents

    @property
    def status(self) -> SessionStatus:
        """See `SessionHandle`."""
        if self._session.failure is not None:
            return "failed"
        return "ended" if self._session.ended.is_set() else "open"

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """See `SessionHandle`."""
        try:
            return await self._session.answer(request)
        except _ERRORS as error:
            raise self._known(error) from error

    async def generate(self, request: TokenRequest) -> TokenAnswer:
        """See `SessionHandle`."""
        try:
            return await self._session.generate(request)
        except _ERRORS as error:
            raise self._known(error) from error

    def count_tokens(self, request: ChatRequest) -> int:
        """See `SessionHandle`."""
        try:
            return self._session.count_tokens(request)
        except _ERRORS as error:
            raise self._known(error) from error

    def reward(self, reward: float | Mapping[str, float]) -> None:
        """See `SessionHandle`."""
        try:
            self._session.reward(reward)
        except _ERRORS as error:
            raise self._known(error) from error

    def end(self) -> None:
        """See `SessionHandle`."""
        self._session.end()

    def _known(self, error: Exception) -> EndpointError:
        match error:
            case calls.SessionEnded():
                return SessionEnded(self.id)
            case calls.SessionFailed():
                return SessionFailed(f"session {self.id} failed")
            case calls.ContextFull():
                return ContextFull(prompt_tokens=error.prompt_tokens, max_tokens=error.max_tokens)
            case _:
                return RequestError(str(error))


class EndedHandle:
    """An ended session, whose calls and tokens are gone."""

    status: SessionStatus = "ended"

    def __init__(self, name: str, *, agents: Sequence[str]) -> None:
        self.id = name
        self.agents = agents

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """See `SessionHandle`."""
        raise SessionEnded(self.id)

    async def generate(self, request: TokenRequest) -> TokenAnswer:
        """See `SessionHandle`."""
        raise SessionEnded(self.id)

    def count_tokens(self, request: ChatRequest) -> int:
        """See `SessionHandle`."""
        raise SessionEnded(self.id)

    def reward(self, reward: float | Mapping[str, float]) -> None:
        """See `SessionHandle`."""
        raise SessionEnded(self.id)

    def end(self) -> None:
        """See `SessionHandle`."""


_ERRORS = (calls.SessionEnded, calls.SessionFailed, calls.CallRefused)


class Sessions:
    """A `SessionHost` and an `agent_loop.programs.program.Gateway`. Its server starts with the first session.

    Attributes:
        run_key: key for `POST /sessions`.
    """

    def __init__(self, config: EndpointConfig) -> None:
        from agent_loop.programs.endpoint.server import serve  # imports starlette and uvicorn, for runs with a program

        self._serve = serve
        self.run_key = config.run_key or new_key()
        self._config = config
        self._by_key: dict[bytes, Handle] = {}
        self._ended: OrderedDict[bytes, EndedHandle] = OrderedDict()
        self._keys: dict[str, str] = {}  # name of a session -> its key
        self._offered: OrderedDict[str, tuple[Prompt, asyncio.Event]] = OrderedDict()  # by name, oldest first
        self._server = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._base_url: str | None = None

    # ---- for agent loops

    @asynccontextmanager
    async def serve(self, session: AgentSession) -> AsyncGenerator[ModelAccess]:
        """See `agent_loop.programs.program.Gateway.serve`."""
        base_url, key = await self._start(), new_key()
        digest = key_digest(key)
        self._by_key[digest], self._keys[session.name] = Handle(session), key
        try:
            yield ModelAccess(base_url=base_url, api_key=key, model=POLICY)
        finally:
            await session.close()
            del self._by_key[digest], self._keys[session.name]
            self._ended[digest] = EndedHandle(session.name, agents=session.agents)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    async def offer(self, session: AgentSession, prompt: Prompt) -> None:
        """See `agent_loop.programs.program.Gateway.offer`."""
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
        """See `SessionHost`."""
        if not self._offered:
            raise NoRolloutWaiting(retry_after_s=RETRY_S)
        name, (prompt, opened) = self._offered.popitem(last=False)
        opened.set()
        return OpenedSession(id=name, api_key=self._keys[name], prompt=prompt)

    def session_of(self, key: str) -> SessionHandle | None:
        """See `SessionHost`."""
        digest = key_digest(key)
        return self._by_key.get(digest) or self._ended.get(digest)

    async def _start(self) -> str:
        """The base URL of the server; start the server first if it does not run."""
        async with self._starting:
            if self._base_url is None:
                running = self._serve(self, run_key=self.run_key, config=self._config)
                self._base_url = await self._server.enter_async_context(running)
            return self._base_url
