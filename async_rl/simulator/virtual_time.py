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

LEAST_S = 1e-6  # between two pieces of work of one thread
T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing can ever happen again, or nothing came of it for too long."""


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
        self.thread_s: Callable[[], float] = lambda: 0.0
        self._busy_until: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
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
        """Run `func` on the loop, in one piece, `thread_s` later, and after earlier work of the same executor.

        Work of a process that is dead by then is cancelled.
        """
        future = self.create_future()
        at = self.time() + self.thread_s()
        if executor is not None:
            at = self._busy_until[executor] = max(at, self._busy_until.get(executor, 0.0) + LEAST_S)
        self.call_at(at, self._work, future, func, args)
        return future

    def _work(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled() or self.is_dead():
            future.cancel()
            return
        try:
            result = func(*args)
            self.on_result(result)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            if not future.done():
                future.set_exception(error)
            return
        if not future.done():
            future.set_result(result)

    def _number_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
    ) -> asyncio.Future[Any]:
        task = NumberedTask(work, number=next(self._numbers), loop=loop, context=context)
        self.on_task(task)
        return task


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Result of `main`; `loop.time()` starts at 0 and counts seconds that nobody waits for.

    Raises:
        Deadlock: nothing can ever happen again.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
