"""What Ctrl-C and SIGTERM do to a run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import uvloop

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
WAKE_S = 0.5  # a signal that comes just before a wait does not end the wait; its handler runs after it
_actions: WeakKeyDictionary[asyncio.AbstractEventLoop, Callable[[], None]] = WeakKeyDictionary()
"""Event loop that no signal reaches, because its thread is not the main one -> what a signal does."""


@contextlib.asynccontextmanager
async def stop_on_interrupt(request_stop: Callable[[], None], *, note: Callable[[str], None]) -> AsyncGenerator[None]:
    """First Ctrl-C or SIGTERM: finish the step and save. Second: stop at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def interrupt() -> None:
        nonlocal asked
        if asked and task is not None:
            task.cancel()
            return
        asked = True
        note("stopping after this train step; once more to stop at once")
        request_stop()

    signals = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    _actions[loop] = interrupt
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        del _actions[loop]
        for number in signals:
            loop.remove_signal_handler(number)


def run_in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on an event loop in another thread, because this one may run a loop, as in a notebook.

    Signals that come meanwhile have the effect of `stop_on_interrupt`; outside this block they stop at once.

    Raises:
        KeyboardInterrupt: stopped at once.
    """
    answer: Future[T] = Future()
    running: list[tuple[asyncio.AbstractEventLoop, Callable[[], Any]]] = []

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task.cancel))
        return await work()

    def run() -> None:
        try:
            answer.set_result(uvloop.run(noted()))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            answer.set_exception(error)

    def interrupt(*_: Any) -> None:
        for loop, cancel in running:
            loop.call_soon_threadsafe(_actions.get(loop, cancel))

    in_main = threading.current_thread() is threading.main_thread()
    before = [(number, signal.signal(number, interrupt)) for number in SIGNALS] if in_main else []
    try:
        threading.Thread(target=run, name="run", daemon=True).start()
        while not wait([answer], timeout=WAKE_S).done:
            pass
        return answer.result()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before:
            signal.signal(number, handler)
