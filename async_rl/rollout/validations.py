"""Schedule of validation rounds: before the first step, every `every` steps during training, and at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from async_rl.observe.recorder import Recorder
from async_rl.observe.trace import Trace
from async_rl.rollout.validator import ValidationResult


def is_due(train_step: int, *, every: int, per_batch: int) -> bool:
    """Whether a batch whose last optimizer step is `train_step` reaches a multiple of `every`; never if that is 0.

    With `every` 10 and 4 optimizer steps per batch: after train steps 12, 20, 32, 40 and so on.
    """
    return every > 0 and train_step // every > (train_step - per_batch) // every


class Validations:
    """One round at a time.

    Args:
        validate: runs the round with the given number; None if there are no held-out prompts, which disables rounds.
        every: train steps between rounds; 0 for only the first and the last round.
        last: train step of the last round.
        per_batch: train steps of one batch, see `is_due`.
    """

    def __init__(
        self,
        validate: Callable[[int], Awaitable[ValidationResult]] | None,
        *,
        every: int,
        last: int,
        recorder: Recorder,
        trace: Trace,
        per_batch: int = 1,
    ) -> None:
        self._validate = validate
        self._num_rounds = 0
        self._every = every
        self._per_batch = per_batch
        self._last = last
        self._recorder = recorder
        self._trace = trace
        self._newest: int | None = None  # train step of the newest round
        self._requests: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

    async def run(self) -> None:
        """The stage: serve requests, forever."""
        while True:
            await self.now(await self._requests.get())
            self._requests.task_done()

    def request(self, step: int) -> None:
        """Request a round if one is due after train step `step`."""
        if self._validate is None or step == self._last:
            return
        if not is_due(step, every=self._every, per_batch=self._per_batch):
            return
        if self._requests.full():
            self._recorder.warn(f"validation at step {step} skipped: the one before still runs")
        else:
            self._requests.put_nowait(step)

    async def now(self, step: int) -> None:
        """Run a round after train step `step`."""
        if self._validate is None:
            return
        with self._trace.span("validate", f"step {step}"):
            self._num_rounds += 1
            result = await self._validate(self._num_rounds)
        self._newest = step
        self._recorder.validation(step, result)
        if result.failed:
            self._recorder.warn(
                f"validation at step {step}: {result.failed} of {result.prompts} rollouts failed; success is over the "
                f"others. The first error: {result.first_error}"
            )

    async def finish(self, step: int) -> None:
        """Run the last round, after all requested ones; `run` must stay active meanwhile.

        In a run without train steps, the first round is also the last one.
        """
        if self._validate is not None:
            await self._requests.join()
            if self._newest != step:
                await self.now(step)
