"""What Ctrl-C and SIGTERM do to a run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable, Sequence


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

    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
