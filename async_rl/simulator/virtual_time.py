"""An event loop whose clock jumps: what waits costs no time, and every run is the same.

Tasks run in the order in which asyncio makes them ready. Sets of tasks are ordered by the number of the task, not by
its address. Work given to a thread runs on the loop, after a delay of the caller's choice.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from agent_loop.boundary import UserThreads

DEFAULT_THREADS = 2  # of the event loop in each process; few, so that work that hangs in them is seen
LEAST_S = 1e-6  # between two pieces of work of one thread
T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing more can happen, or nothing came of it for too long."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never blocks; where a loop would have waited, its clock moves on by that time."""

    def __init__(self, on_turn: Callable[[], None]) -> None:
        super().__init__()
        self.now = 0.0
        self._on_turn = on_turn

    def select(self, timeout: float | None = None) -> list[Any]:
        self._on_turn()
        if timeout is None:
            raise Deadlock("deadlock: every task waits and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class _Thread:
    """A thread: when its newest work starts, and when a call that blocks it ends."""

    busy_until = blocked_until = -LEAST_S


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its result or error, unless it has one."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # a caller may not be waiting any more


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash does not depend on where it lies in memory."""

    def __init__(self, work: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self.number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module; `time()` starts at 0."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector(lambda: self.on_turn())
        super().__init__(self._clock)
        self._numbers = itertools.count()
        self.thread_s: Callable[[], float] = lambda: 0.0  # delay of the product's own work
        self._threads: WeakKeyDictionary[Any, list[_Thread]] = WeakKeyDictionary()  # by executor or process
        self._blocked_s = 0.0
        self.process: Callable[[], object | None] = lambda: None  # that runs now; None for the driver
        self.is_dead: Callable[[], bool] = lambda: False  # whether the process that runs now was killed
        self.on_result: Callable[[object], None] = lambda result: None  # of work given to a thread
        self.on_task: Callable[[NumberedTask], None] = lambda task: None
        self.on_turn: Callable[[], None] = lambda: None  # before each turn; an exception ends the loop
        self.set_task_factory(self._number_task)

    def time(self) -> float:
        return self._clock.now

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        """There are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run `func` on the loop, in one piece, `thread_s` later, and after earlier work of the same thread.

        The executor of user code has a thread for each call, any other has one, and a process a few without executor.
        User code starts at once. Work of a process that is dead by then is cancelled.
        """
        future = self.create_future()
        threads, delay_s = [_Thread()], 0.0
        if not isinstance(executor, UserThreads):
            delay_s = self.thread_s()
            made = [_Thread() for _ in range(DEFAULT_THREADS if executor is None else 1)]
            threads = self._threads.setdefault(executor or self.process() or self, made)
        thread = min(threads, key=lambda one: one.busy_until)
        at = thread.busy_until = max(self.time() + delay_s, thread.busy_until + LEAST_S)
        self.call_at(at, self._work, thread, future, func, args)
        return future

    def block(self, seconds: float) -> None:
        """Called by work in a thread: it takes this long."""
        self._blocked_s = seconds

    def _work(
        self, thread: _Thread, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        if thread.blocked_until > self.time():
            self.call_at(thread.blocked_until, self._work, thread, future, func, args)
            return
        if future.cancelled() or self.is_dead():
            future.cancel()
            return
        result, error, self._blocked_s = None, None, 0.0
        try:
            result = func(*args)
            self.on_result(result)
        except Exception as raised:  # noqa: BLE001 - the caller raises it
            error = raised
        if not self._blocked_s:
            settle(future, result, error)
            return
        thread.blocked_until = self.time() + self._blocked_s
        thread.busy_until = max(thread.busy_until, thread.blocked_until)
        self.call_at(thread.blocked_until, settle, future, result, error)

    def _number_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
    ) -> asyncio.Future[Any]:
        task = NumberedTask(work, number=next(self._numbers), loop=loop, context=context)
        self.on_task(task)
        return task


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Result of `main`; `loop.time()` starts at 0 and counts seconds that nobody waits for.

    Raises:
        Deadlock: nothing more can happen.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
