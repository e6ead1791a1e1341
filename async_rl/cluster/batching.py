"""RPC client that batches the calls of one event-loop iteration into one message, and their replies.

    client.call(Service.method, ...) ──┐                            ┌── task
    client.call(Service.method, ...) ──┴──> exchange([call, call]) ─┴── task
                                       <─── replies so far
                                   ───────> collect()
                                       <─── replies that came later

A message to another process costs far more than a call inside one. Messages are delivered at most once, and a message
to a dead process raises, like Ray's actor calls; the client never retries. While a call waits, one message is under
way. The server answers it after `COLLECT_S` at the latest, as its sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from async_rl.cluster.rpc import Host, first_line

COLLECT_S = 10.0  # longest wait of the server for a reply to send
FORGET_S = 300.0  # silence after which the server drops a client
GATHER_TURNS = 8  # event-loop iterations in which replies gather after the first one
MAX_REPLIES = 64  # per message: unpickling blocks the client's event loop
REPLIES_AT_ONCE = 32  # callers woken in one event-loop iteration by a longer message

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
"""Lock of each event loop, held while a client wakes a part of its callers: all clients share the pace."""


class Call(NamedTuple):
    """A request to the server."""

    number: int
    """Unique among all calls of a client's name."""
    method: str
    """Name of the method of the service."""
    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""


class Reply(NamedTuple):
    """The reply to a call."""

    number: int
    """Number of the call."""
    result: Any
    """Return value; None if the call raised."""
    error: Exception | None
    """Exception of the call; None if it returned."""


class RemoteError(RuntimeError):
    """A call failed in the other process; the message is its traceback."""


class BatchingClient(Generic[S]):
    """Calls the service of a server; used from one event loop.

    Args:
        handle: Ray handle of an actor with the calls of `BatchingServer`.
        name: name of this client, unique among all clients of the server.
        server: name of the server in error texts.
        timeout_s: longest delay of the server's sign of life beyond `COLLECT_S`.
        lost: makes the error of calls whose server died or is silent.
    """

    def __init__(
        self, handle: Any, *, name: str, server: str, timeout_s: float, lost: Callable[[str], Exception]
    ) -> None:
        self._handle = handle
        self._name = name
        self._server = server
        self._timeout_s = timeout_s
        self._lost = lost
        self._numbers = itertools.count(time.time_ns())  # a later process may have the same name
        self._outbox: list[Call] = []
        self._cancelled: list[int] = []
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # number of a call -> method, result
        self._sent: set[int] = set()  # waiting calls that were sent
        self._messages: set[asyncio.Task[None]] = set()
        self._send_scheduled = False

    async def call(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of the service, and wait as long as the server gives signs of life.

        If the caller is cancelled, a call that was sent is cancelled in the server too; it may have taken effect.

        Args:
            method: method of the service's class, such as `QueueService.admit`.

        Raises:
            Exception: a refusal of the server, unchanged; RemoteError for any other error of the method; or the error
                made by `lost`.
        """
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._outbox.append(Call(number, method.__name__, args, kwargs))
        self._waiting[number] = (method.__name__, future)
        self._schedule_send()
        try:
            return await future
        except asyncio.CancelledError:
            if number in self._sent:
                self._cancelled.append(number)
                self._schedule_send()
            raise
        finally:
            self._settled(number)

    def _schedule_send(self) -> None:
        if not self._send_scheduled:
            self._send_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._send_scheduled = False
        calls = [call for call in self._outbox if self._is_pending(call.number)]
        self._outbox = []
        cancelled, self._cancelled = self._cancelled, []
        if not calls and not cancelled:
            return
        try:
            replies = self._handle.exchange.remote(self._name, calls, cancelled)
        except Exception as error:  # noqa: BLE001 - the message was not sent: other calls still wait
            self._cancelled = [*cancelled, *self._cancelled]
            for call in calls:
                self._fail(call.number, error)
            return
        self._sent.update(call.number for call in calls)
        self._receive(replies)

    def _receive(self, replies: Awaitable[Sequence[Reply]]) -> None:
        task = asyncio.ensure_future(self._settle(replies))
        self._messages.add(task)
        task.add_done_callback(self._received)

    def _received(self, task: asyncio.Task[None]) -> None:
        """Keep a message under way while calls wait."""
        self._messages.discard(task)
        if task.cancelled() or self._messages or not self._sent:
            return
        try:
            self._receive(self._handle.collect.remote(self._name))
        except Exception as error:  # noqa: BLE001 - the callers raise it
            self._fail_sent(f"could not be asked again ({first_line(error)})", error)

    async def _settle(self, replies: Awaitable[Sequence[Reply]]) -> None:
        bound = COLLECT_S + self._timeout_s
        deadline = asyncio.timeout(bound)
        try:
            async with deadline:
                received = await replies
        except Exception as error:  # noqa: BLE001 - the callers raise it
            silent = isinstance(error, TimeoutError) and deadline.expired()
            self._fail_sent(
                f"gave no sign of life within {bound:g} s" if silent else f"died ({first_line(error)})", error
            )
            return
        if len(received) <= REPLIES_AT_ONCE:
            self._wake(received)
            return
        turn = _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        for first in range(0, len(received), REPLIES_AT_ONCE):
            async with turn:
                self._wake(received[first : first + REPLIES_AT_ONCE])
                await asyncio.sleep(0)  # lets these callers and other ready tasks run

    def _wake(self, replies: Sequence[Reply]) -> None:
        """Wake callers with their replies."""
        for number, result, error in replies:
            if error is not None:
                self._fail(number, error)
            elif (future := self._settled(number)) is not None:
                future.set_result(result)

    def _settled(self, number: int) -> asyncio.Future[Any] | None:
        """Remove a call from the waiting ones; returns its future if that was pending."""
        self._sent.discard(number)
        pending = self._is_pending(number)
        _, future = self._waiting.pop(number, ("", None))
        return future if pending else None

    def _is_pending(self, number: int) -> bool:
        """Whether the caller still waits."""
        return number in self._waiting and not self._waiting[number][1].done()

    def _fail_sent(self, what: str, cause: Exception) -> None:
        numbers = sorted(self._sent)
        methods = ", ".join(sorted({self._waiting[number][0] for number in numbers}))
        for number in numbers:
            error = self._lost(f"{self._server} {what} while {methods} of {self._name} waited for a reply")
            error.__cause__ = cause
            self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        if (future := self._settled(number)) is not None:
            future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Client:
    """The server's state of a client."""

    heard_at: float
    """Loop time of its last message, or of the end of that message's wait."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, asyncio.Task[None]])
    """Running calls by number."""
    replies: list[Reply] = field(default_factory=list[Reply])
    """Unsent replies."""
    has_reply: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if there are unsent replies."""
    asked: bool = False
    """Whether a message of the client waits for replies."""


class BatchingServer(Host):
    """Runs calls on a service in an actor, in one event loop; called through `BatchingClient`."""

    _service: object = None

    def __init__(self, *, log: Path | None = None) -> None:
        super().__init__(log=log)
        self._clients: dict[str, _Client] = {}

    def serve(self, service: object, *, refusals: tuple[type[Exception], ...]) -> None:
        """Take calls for a service.

        Args:
            refusals: errors sent unchanged; other errors are sent as a traceback.
        """
        self._service, self._refusals = service, refusals

    async def exchange(self, client: str, calls: Sequence[Call], cancelled: Sequence[int]) -> list[Reply]:
        """Start `calls` in order, cancel the calls in `cancelled`, and answer like `collect`."""
        if self._service is None:
            raise RuntimeError(f"{type(self).__name__} serves nothing yet; start or open comes before all other calls")
        self._forget_silent()
        state = self._client(client)
        for number in cancelled:
            if (task := state.running.get(number)) is not None:
                task.cancel()
        for call in calls:
            task = state.running[call.number] = asyncio.create_task(self._run(state, call))
            task.add_done_callback(lambda _, number=call.number: state.running.pop(number))
        return await self.collect(client)

    async def collect(self, client: str) -> list[Reply]:
        """Replies for a client as soon as there is one, at the latest after `COLLECT_S`.

        If another message of the client already waits, this one returns after the gathering iterations.
        """
        state = self._client(client)
        if not state.asked:
            state.asked = True
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COLLECT_S):
                        await state.has_reply.wait()
            finally:
                state.asked = False
                state.heard_at = asyncio.get_running_loop().time()
        known = 0
        for _ in range(GATHER_TURNS):
            await asyncio.sleep(0)
            if known and len(state.replies) == known:
                break
            known = len(state.replies)
        replies, state.replies = state.replies[:MAX_REPLIES], state.replies[MAX_REPLIES:]
        if not state.replies:
            state.has_reply.clear()
        return replies

    async def forget_client(self, client: str) -> None:
        """Drop the replies of a dead client and cancel its calls; they have ended when this returns."""
        if calls := self._forget(client):
            await asyncio.wait(calls)

    def _forget(self, client: str) -> list[asyncio.Task[None]]:
        """As `forget_client`; returns the tasks of the calls."""
        state = self._clients.pop(client, None)
        calls = [] if state is None else list(state.running.values())
        for task in calls:
            task.cancel()
        return calls

    def _client(self, name: str) -> _Client:
        now = asyncio.get_running_loop().time()
        state = self._clients.setdefault(name, _Client(now))
        state.heard_at = now
        return state

    def _forget_silent(self) -> None:
        oldest = asyncio.get_running_loop().time() - FORGET_S
        for name in [n for n, c in self._clients.items() if not c.asked and c.heard_at < oldest]:
            self._forget(name)

    async def _run(self, client: _Client, call: Call) -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = await getattr(self._service, call.method)(*call.args, **call.kwargs)
        except self._refusals as refusal:
            error = refusal
        except asyncio.CancelledError:
            error = RemoteError(f"{call.method} was cancelled in the server")
            raise
        except Exception as failure:  # noqa: BLE001 - the caller raises it
            error = RemoteError("".join(traceback.format_exception(failure)))
        finally:
            client.replies.append(Reply(call.number, result, error))
            client.has_reply.set()
