"""Functions of a user that a run calls: after a step, a publish, a validation, and at its end (`async_rl.train`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from agent_loop.boundary import boundary, call_function
from agent_loop.user_errors import Failure, failure_of
from message_queue.errors import OvertimeError

CALL_S = 60.0  # bound on a call, and on the remaining calls together at the end of the run
MOST_WAITING = 1_000
Kind = Literal["step", "publish", "validation", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened in a run."""

    kind: Kind
    """What happened."""
    train_step: int
    """Train steps that were done: of a publish and a validation those that the weights have."""
    metrics: Mapping[str, float]
    """Key -> value, as in metrics.jsonl or validation.jsonl; at the end those of the last step."""


class Callbacks:
    """Calls the functions one after the other, while the run goes on: none can stop it or make it wait.

    Args:
        functions: function for each kind of event, plain or async; None for none.
    """

    def __init__(self, functions: Mapping[Kind, Callable[[RunEvent], Any] | None]) -> None:
        self._functions = {kind: function for kind, function in functions.items() if function is not None}
        self._events: asyncio.Queue[RunEvent] = asyncio.Queue()

    def tell(self, kind: Kind, train_step: int, metrics: Mapping[str, float]) -> None:
        """Have the function called; of more than MOST_WAITING events the oldest are left out."""
        if kind not in self._functions:
            return
        if self._events.qsize() == MOST_WAITING:
            self._events.get_nowait()
            self._events.task_done()
        self._events.put_nowait(RunEvent(kind=kind, train_step=train_step, metrics=dict(metrics)))

    @contextlib.asynccontextmanager
    async def calling(self, warn: Callable[[Failure], None]) -> AsyncGenerator[None]:
        """Call the functions inside; those that are left at the end have CALL_S seconds. warn: gets their errors."""
        task = asyncio.create_task(self._call_all(warn))
        try:
            yield
            try:
                async with asyncio.timeout(CALL_S):
                    await self._events.join()
            except TimeoutError:
                text = f"callbacks are left after {CALL_S:g} s: the run ends without them"
                warn(Failure(kind="TimeoutError", line="", text=text))
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _call_all(self, warn: Callable[[Failure], None]) -> None:
        while True:
            event = await self._events.get()
            name = f"on_{event.kind} of train step {event.train_step}"
            try:
                call = partial(call_function, partial(self._functions[event.kind], event), {})
                await boundary(call, name=name, timeout_s=CALL_S)
            except OvertimeError as error:
                warn(replace(failure_of(error), text=f"{error}; the run goes on without it"))
            except Exception as error:  # noqa: BLE001 - code of a user may raise anything
                failure = failure_of(error)
                warn(replace(failure, text=f"{name} failed: {failure.text}"))
            finally:
                self._events.task_done()
