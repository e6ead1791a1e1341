"""Calls to a process, those of one turn of the event loop in one message, and the answers that stand together too.

    Together.method.remote(...) --\\                           /-- task
    Together.method.remote(...) ---> together([call, call]) --+-- task
                                <--- answers so far
                             ... ---> collect()            <---- answers that came later

A message to another process costs far more than a call in this one. A call alone takes one message and its answer, as
it would without. Each message says which answers have arrived; the others are kept, and sent again after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COLLECT_S = 10.0  # longest wait for answers in one message
RESEND_S = 10.0  # after which an answer that nobody says has arrived is sent again
GATHER_TURNS = 8  # turns of the event loop in which answers gather once there is one


class Call(NamedTuple):
    """number: of the caller, unique among its calls."""

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Answer(NamedTuple):
    """error: what the call raised, or None."""

    number: int
    result: Any
    error: Exception | None


class RemoteError(RuntimeError):
    """A call failed in the other process; has its traceback as text."""


@dataclass(frozen=True, slots=True)
class _Method:
    calls: Together
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        return self.calls.submit(self.name, args, kwargs)


class Together:
    """Has the shape of the handle that it sends through, whose process runs `TogetherHost`.

    Args:
        handle: whose `together` and `collect` have `.remote(...)` that returns an awaitable.
        name: unique among all who call that process.
        before_send: called before each message with calls; where it raises, that is what became of them.
    """

    def __init__(self, handle: Any, *, name: str, before_send: Callable[[], None] | None = None) -> None:
        self._handle = handle
        self._name = name
        self._before_send = before_send or (lambda: None)
        self._numbers = itertools.count()
        self._outbox: list[Call] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._received: list[int] = []  # what the other process has not been told of
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting = False

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)

    def submit(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        """Make the call in the next message. Whether its answer is awaited changes nothing over there."""
        loop = asyncio.get_running_loop()
        number, future = next(self._numbers), loop.create_future()
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._outbox.append(Call(number, method, args, kwargs))
        if len(self._outbox) == 1:
            loop.call_soon(self._send)
        return future

    def _send(self) -> None:
        calls, self._outbox = self._outbox, []
        numbers = [call.number for call in calls]
        try:
            self._before_send()
            message = self._message(self._handle.together, calls)
        except Exception as error:  # noqa: BLE001 - it cannot be sent: what became of these calls
            self._fail(numbers, error)
            return
        self._start(self._exchange(message, numbers))

    def _message(self, method: Any, *args: Any) -> Awaitable[Sequence[Answer]]:
        message = method.remote(self._name, self._received, *args)
        self._received = []
        return message

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, message: Awaitable[Sequence[Answer]], numbers: Sequence[int]) -> None:
        try:
            self._settle(await message)
        except Exception as error:  # noqa: BLE001 - it is what became of these calls
            self._fail(numbers, error)
        if not self._collecting and any(number in self._waiting for number in numbers):
            self._collecting = True
            self._start(self._collect())

    async def _collect(self) -> None:
        try:
            while self._waiting:
                self._settle(await self._message(self._handle.collect))
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._fail(list(self._waiting), error)
        finally:
            self._collecting = False

    def _settle(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._received.append(answer.number)
            future = self._waiting.get(answer.number)
            if future is None or future.done():
                continue  # its caller gave up, or it came before
            if answer.error is None:
                future.set_result(answer.result)
            else:
                future.set_exception(answer.error)

    def _fail(self, numbers: Sequence[int], error: Exception) -> None:
        for number in numbers:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_exception(error)


class TogetherHost:
    """Runs calls on a service, in one event loop.

    Args:
        refusals: errors that travel as they are; of others the text does.
    """

    def __init__(self, service: Any, *, refusals: tuple[type[Exception], ...]) -> None:
        self._service = service
        self._refusals = refusals
        self._clients: dict[str, _Client] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def together(self, name: str, received: Sequence[int], calls: Sequence[Call]) -> list[Answer]:
        """Begin calls, each once; then as `collect`."""
        client = self._client(name)
        for call in map(Call._make, calls):
            if call.number in client.begun:
                continue
            client.begun.add(call.number)
            task = asyncio.ensure_future(self._run(client, call))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await self.collect(name, received)

    async def collect(self, name: str, received: Sequence[int]) -> list[Answer]:
        """Answers for the client that were not sent, once there is one or after COLLECT_S, and those that got lost.

        Args:
            received: numbers of answers that arrived.
        """
        client = self._client(name)
        for number in received:
            client.begun.discard(number)
            client.kept.pop(number, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_S):
                await client.answered.wait()
        known = 0
        for _ in range(GATHER_TURNS):
            await asyncio.sleep(0)
            if len(client.unsent) == known:
                break
            known = len(client.unsent)
        client.answered.clear()
        return client.sent(asyncio.get_running_loop().time())

    def _client(self, name: str) -> _Client:
        return self._clients.setdefault(name, _Client())

    async def _run(self, client: _Client, call: Call) -> None:
        result = error = None
        try:
            result = await getattr(self._service, call.method)(*call.args, **call.kwargs)
        except self._refusals as refusal:
            error = refusal
        except Exception as failure:  # noqa: BLE001 - the caller is told
            error = RemoteError("".join(traceback.format_exception(failure)))
        client.unsent.append(Answer(call.number, result, error))
        client.answered.set()


@dataclass(slots=True)
class _Client:
    """Calls of one who calls. begun: numbers of those whose answers are not known to have arrived.

    unsent: answers. kept: those that were sent and may not have arrived: number -> (when, answer).
    """

    begun: set[int] = field(default_factory=set)
    unsent: list[Answer] = field(default_factory=list)
    kept: dict[int, tuple[float, Answer]] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def sent(self, now: float) -> list[Answer]:
        """What is to be sent, which is kept from now on."""
        lost = [answer for at, answer in self.kept.values() if at <= now - RESEND_S]
        answers, self.unsent = [*lost, *self.unsent], []
        self.kept |= {answer.number: (now, answer) for answer in answers}
        return answers
