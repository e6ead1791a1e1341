"""Processes of a simulated cluster: calls that are late, or made to a process that is dead or hangs.

A process takes the calls of one caller in the order in which they were made, as Ray's actors do; answers come back in
any order. A dead process does nothing and fails every call on it; a hung one never answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError

from async_rl.rollout.content.writer import ContentWriter
from async_rl.simulator.virtual_time import NumberedTask, settle
from message_queue.journal import EventJournal

if TYPE_CHECKING:
    from async_rl.simulator.world import World

T = TypeVar("T")
LEAST_S = 1e-6  # between two calls that a process takes

_process: ContextVar[Process | None] = ContextVar("process", default=None)


current_process = _process.get
"""Returns the process whose code runs now; None for the driver."""


def adopt(task: NumberedTask) -> None:
    """Count a new task among those of the process that starts it."""
    process = _process.get()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda ended: process.tasks.pop(ended, None))  # type: ignore[arg-type]


class Process:
    """A handle with `method.remote(...)`, and the process behind it.

    Args:
        host: runs in the process.
        latency_s: mean of one way.
        linger_s: time after its death while it still has its files open.

    files: that it opened.
    """

    def __init__(
        self, name: str, host: object, *, world: World, latency_s: float, draw: random.Random, linger_s: float = 0.0
    ) -> None:
        self.process_name = name
        self.tasks: dict[NumberedTask, None] = {}
        self.dead = False
        self.hung = False
        self.files: list[EventJournal | ContentWriter] = []
        self._replies: dict[asyncio.Future[Any], None] = {}  # in the order of the calls
        self._host = host
        self._world = world
        self._latency_s = latency_s
        self._linger_s = linger_s
        self._draw = draw
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=partial(self._remote, name))

    def die(self, cause: str) -> None:
        """End the process: its tasks stop where they are, and whoever waits for it hears that it is dead."""
        if self.dead:
            return
        self._world.note(self.process_name, "dies", cause)
        for task in list(self.tasks):
            task.cancel()
        for reply in list(self._replies):
            self._answer(reply, error=RayActorError())
        self.cut_off()

    def cut_off(self) -> None:
        """The driver is dead, and takes this process with it."""
        for file in [] if self.dead else self.files:
            asyncio.get_running_loop().call_later(self._linger_s, file.release)
        self.dead = True

    # ---- a call

    def _remote(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The answer to come, or its parts if the caller gets them apart; see `ray.method`."""
        reply = self._send(method, args, kwargs)
        num_returns = getattr(getattr(type(self._host), method), "__ray_num_returns__", 1)
        return reply if num_returns == 1 else [_part(reply, number) for number in range(num_returns)]

    def _send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._replies[reply] = None
        reply.add_done_callback(self._replies.pop)
        if self._world.is_dead():  # a dead process sends nothing on its way out
            reply.set_exception(RayActorError())
            return reply
        delay = self._latency()
        calls = [call.method for call in args[1]] if method == "exchange" else [args[0] if method == "call" else method]
        points = (f"message/{self.process_name}", *(f"call/{self.process_name}.{call}" for call in calls))
        faults = [self._world.fault(point) for point in points]
        kind, late_s = next((fault for fault in reversed(faults) if fault[0]), ("", 0.0))
        match kind:
            case "process dies" | "queue dies" | "worker dies":
                loop.call_later(delay / 2, self.die, "killed")
            case "process hangs" | "queue hangs" | "worker hangs":
                self.hung = True
            case _:
                pass
        self._free_at = max(loop.time() + delay + late_s, self._free_at + LEAST_S)
        loop.call_at(self._free_at, self._deliver, method, args, kwargs, reply)
        return reply

    def _deliver(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], reply: asyncio.Future[Any]) -> None:
        if self.hung:
            return
        if self.dead:
            self._answer(reply, error=RayActorError())
            return
        self._start(self._run(method, args, kwargs, reply), name=f"{self.process_name}.{method}")

    def _start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run work in this process."""
        context = copy_context()
        context.run(_process.set, self)
        return asyncio.get_running_loop().create_task(work, name=name, context=context)

    async def _run(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], reply: asyncio.Future[Any]
    ) -> None:
        result, error = None, None
        try:
            result = await getattr(self._host, method)(*args, **kwargs)
        except asyncio.CancelledError:
            error = RayActorError()
        except Exception as cause:  # noqa: BLE001 - as Ray does: it is raised where the answer is awaited
            error = RayTaskError(method, "", cause).as_instanceof_cause()
        if method not in ("exchange", "collect"):
            called, *rest = args if method == "call" else (method, *args)
            self.observed(called, tuple(rest), result=result, error=error)
        if self.dead:
            error = RayActorError()
        if not self.hung:
            self._answer(reply, result=result, error=error)

    async def request(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work` in this process, for a client of a server in it.

        Raises:
            ConnectionError: the process is dead, or dies meanwhile.
        """
        await asyncio.sleep(self._latency())
        if self.dead:
            raise ConnectionError(f"{self.process_name} is dead")
        try:
            return await self._start(work())
        except asyncio.CancelledError:
            client = asyncio.current_task()
            if self.dead and client is not None and not client.cancelling():
                raise ConnectionError(f"{self.process_name} died") from None
            raise

    def observed(self, method: str, args: tuple[Any, ...], *, result: object, error: Exception | None) -> None:
        """Report a result to the world, if it will be received."""
        if not self.dead and not self.hung:
            self._world.note(self.process_name, method, _shown(result) if error is None else type(error).__name__)
            if error is None:
                self._world.called(self.process_name, method, args, result)

    def _answer(self, reply: asyncio.Future[Any], *, result: Any = None, error: Exception | None = None) -> None:
        asyncio.get_running_loop().call_later(self._latency(), settle, reply, result, error)

    def _latency(self) -> float:
        return self._latency_s * self._draw.expovariate(1.0)


class Observed:
    """A service in a process; the world sees the result of each call, as replies to several travel together."""

    def __init__(self, service: object) -> None:
        self._service = service

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            process = current_process()
            assert process is not None
            try:
                result = await getattr(self._service, method)(*args, **kwargs)
            except Exception as error:
                process.observed(method, args, result=None, error=error)
                raise
            process.observed(method, args, result=result, error=None)
            return result

        return call


def _part(reply: asyncio.Future[Any], number: int) -> asyncio.Future[Any]:
    """One of the results of a call."""
    part: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(whole: asyncio.Future[Any]) -> None:
        error = whole.exception()
        settle(part, None if error else whole.result()[number], error)

    reply.add_done_callback(answered)
    return part


def _shown(result: object) -> object:
    """What the trace shows of an answer."""
    if result is None or isinstance(result, int | str):
        return result
    if isinstance(result, list | tuple):
        return len(result)
    group = getattr(result, "group", None)
    return type(result).__name__ if group is None else f"group {group}"
