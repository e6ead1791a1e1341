"""Validation rollouts of held-out prompts on the same engines, during training."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agent_loop.engine import EngineError
from agent_loop.loop import AgentLoop, Prompt, RolloutError
from async_rl.metrics.recorder import Recorder, ValidationResult
from async_rl.metrics.trace import Trace
from async_rl.rollout.rollouter import failure_text
from message_queue.tokens import ContractError, RoutingSpec, StopReason
from message_queue.trajectory import ResumeRouting, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRollout:
    """One rollout of a held-out prompt."""

    reward: float
    """Reward; 0 if the rollout failed."""
    tokens: int
    """Number of tokens, including prompt and tool replies."""
    cut_off: bool
    """Whether the last turn hit a token limit."""
    error: str | None
    """Error of a failed rollout; None if it finished."""
    min_version: int
    """Oldest weights that sampled a token; -1 if none was sampled."""
    max_version: int
    """Newest weights that sampled a token; -1 if none was sampled."""


def validation_result(sets: Mapping[str, Sequence[Sequence[ValidationRollout]]]) -> ValidationResult:
    """The result of a round.

    Args:
        sets: name of a set -> for each prompt, its rollouts; each prompt of the round has equally many.
    """
    whole = _result([rollouts for prompts in sets.values() for rollouts in prompts])
    return replace(whole, sets={name: _result(prompts) for name, prompts in sets.items() if name})


def pass_at(k: int, *, rollouts: int, right: int) -> float:
    """Probability that at least one of k rollouts is right, if they are drawn from `rollouts` of which `right` are.

    The unbiased estimate of Chen et al. (2021), https://arxiv.org/abs/2107.03374. Of 4 rollouts one is right:
    pass@2 is 1 - 3/6 = 0.5.
    """
    return 1 - math.comb(rollouts - right, k) / math.comb(rollouts, k)


def _result(prompts: Sequence[Sequence[ValidationRollout]]) -> ValidationResult:
    """The result over prompts, each with its rollouts."""
    everything = [rollout for rollouts in prompts for rollout in rollouts]
    finished = [[rollout for rollout in rollouts if rollout.error is None] for rollouts in prompts]
    sound = [rollout for rollouts in finished for rollout in rollouts]
    versions = [rollout for rollout in everything if rollout.max_version >= 0]
    samples = max(map(len, prompts), default=1)
    counts = [(len(rollouts), sum(rollout.reward > 0 for rollout in rollouts)) for rollouts in finished]
    return ValidationResult(
        success_rate=_mean([rollout.reward for rollout in sound]),
        prompts=len(prompts),
        samples=samples,
        failed=len(everything) - len(sound),
        cut_off=sum(rollout.cut_off for rollout in sound),
        mean_tokens=_mean([rollout.tokens for rollout in sound]),
        min_version=min((rollout.min_version for rollout in versions), default=-1),
        max_version=max((rollout.max_version for rollout in versions), default=-1),
        pass_at={
            k: _mean([pass_at(k, rollouts=n, right=right) for n, right in counts if n >= k])
            for k in (1 << power for power in range(samples.bit_length()))
            if samples > 1
        },
        first_error=next((rollout.error for rollout in everything if rollout.error is not None), None),
    )


class Validator:
    """Rolls out held-out prompts. Their trajectories never enter the queue."""

    def __init__(
        self, *, loop: AgentLoop, routing: RoutingSpec | None, resume_routing: ResumeRouting = "append"
    ) -> None:
        self._loop = loop
        self._routing = routing
        self._resume_routing: ResumeRouting = resume_routing

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
                rollouts.create_task(self._roll(prompt, trajectory, f"validation{number}-{place}"))
                for (place, prompt), trajectory in zip(prompts, trajectories, strict=True)
            ]
        return [
            _validated(trajectory, error=task.result()) for trajectory, task in zip(trajectories, tasks, strict=True)
        ]

    async def _roll(self, prompt: Prompt, trajectory: Trajectory, session: str) -> str | None:
        """Run one rollout; returns None, or its error."""
        try:
            await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=session)
            if not trajectory.closed:
                raise RolloutError(f"the agent loop returned without closing the trajectory of prompt {prompt.index}")
        except (EngineError, ContractError):
            raise
        except Exception as error:  # noqa: BLE001 - a failed rollout is data, for any error of the task
            return failure_text(error)
        return None


def _validated(trajectory: Trajectory, *, error: str | None) -> ValidationRollout:
    versions = [segment.weights.version for segment in trajectory.segments if len(segment)]
    return ValidationRollout(
        reward=trajectory.reward or 0.0,
        tokens=len(trajectory),
        cut_off=trajectory.stop_reason is StopReason.LENGTH,
        error=error,
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
    )


def is_due(train_step: int, *, every: int, per_batch: int) -> bool:
    """Whether a batch whose last optimizer step is `train_step` reaches a multiple of `every`; never if that is 0.

    With `every` 10 and 4 optimizer steps per batch: after train steps 12, 20, 32, 40 and so on.
    """
    return every > 0 and train_step // every > (train_step - per_batch) // every


class ValidationSchedule:
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
                f"validation at step {step}: {result.failed} of {result.rollouts} rollouts failed; success is over the "
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


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
