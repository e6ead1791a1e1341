"""The tasks and turns of the event loop under a run: faults at a turn, standstills, and the end of all tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from async_rl.simulate.processes import adopt
from async_rl.simulate.scenario import Fault, Scenario
from async_rl.simulate.virtual_time import Deadlock, NumberedTask, VirtualTimeLoop

STANDSTILL_S = 900.0  # virtual seconds without a train step; longer than all time-outs of one train step together
STANDSTILL_TURNS = 60_000  # turns of the event loop without a train step
CLEAN_UP_TURNS = 2_000


class Turns:
    """Watches a loop; the task with the name "world" is its own, all others are of the run.

    Args:
        happens: called with a fault when its turn has come; turns while a run is ended do not count.
        stands_still: called with how long there was no progress.
    """

    def __init__(
        self,
        loop: VirtualTimeLoop,
        scenario: Scenario,
        *,
        happens: Callable[[Fault], None],
        stands_still: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._faults = {fault.at: fault for fault in scenario.faults if fault.point.startswith("turn/")}
        self._happens = happens
        self._stands_still = stands_still
        self._turn = self._living_turns = self._cleaning = 0
        self._progress = (0.0, 0)
        self._tasks: dict[NumberedTask, None] = {}
        loop.on_task = self._on_task
        loop.on_turn = self._on_turn

    def progress(self) -> None:
        """A train step was made, or a run begins."""
        self._progress = (self._loop.time(), self._turn)

    def cut_off(self) -> None:
        """Cancel every task where it is."""
        self._cleaning = self._turn
        for task in self._of_the_run():
            task.cancel()

    async def clean_up(self) -> None:
        """End whatever a run left behind.

        Raises:
            Deadlock: it does not end.
        """
        self._cleaning = self._turn
        while left := self._of_the_run():
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    def go_on(self) -> None:
        """Turns count again."""
        self._cleaning = 0

    # ---- inside

    def _of_the_run(self) -> list[NumberedTask]:
        return [task for task in self._tasks if task.get_name() != "world"]

    def _on_task(self, task: NumberedTask) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        adopt(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)  # type: ignore[arg-type]

    def _on_turn(self) -> None:
        self._turn += 1
        if self._cleaning:
            if self._turn > self._cleaning + CLEAN_UP_TURNS:
                raise Deadlock("what a dead driver left behind does not end")
            return
        self._living_turns += 1
        if self._living_turns in self._faults:
            self._happens(self._faults[self._living_turns])
        since, turn = self._progress
        if self._loop.time() > since + STANDSTILL_S or self._turn > turn + STANDSTILL_TURNS:
            waited = f"{self._loop.time() - since:.0f} s and {self._turn - turn} turns of the event loop"
            self.progress()
            self._stands_still(waited)
