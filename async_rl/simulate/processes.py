"""Processes of a simulated cluster: calls that take their time, get lost, come twice, or find nobody alive.

A process takes the calls of one caller in the order in which they were made, as Ray's actors do; answers come back in
any order. A dead process does nothing any more and fails every call on it; a hung one never answers. Calls may travel
together, as those to the queue of a run do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from typing import Any, Protocol

from ray.exceptions import RayActorError, RayTaskError

from async_rl.simulate.scenario import Fault
from async_rl.simulate.virtual_time import NumberedTask
from message_queue.client import REFUSALS
from message_queue.together import Together, TogetherHost

CLIENT = "driver"
LEAST_S = 1e-6  # between two calls that a process takes

_process: ContextVar[Process | None] = ContextVar("process", default=None)


class Surroundings(Protocol):
    """What a process needs to know of the world."""

    def fault(self, point: str) -> Fault | None:
        """What goes wrong at `point` this time."""
        ...

    def note(self, who: str, what: str, *details: object) -> None:
        """Write a line of the trace."""
        ...

    def lose_power(self) -> None:
        """End everything."""
        ...

    def called(self, process: str, method: str, args: tuple[Any, ...], result: object) -> None:
        """A process answered a call; the answer is on its way."""
        ...


def adopt(task: NumberedTask) -> None:
    """Count a new task among those of the process that starts it."""
    process = _process.get()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(process.forget)


class _Method:
    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        return self._process.send(self._name, args, kwargs)


class Process:
    """A handle with `method.remote(...)`, and the process behind it.

    Args:
        host: what runs in the process.
        together: calls are made through `in_messages`.
        latency_s: mean of one way.
    """

    def __init__(
        self,
        name: str,
        host: object,
        *,
        world: Surroundings,
        latency_s: float,
        draw: random.Random,
        together: bool = False,
    ) -> None:
        self.process_name = name
        self.tasks: dict[NumberedTask, None] = {}
        self.dead: str | None = None
        self.hung = False
        self.on_death: Callable[[], None] = lambda: None
        self._cut_off = False
        self._together = together
        self._host = TogetherHost(_Observed(host, self), refusals=REFUSALS) if together else host
        self._world = world
        self._latency_s = latency_s
        self._draw = draw
        self._free_at = 0.0

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def in_messages(self) -> Any:
        """The handle for those calls that are to travel together, where any do."""
        return Together(self, name=CLIENT) if self._together else self

    def forget(self, task: asyncio.Task[Any]) -> None:
        """A task of this process has ended."""
        self.tasks.pop(task, None)  # type: ignore[arg-type]

    def die(self, cause: str) -> None:
        """End the process: its tasks stop where they are, and whoever waits for it hears that it is dead."""
        if self.dead is not None:
            return
        self.dead = cause
        self._world.note(self.process_name, "dies", cause)
        self.on_death()
        for task in list(self.tasks):
            task.cancel()

    def cut_off(self) -> None:
        """The driver is dead, and takes this process with it."""
        if not self._cut_off:
            self._cut_off = True
            self.on_death()

    def run_inside(self, call: Any, *args: Any) -> Any:
        """Result of a plain function that runs in the process."""
        context = copy_context()
        context.run(_process.set, self)
        return context.run(call, *args)

    # ---- a call

    def send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        """The answer to come."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        if self._cut_off:
            reply.set_exception(RayActorError())
            return reply
        delay = self._latency()
        fault = self._world.fault(f"message/{self.process_name}")
        for called in self._called_by(method, args):
            fault = self._world.fault(f"call/{self.process_name}.{called}") or fault
        again = None
        match fault and fault.kind:
            case "late message":
                assert fault is not None
                delay += fault.amount
            case "message twice":
                assert fault is not None
                again = fault.amount
            case "process dies" | "queue dies":
                loop.call_later(delay / 2, self.die, "killed")
            case "machine dies":
                loop.call_later(delay / 2, self._world.lose_power)
            case "process hangs" | "shard hangs":
                self.hung = True
            case _:
                pass
        self._free_at = max(loop.time() + delay, self._free_at + LEAST_S)
        loop.call_at(self._free_at, self._deliver, method, args, kwargs, reply)
        if again is not None:
            self._free_at += LEAST_S
            loop.call_at(self._free_at + again, self._deliver, method, args, kwargs, loop.create_future())
        return reply

    def _called_by(self, method: str, args: tuple[Any, ...]) -> list[str]:
        """Methods that a message calls."""
        if not self._together:
            return [method]
        return [call.method for call in args[-1]] if method == "together" else []

    def _deliver(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], reply: asyncio.Future[Any]) -> None:
        if self.hung or self._cut_off:
            return
        if self.dead is not None:
            self._answer(reply, error=RayActorError())
            return
        context = copy_context()
        context.run(_process.set, self)
        loop = asyncio.get_running_loop()
        name = f"{self.process_name}.{method}"
        loop.create_task(self._run(method, args, kwargs, reply), name=name, context=context)  # noqa: RUF006 - in `tasks`

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
        if not self._together:
            self.answers(method, args, result=result, error=error)
        if self.dead is not None:
            error = RayActorError()
        if not self.hung:
            self._answer(reply, result=result, error=error)

    def answers(self, method: str, args: tuple[Any, ...], *, result: object, error: Exception | None) -> None:
        """Tell the world what came of a call, where anybody will hear of it."""
        if self.dead is None and not self.hung and not self._cut_off:
            self._world.note(self.process_name, method, _told(result) if error is None else type(error).__name__)
            if error is None:
                self._world.called(self.process_name, method, args, result)

    def _answer(self, reply: asyncio.Future[Any], *, result: Any = None, error: Exception | None = None) -> None:
        asyncio.get_running_loop().call_later(self._latency(), _settle, reply, result, error)

    def _latency(self) -> float:
        return self._latency_s * self._draw.expovariate(1.0)


class _Observed:
    """What runs in a process; the world is told what came of each call, as an answer may wait for others."""

    def __init__(self, host: object, process: Process) -> None:
        self._host = host
        self._process = process

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = await getattr(self._host, method)(*args, **kwargs)
            except Exception as error:
                self._process.answers(method, args, result=None, error=error)
                raise
            self._process.answers(method, args, result=result, error=None)
            return result

        return call


def _settle(reply: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if reply.done():
        return
    if error is None:
        reply.set_result(result)
    else:
        reply.set_exception(error)
        reply.exception()  # a caller may not be waiting any more


def _told(result: object) -> object:
    """What the trace shows of an answer."""
    if result is None or isinstance(result, int | str):
        return result
    if isinstance(result, list | tuple):
        return len(result)
    group = getattr(result, "group", None)
    return type(result).__name__ if group is None else f"group {group}"
