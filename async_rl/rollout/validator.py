"""Validation rollouts of held-out prompts on the same engines, during training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from agent_loop.loop import AgentLoop, Prompt
from agent_loop.text import safe_value
from agent_loop.timeline import Timeline, enclosing
from agent_loop.user_errors import failure_of
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.metrics.validation import ValidationResult, ValidationRollout
from async_rl.rollout.rollouter import run_loop
from message_queue.errors import ContractError, EngineError
from message_queue.tokens import RoutingSpec, StopReason
from message_queue.trajectory import ResumeRouting, Trajectory


class Validator:
    """Rolls out held-out prompts. Their trajectories never enter the queue.

    Args:
        decode: token ids -> text.

    Attributes:
        timeline: time spans of the rollouts.
    """

    def __init__(
        self,
        *,
        loop: AgentLoop,
        routing: RoutingSpec | None,
        decode: Callable[[Sequence[int]], str],
        resume_routing: ResumeRouting = "append",
    ) -> None:
        self._loop = loop
        self._decode = decode
        self._routing = routing
        self._resume_routing: ResumeRouting = resume_routing
        self.timeline = Timeline("validation")

    async def run(self, prompts: Sequence[tuple[int, Prompt]], *, number: int) -> list[ValidationRollout]:
        """Roll out each prompt once; the results are in the order of the prompts.

        Args:
            prompts: each with its index among all rollouts of the round.
            number: number of the round.

        Raises:
            ExceptionGroup: of EngineError and ContractError: the engines cannot serve.
        """
        trajectories = [Trajectory(routing=self._routing, resume_routing=self._resume_routing) for _ in prompts]
        async with asyncio.TaskGroup() as rollouts:
            tasks = [
                rollouts.create_task(self._roll(prompt, trajectory, number=number, place=place))
                for (place, prompt), trajectory in zip(prompts, trajectories, strict=True)
            ]
        return [self._validated(*each) for each in zip(trajectories, (task.result() for task in tasks), strict=True)]

    async def _roll(self, prompt: Prompt, trajectory: Trajectory, *, number: int, place: int) -> str | None:
        """Run one rollout; returns None, or its error."""
        session = f"validation{number}-{place}"
        try:
            with self.timeline.span("validation", round=number, rollout=place) as span, enclosing(span):
                await run_loop(self._loop, prompt, trajectory, session=session, cache_salt=session)
        except (EngineError, ContractError):
            raise
        except Exception as error:  # noqa: BLE001 - a failed rollout is data, for any error of the task
            return failure_of(error).text
        return None

    def _validated(self, trajectory: Trajectory, error: str | None) -> ValidationRollout:
        versions = [segment.weights.version for segment in trajectory.segments if len(segment)]
        token_ids = trajectory.token_ids().tolist()
        start = len(trajectory.turns[0].observation) if trajectory.turns else 0
        return ValidationRollout(
            reward=trajectory.reward or 0.0,
            tokens=len(trajectory),
            cut_off=trajectory.stop_reason is StopReason.LENGTH,
            error=error,
            prompt=self._decode(token_ids[:start]),
            response=self._decode(token_ids[start:]),
            min_version=min(versions, default=-1),
            max_version=max(versions, default=-1),
            info=safe_value(trajectory.info),
        )


def is_due(train_step: int, *, every: int, per_batch: int) -> bool:
    """Whether a batch whose last optimizer step is `train_step` reaches a multiple of `every`; never if that is 0.

    With `every` 10 and 4 optimizer steps per batch: after train steps 12, 20, 32, 40 and so on.
    """
    return every > 0 and train_step // every > (train_step - per_batch) // every


class ValidationSchedule:
    """One round at a time.

    Args:
        validate: runs the round with the given number; None if there are no held-out prompts, and so no rounds.
        every: train steps between rounds; 0 for only the first and the last round.
        last: train step of the last round.
        per_batch: train steps of one batch, see `is_due`.

    Attributes:
        first_done: clear from the request of the first round to its end.
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
        self.first_done = asyncio.Event()
        self.first_done.set()

    async def run(self) -> None:
        """The stage: serve requests, forever."""
        while True:
            await self.now(await self._requests.get())
            self._requests.task_done()
            self.first_done.set()

    def request_first(self) -> None:
        """Request the round of the start weights; before any other request."""
        if self._validate is not None:
            self.first_done.clear()
            self._requests.put_nowait(0)

    def request(self, step: int) -> None:
        """Request a round if one is due after train step `step`."""
        is_asked = step != self._last and is_due(step, every=self._every, per_batch=self._per_batch)
        if self._validate is None or not is_asked:
            return
        if self._requests.full():
            self._recorder.warn(f"validation at step {step} skipped: the one before still runs")
        else:
            self._requests.put_nowait(step)

    async def now(self, step: int) -> None:
        """Run a round after train step `step`."""
        if self._validate is None:
            return
        with self._trace.span("validate", step=step):
            self._num_rounds += 1
            result = await self._validate(self._num_rounds)
        self._newest = step
        self._recorder.validation(step, result)
        await asyncio.to_thread(self._recorder.validation_rollouts, step, result)
        if result.failed:
            self._recorder.warn(
                f"validation at step {step}: {result.failed} of {result.num_rollouts} rollouts failed; success is over "
                f"the others. The first error: {result.first_error}"
            )

    async def finish(self, step: int) -> None:
        """Run the last round, after all requested ones; `run` must stay active meanwhile.

        In a run without train steps, the first round is also the last one.
        """
        if self._validate is not None:
            await self._requests.join()
            if self._newest != step:
                await self.now(step)
