"""HTTP server of the endpoint, on the event loop of its caller.

    path                                 key        body and answer
    POST /v1/chat/completions            session    OpenAI; also without /v1
    POST /v1/responses                   session    OpenAI; also without /v1
    GET  /v1/models                      session    OpenAI; also without /v1
    POST /v1/messages                    session    Anthropic
    POST /v1/messages/count_tokens       session    Anthropic
    POST /inference/v1/generate          session    vLLM
    POST /sessions                       run        {} -> id, base_url, api_key, prompt
    GET  /sessions/{id}                  session    -> id, status, agents
    POST /sessions/{id}/reward           session    {"reward": 1.0} or {"reward": {"agent": 1.0}}
    POST /sessions/{id}/end              session    {}

A client gives its key as `Authorization: Bearer KEY` or `x-api-key: KEY`. `base_url` suits the SDKs of both OpenAI and
Anthropic. A stream holds a whole answer: until it is there, the client gets comments or pings.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypeVar, cast

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from agent_loop.loop import openai_message
from agent_loop.programs.conversation import (
    ChatAnswer,
    EndpointError,
    ModelRequest,
    RequestError,
    SessionFailed,
)
from agent_loop.programs.endpoint import chat_completions, messages, responses, tokens
from agent_loop.programs.endpoint.body import Body, Call, Fields, WireFormat, decode_body
from agent_loop.programs.endpoint.connection import Connection
from agent_loop.programs.endpoint.host import EndpointConfig, Sessions, key_digest
from agent_loop.programs.session import AgentSession
from agent_loop.text import shown

IDLE_S = 75  # of a connection between requests, longer than SDKs keep one
CLOSE_S = 1.0  # for responses that are being sent when the endpoint closes
LINGER_S = 1.0  # for the next part of a body that is too large
MAX_REST = 2**30  # bytes that are read from its rest
MAX_REWARD = 1e30
HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    409: {"x-should-retry": "false"},  # the SDKs would repeat the call
    **{status: {"connection": "close"} for status in (400, 408, 413, 431, 500)},  # a rest of the request may follow
}
EVENTS, NO_CACHE = "text/event-stream", {"cache-control": "no-cache"}

T = TypeVar("T")
Asked = TypeVar("Asked", bound=ModelRequest)
ErrorShape = Callable[[EndpointError], dict[str, Any]]
logger = logging.getLogger(__name__)


@asynccontextmanager
async def serve(host: Sessions, *, run_key: str, config: EndpointConfig) -> AsyncGenerator[str]:
    """Serve the sessions of a host until the context ends; yields the base URL.

    At the end no connection is accepted, answers in progress are cancelled, and their clients get an error.

    Args:
        run_key: key for `POST /sessions`, from `new_key`.

    Raises:
        OSError: the address is in use or cannot be bound.
        ValueError: `run_key` is empty.
    """
    if not run_key:
        raise ValueError("run_key is empty; make one with new_key()")
    state, keyless = ServerState(), dict[Connection, None]()

    def connect() -> Connection:
        return Connection(
            settings,
            state,
            keyless=keyless,
            max_connections=config.max_connections,
            head_timeout_s=config.head_timeout_s,
            write_timeout_s=config.body_timeout_s,
        )

    loop = asyncio.get_running_loop()
    server = await loop.create_server(connect, config.host, config.port, start_serving=False)
    port = server.sockets[0].getsockname()[1]
    base_url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
    endpoint = _Endpoint(host, run_key=run_key, config=config, base_url=base_url)
    settings = _settings(endpoint.app(), config)
    try:
        await server.start_serving()
        yield base_url
    finally:
        server.close()
        await endpoint.close()
        await _close(state)
        await server.wait_closed()


def _settings(app: Starlette, config: EndpointConfig) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_S,
        h11_max_incomplete_event_size=config.max_head_bytes,
    )
    settings.load()
    return settings


async def _close(state: ServerState) -> None:
    """Close idle connections, let responses be sent, then close all."""
    for connection in list(state.connections):
        with contextlib.suppress(h11.ProtocolError):
            connection.shutdown()
    if state.tasks:
        await asyncio.wait(list(state.tasks), timeout=CLOSE_S)
    for connection in list(state.connections):
        connection.transport.abort()
    if state.tasks:
        await asyncio.wait(list(state.tasks))


class _Endpoint:
    """Routes, and the answers that are being sampled."""

    def __init__(self, host: Sessions, *, run_key: str, config: EndpointConfig, base_url: str) -> None:
        self._host = host
        self._run_digest = key_digest(run_key)
        self._config = config
        self._base_url = base_url
        self._answers: set[asyncio.Task[Any]] = set()
        self._closing = False

    def app(self) -> Starlette:
        """The ASGI application."""
        chats = {"/v1/messages": messages.FORMAT}
        for at in ("", "/v1"):
            chats |= {f"{at}/chat/completions": chat_completions.FORMAT, f"{at}/responses": responses.FORMAT}
        routes = [
            *(
                self._model_route(path, form, lambda session, asked: session.answer(asked))
                for path, form in chats.items()
            ),
            *(self._route(f"{at}/models", _models, self._session_of, method="GET") for at in ("", "/v1")),
            self._model_route("/inference/v1/generate", tokens.FORMAT, lambda session, asked: session.generate(asked)),
            self._route("/v1/messages/count_tokens", _count_tokens, self._session_of, shape=messages.error),
            self._route("/sessions", self._open, self._host_of),
            self._route("/sessions/{id}", _state, self._session_of, method="GET"),
            self._route("/sessions/{id}/reward", _reward, self._session_of),
            self._route("/sessions/{id}/end", _end, self._session_of),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._unknown})
        app.router.redirect_slashes = False
        return app

    async def close(self) -> None:
        """Cancel all answers, wait for their end, and start no others."""
        self._closing = True
        for task in self._answers:
            task.cancel()
        if self._answers:
            await asyncio.wait(list(self._answers))

    def _route(
        self,
        path: str,
        act: Callable[[T, bytes, Headers], Awaitable[Response]],
        authorise: Callable[[Request], T],
        *,
        method: str = "POST",
        shape: ErrorShape = chat_completions.error,
    ) -> Route:
        """A route: `act` responds to the owner of the key, the body and the headers; `shape` is that of the errors."""

        async def respond(request: Request) -> Response:
            try:
                try:
                    _check_head(request, max_bytes=self._config.max_head_bytes)
                    owner = authorise(request)
                    request.state.connection.note_key(valid=True)
                except EndpointError:
                    request.state.connection.note_key(valid=False)
                    await self._receive(request, keep=False)
                    raise
                return await act(owner, await self._receive(request), request.headers)
            except ClientDisconnect:
                return Response()
            except Exception as error:  # noqa: BLE001 - the client gets an answer, and the log has the cause
                return _failure(_known(error), shape)

        return Route(path, respond, methods=[method])

    def _model_route(
        self, path: str, form: WireFormat[Asked], ask: Callable[[AgentSession, Asked], Coroutine[Any, Any, ChatAnswer]]
    ) -> Route:
        """A route of model calls in a wire format."""

        async def act(session: AgentSession, data: bytes, headers: Headers) -> Response:
            call = _call(data)
            stream = Fields(call.body).optional("stream", bool)
            if self._closing:
                raise SessionFailed("the endpoint closes; try again later")
            task = asyncio.create_task(ask(session, _read(form.read, call, headers)))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its client may be gone
            await asyncio.wait([task], timeout=self._config.keep_alive_s if stream else None)
            if not stream:
                return _json(form.write(_result(task), call))
            if task.done():
                return Response(form.stream(_result(task), call), headers=NO_CACHE, media_type=EVENTS)
            return StreamingResponse(self._waiting(task, form, call), headers=NO_CACHE, media_type=EVENTS)

        return self._route(path, act, self._session_of, shape=form.error)

    async def _unknown(self, request: Request, error: Exception) -> Response:
        """The response of a path or method that has no route."""
        shape = messages.error if request.scope["path"].startswith("/v1/messages") else chat_completions.error
        text = f"{request.method} {shown(request.scope['path'])} is not served; the paths are those of the API formats"
        try:
            await self._receive(request, keep=False)
        except ClientDisconnect:
            return Response()
        except EndpointError as refused:
            return _failure(refused, shape)
        return _failure(_refused(cast(HTTPException, error).status_code, text), shape)

    async def _receive(self, request: Request, *, keep: bool = True) -> bytes:
        """Body of a request; without `keep` it is read and not wanted.

        A client reads no response before it has sent its body, so that a larger one is read too, up to twice the bound
        here, and the rest after the response.
        """
        limit, data, size = self._config.max_body_bytes, bytearray(), 0
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > 2 * limit:
                        break
                    if keep and size <= limit:
                        data += chunk
        except TimeoutError:
            text = f"the body was not complete in {self._config.body_timeout_s:g} s; send it faster"
            raise _refused(408, text) from None
        if size > limit:
            text = f"the body has more than {limit} bytes; send less, or raise endpoint.max_body_bytes"
            raise _refused(413, text)
        return bytes(data)

    def _session_of(self, request: Request) -> AgentSession:
        """The session of a request's key; if its path names a session, it has to be that one."""
        key = _key_of(request.headers)
        session = self._host.session_of(key)
        if session is None and hmac.compare_digest(key_digest(key), self._run_digest):
            raise _refused(403, "this is the key of the run; use the api_key of a session, from POST /sessions")
        if session is None:
            raise _refused(401, "the key is not valid; use the api_key of a session, from POST /sessions")
        if request.path_params.get("id", session.name) != session.name:
            raise _refused(403, "the key belongs to another session; use the api_key that came with this session")
        return session

    def _host_of(self, request: Request) -> Sessions:
        """The host, for the key of the run."""
        key = _key_of(request.headers)
        if hmac.compare_digest(key_digest(key), self._run_digest):
            return self._host
        if self._host.session_of(key) is not None:
            raise _refused(403, "a session cannot open another one; use the key of the run")
        raise _refused(401, "the key is not valid; use the key of the run")

    async def _open(self, host: Sessions, data: bytes, headers: Headers) -> Response:
        name, key, prompt = host.open()
        given = {"messages": list(map(openai_message, prompt.messages)), "target": dict(prompt.target)}
        found = {"id": name, "base_url": self._base_url, "api_key": key, "prompt": given}
        return _json(found, status=HTTPStatus.CREATED)

    async def _waiting(self, task: asyncio.Task[ChatAnswer], form: WireFormat[Any], call: Call) -> AsyncIterator[str]:
        """Keeps a stream alive until its answer is there, then sends it."""
        while not task.done():
            yield form.keep_alive
            await asyncio.wait([task], timeout=self._config.keep_alive_s)
        try:
            events = form.stream(_result(task), call)
        except Exception as error:  # noqa: BLE001 - as in a response that has not started
            events = form.error_event(_known(error))
        yield events


async def _models(session: AgentSession, data: bytes, headers: Headers) -> Response:
    model = {"object": "model", "created": 0, "owned_by": "async_rl"}
    return _json({"object": "list", "data": [{"id": name, **model} for name in session.agents]})


async def _count_tokens(session: AgentSession, data: bytes, headers: Headers) -> Response:
    request = _read(messages.read_prompt, _call(data), headers)
    return _json({"input_tokens": session.count_tokens(request)})


async def _state(session: AgentSession, data: bytes, headers: Headers) -> Response:
    return _json({"id": session.name, "status": session.status, "agents": list(session.agents)})


async def _reward(session: AgentSession, data: bytes, headers: Headers) -> Response:
    session.reward(read_reward(decode_body(data)))
    return await _state(session, data, headers)


async def _end(session: AgentSession, data: bytes, headers: Headers) -> Response:
    session.end()
    return await _state(session, data, headers)


def read_reward(body: Body) -> float | dict[str, float]:
    """Reward of all agents, or of each named agent.

    Raises:
        RequestError: it is no number, no mapping to numbers, or not finite.
    """
    reward: Any = body.get("reward")
    if not isinstance(reward, dict):
        return _number(reward, field="reward")
    if not reward:
        raise Fields(body).wrong("reward", "name at least one agent")
    return {agent: _number(value, field=f"reward.{agent}") for agent, value in cast(Body, reward).items()}


def _number(value: object, *, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        raise Fields({field: value}).wrong(field, "give a finite number, or an object of them by agent")
    return float(value)


def _check_head(request: Request, *, max_bytes: int) -> None:
    """Refuse heads that are too large, or that another reader may understand in another way."""
    if sum(len(name) + len(value) for name, value in request.headers.raw) > max_bytes:  # h11 bounds unfinished heads
        raise _refused(431, f"the headers have more than {max_bytes} bytes; send less")
    if request.scope["raw_path"] != request.scope["path"].encode():
        raise _refused(
            404, f"the path {shown(request.scope['raw_path'].decode('ascii'))} has escapes; write it without"
        )
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise RequestError("the request has both Content-Length and Transfer-Encoding; send one of them")


def _key_of(headers: Headers) -> str:
    keys = set(headers.getlist("x-api-key"))
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        keys.add(key.strip() if scheme.lower() == "bearer" else "")
    if len(keys) != 1 or "" in keys:
        raise _refused(401, "the request needs one key; send `Authorization: Bearer KEY` or `x-api-key: KEY`")
    return keys.pop()


def _refused(status: int, text: str) -> EndpointError:
    return EndpointError(text, status=HTTPStatus(status))


def _call(data: bytes) -> Call:
    return Call(body=decode_body(data), id=uuid.uuid4().hex, created=int(time.time()))


def _read(read: Callable[[Call], Asked], call: Call, headers: Headers) -> Asked:
    """The request of a call. The SDKs of OpenAI and Anthropic count their retries in a header."""
    try:
        request = read(call)
    except RecursionError:  # a body that was just decoded may be too deep to be written
        raise RequestError("the body is nested too deep; send a flatter one") from None
    retries = headers.get("x-stainless-retry-count", "")
    is_retry = retries.isdecimal() and int(retries[:9]) > 0
    return replace(request, is_retry=is_retry, idempotency_key=headers.get("idempotency-key"))


def _result(task: asyncio.Task[ChatAnswer]) -> ChatAnswer:
    if task.cancelled():
        raise SessionFailed("the call was cancelled; try again later")
    return task.result()


def _known(error: Exception) -> EndpointError:
    """The error itself, or an internal error without its text."""
    if isinstance(error, EndpointError):
        return error
    logger.error("a request failed", exc_info=error)
    return EndpointError("internal error of the endpoint; its log has the cause")


def _failure(error: EndpointError, shape: ErrorShape) -> Response:
    headers = dict(HEADERS.get(error.status, {}))
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{max(1, math.ceil(error.retry_after_s))}"
    response = _json(shape(error), status=error.status, headers=headers)
    return _LingeringResponse(response) if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else response


class _LingeringResponse(Response):
    """A response to a client that may still send its body; the rest is read and left out.

    A connection that is closed while its client sends is reset, and the client loses the response.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, status_code=response.status_code)
        self.raw_headers = response.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def hold(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await super().__call__(scope, receive, hold)
        left = MAX_REST
        with contextlib.suppress(TimeoutError):
            while left > 0:
                async with asyncio.timeout(LINGER_S):
                    message = await receive()
                left = left - len(message.get("body", b"")) if message.get("more_body") else 0
        await send({"type": "http.response.body"})


def _json(data: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(data, default=str), status_code=status, headers=headers, media_type="application/json")
