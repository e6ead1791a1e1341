"""The boundary around user code: tools, rewards, environments, agent programs, and the clients that they use.

    boundary(work) ──> task of the call ──> async function
                                        └─> thread of USER_THREADS ──> any other function

User code may be slow, hang, ignore a cancel, let out a cancel of an inner scope, or call `sys.exit`. Each fault is
an error of that call, and other calls go on. A cancel from outside passes through. Product code never uses its threads.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from agent_loop.loop import Prompt
from agent_loop.timeline import timed
from agent_loop.user_errors import LeakedError, describe_error
from message_queue.errors import OvertimeError, RolloutError

P = ParamSpec("P")
T = TypeVar("T")
REPORTS = logging.getLogger("agent_loop.tools")
GRACE_S = 10.0  # from a cancel to the end of an async call; a call that goes on is left behind
LEAST_S = 1e-6  # less time than this is none: the clock of an event loop may be too coarse to let it pass
MAX_THREADS = 2048  # of calls that somebody waits for; further calls wait for a thread
MAX_LOST = 1000  # calls of one function that are left behind in threads; its further calls fail


class _Clock:
    """Time that a call of user code has left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self._left = seconds
        self._since: float | None = None  # the last look; None before the first one and while it stands
        self._waits = 0

    def left(self) -> float:
        """Seconds."""
        now = asyncio.get_running_loop().time()
        if self._since is not None:
            self._left -= now - self._since
        self._since = None if self._waits else now
        return self._left

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Time inside does not count."""
        self.left()
        self._waits, self._since = self._waits + 1, None
        try:
            yield
        finally:
            self._waits -= 1
            self.left()


_ENDLESS = _Clock(math.inf)
_clock: ContextVar[_Clock] = ContextVar("clock", default=_ENDLESS)
_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[asyncio.Semaphore, Counter[str]]] = WeakKeyDictionary()
"""Event loop -> slots for threads, and function -> calls that are left behind."""
_left_behind = set[asyncio.Task[Any]]()  # tasks that ignored their cancel; the event loop holds no reference


async def boundary(work: Callable[[], Awaitable[T]], *, name: str, timeout_s: float | None = None) -> T:
    """The result of user code, in a task of the call.

    Args:
        name: user code, in reports.
        timeout_s: seconds from the start, without waits for a `slot`. None is for a whole rollout: it has no time-out,
            and its end is awaited after a cancel.

    Raises:
        OvertimeError: there is no result in time.
        LeakedError: see there.
        Exception: errors of the user code.
    """
    clock, context = _Clock(math.inf if timeout_s is None else timeout_s), copy_context()
    context.run(_clock.set, clock)

    async def call() -> T:
        try:
            return await work()
        except (SystemExit, KeyboardInterrupt) as error:  # a task would hand it to the event loop
            raise LeakedError(error) from error

    task = asyncio.get_running_loop().create_task(call(), context=context)
    return await _result(task, task, clock, name=name)


async def _result(answer: asyncio.Future[T], task: asyncio.Task[Any], clock: _Clock, *, name: str) -> T:
    """The answer of a task. The task is cancelled if it is late or if nobody waits for it any more."""
    try:
        while not answer.done() and (left := clock.left()) > LEAST_S:
            await asyncio.wait((answer,), timeout=None if left == math.inf else left)
        if not answer.done():
            raise OvertimeError(f"{name} gave no answer in {clock.seconds:g} s")
    finally:
        if not answer.done():
            task.cancel()
            await asyncio.wait((answer,), timeout=None if clock.seconds == math.inf else GRACE_S)
        if not answer.done():
            _left_behind.add(task)
            task.add_done_callback(_left_behind.discard)
            REPORTS.warning("%s ignores that it was cancelled, and goes on outside of its rollout", name)
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # an error was seen
    try:
        return answer.result()
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise LeakedError(error) from error  # nobody asked for a cancel: that comes out of the wait


@asynccontextmanager
async def slot(slots: asyncio.Semaphore) -> AsyncGenerator[None]:
    """A place among calls that run at once. The wait for it does not count as time of the call."""
    with uncounted():
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()


def uncounted() -> AbstractContextManager[None]:
    """Time inside does not count as time of the call of user code that runs."""
    return _clock.get().stopped()


def report_late(name: str, outcome: str) -> None:
    """Report a call that is given up because its time is over."""
    clock = _clock.get()
    if clock.left() <= LEAST_S:
        REPORTS.warning("%s has not returned in %g s; %s", name, clock.seconds, outcome)


# ---- functions


class UserThreads(ThreadPoolExecutor):
    """A daemon thread for each call: one that hangs stops no other call, and no end of the process.

    It is a ThreadPoolExecutor because an event loop takes no other kind as its default.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor. RuntimeError: the operating system starts no more threads."""
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - for the caller
                answer.set_exception(error)

        threading.Thread(target=work, name="user code", daemon=True).start()
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: the threads end with their calls."""


USER_THREADS = UserThreads()


async def call_function(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    is_async: bool | None = None,
    ended: Callable[[], None] = lambda: None,
) -> Any:
    """The result of a function of the user; one that is not `async` runs in a thread.

    Args:
        ended: called at the end of the function, also if that comes after a cancel of the call.

    Raises:
        LeakedError: see there.
        RolloutError: no thread can be had.
    """
    if inspect.iscoroutinefunction(function) if is_async is None else is_async:
        try:
            return await function(**arguments)
        finally:
            ended()
    found = await _in_thread(function, arguments, ended)
    return await found if inspect.isawaitable(found) else found


async def _in_thread(function: Callable[..., Any], arguments: Mapping[str, Any], ended: Callable[[], None]) -> Any:
    name, loop = function_name(function), asyncio.get_running_loop()
    slots, lost = _threads.setdefault(loop, (asyncio.Semaphore(MAX_THREADS), Counter()))
    work: Any = partial(copy_context().run, _call, function, arguments)
    running: asyncio.Future[tuple[Any, Exception | None]] | None = None
    try:
        async with slot(slots):
            if lost[name] >= MAX_LOST:
                raise RolloutError(f"{lost[name]} calls of {name} have not returned; give its waits a time-out")
            try:
                running = loop.run_in_executor(USER_THREADS, work)
            except RuntimeError as error:
                raise RolloutError(f"no thread for {name}: {error}; raise the limit of processes") from error
            running.add_done_callback(lambda _: ended())
            found, failure = await asyncio.shield(running)
    finally:
        if running is None:
            ended()
        elif not running.done():
            lost[name] += 1
            running.add_done_callback(lambda _: lost.subtract((name,)))
            report_late(name, f"its thread is replaced ({lost[name]} calls of it are left behind)")
    if failure is not None:
        raise failure
    return found


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """In the thread: the result and the error, as a future cannot hold each kind of error."""
    try:
        return function(**arguments), None
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        return None, cast(Exception, error) if is_plain else LeakedError(error)


def function_name(function: Callable[..., Any]) -> str:
    """`fetch` or `Board.move`, for reports."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


def named_parameters(function: Callable[..., Any], *, name: str) -> dict[str, bool]:
    """Parameter of a function -> whether it has no default.

    Raises:
        ValueError: a parameter is no name, such as `*args`; the text starts with `name`.
    """
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{name} has the parameter {parameter}; give it named parameters only")
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}


def check_columns(
    parameters: Mapping[str, bool], target: Mapping[str, Any], *, name: str, beside: Sequence[str]
) -> None:
    """Check that a row has the columns that a function needs.

    Args:
        parameters: the function's parameters, from `named_parameters`.
        target: columns of the row.
        beside: names that are no columns.

    Raises:
        ValueError: names the function, its parameter and the columns.
    """
    for parameter, needed in parameters.items():
        if needed and parameter not in (*beside, *target):
            raise ValueError(
                f"{name} has the parameter {parameter}, and a prompt has the columns "
                f"{', '.join(sorted(target)) or '(none)'}; name it {', '.join(beside)} or as one of them"
            )


# ---- objects


class UserClass:
    """A class of a user; each rollout makes an object of it.

    Args:
        factory: the class, or its `functools.partial`; called without arguments.
        kind: noun for messages, such as "environment".
        opening: method that is called first, if the class has it. It gets any columns of the row by name, and `prompt`.

    Attributes:
        made: the class.
        name: name of the class.
        repeatable: whether the same calls on a new object make the same state.

    Raises:
        ValueError: the first method has parameters that are no names.
    """

    def __init__(self, factory: Callable[[], object], *, kind: str, opening: str) -> None:
        self.made: Any = cast(Any, factory).func if isinstance(factory, partial) else factory
        self.name: str = getattr(self.made, "__name__", repr(self.made))
        self.repeatable = bool(getattr(self.made, "repeatable", False))
        self._factory: Callable[[], Any] = cast(Any, factory)
        self._kind, self._opening = kind, opening
        self._columns: dict[str, bool] = {}
        if (method := getattr(self.made, opening, None)) is not None:
            self._columns = named_parameters(method.__get__(object()), name=f"{opening} of {kind} {self.name}")

    def check(self, target: Mapping[str, Any]) -> None:
        """Check that a row has the columns that the first method needs.

        Raises:
            ValueError: names the parameter and the columns.
        """
        check_columns(self._columns, target, name=f"{self._opening} of {self._kind} {self.name}", beside=("prompt",))

    @asynccontextmanager
    async def new(self, prompt: Prompt, *, timeout_s: float) -> AsyncGenerator[tuple[UserObject, Any]]:
        """An object that `factory` makes in a thread, and the result of its first method.

        Its method `close` is called at the end, and an error of that is only logged.

        Args:
            timeout_s: seconds for each call.

        Raises:
            RolloutError: it cannot be made or opened.
        """
        owner = UserObject(self._kind, self.name, prompt, timeout_s=timeout_s)
        available = {**prompt.target, "prompt": prompt}
        try:
            await owner.make(self._factory)
            columns = {name: available[name] for name in self._columns if name in available}
            yield owner, await owner.call(self._opening, columns)
        finally:
            await owner.close()


class UserObject:
    """An object of a user that lives for one rollout.

    One task makes its calls, as a scope that an async method opens has to be closed in the same task.

    Args:
        kind: noun for messages, such as "environment".
        name: class name.
        timeout_s: seconds for each call.
    """

    def __init__(self, kind: str, name: str, prompt: Prompt, *, timeout_s: float) -> None:
        self.made: Any = None
        self._kind, self._name, self._prompt, self._timeout_s = kind, name, prompt, timeout_s
        self._closed = False
        self._calls: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], _Clock, asyncio.Future[Any]]] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def make(self, factory: Callable[[], Any]) -> None:
        """Make the object, in a thread. RolloutError: it cannot be made."""
        self.made = await self._run("__init__", factory, {})

    async def close(self) -> None:
        """Call the method `close`, log an error of it, and end the task."""
        try:
            await self.call("close", {})
        except RolloutError as error:  # the rollout has ended, and its end stays
            logging.getLogger(__name__).warning("%s", error)
        finally:
            self._closed = True
            self._task.cancel()

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """The result of a method; None if the object does not have it.

        Raises:
            RolloutError: it failed or took too long.
        """
        function = getattr(self.made, method, None)
        return None if function is None else await self._run(method, function, arguments)

    async def _run(self, method: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        there = f"{method} of {self._kind} {self._name} in a rollout of prompt {self._prompt.index}"
        if self._task.done() or self._task in _left_behind:
            raise RolloutError(f"{there} is not called, as an earlier call goes on or ended its task")
        clock, answer = _Clock(self._timeout_s), asyncio.get_running_loop().create_future()
        self._calls.put_nowait((partial(call_function, function, arguments), clock, answer))
        try:
            with timed("tool", name=f"{self._name}.{method}"):
                return await _result(answer, self._task, clock, name=there)
        except RolloutError:
            raise
        except OvertimeError as error:
            raise RolloutError(f"{there} took more than {self._timeout_s:g} s (limits.tool_timeout_s)") from error
        except Exception as error:
            raise RolloutError(f"{there} failed: {describe_error(error)}") from error

    async def _serve(self) -> None:
        """Make the calls. A cancel ends the call that runs; the task ends when the object is closed."""
        task: Any = asyncio.current_task()
        while not self._closed:
            answer = None
            try:
                work, clock, answer = await self._calls.get()
                _clock.set(clock)
                answer.set_result(await work())
            except BaseException as error:
                if answer is not None and not answer.done():
                    answer.set_exception(error if isinstance(error, Exception) else LeakedError(error))
                if answer is None and isinstance(error, GeneratorExit):
                    raise
            while task.cancelling():
                task.uncancel()
