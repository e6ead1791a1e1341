"""Validation rollouts of held-out prompts on the same engines, during training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop.engine import EngineError
from agent_loop.loop import AgentLoop, Prompt, RolloutError
from message_queue.tokens import ContractError, RoutingSpec, StopReason
from message_queue.trajectory import ResumeRouting, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """One round over the held-out prompts.

    Rewards 1, 0 and a reward that raised: success_rate 0.5, prompts 3, failed 1.
    """

    success_rate: float
    """Mean reward of the finished rollouts; NaN if none finished."""
    prompts: int
    """Number of rollouts, including failed ones."""
    failed: int
    """Rollouts that raised an error; excluded from `success_rate`."""
    cut_off: int
    """Finished rollouts whose last turn hit a token limit."""
    mean_tokens: float
    """Tokens per finished rollout, including prompt and tool replies; NaN if none finished."""
    min_version: int
    """Oldest weights that sampled a token; -1 if none was sampled."""
    max_version: int
    """Newest weights that sampled a token; -1 if none was sampled."""
    first_error: str | None = None
    """Error of the first prompt with a failed rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRound:
    """Rollouts of held-out prompts on one worker; each list has one entry per prompt."""

    rewards: list[float]
    """Reward; 0 if the rollout failed."""
    lengths: list[int]
    """Number of tokens, including prompt and tool replies."""
    cut_off: list[bool]
    """Whether the last turn hit a token limit."""
    errors: list[str | None]
    """Error of a failed rollout; None if it finished."""
    min_version: int
    """Oldest weights that sampled a token; -1 if none was sampled."""
    max_version: int
    """Newest weights that sampled a token; -1 if none was sampled."""

    @staticmethod
    def joined(parts: Sequence[ValidationRound]) -> ValidationResult:
        """The result of a round over the parts of all workers."""
        errors = [error for part in parts for error in part.errors]
        rollouts = zip(
            errors,
            (reward for part in parts for reward in part.rewards),
            (length for part in parts for length in part.lengths),
            (cut for part in parts for cut in part.cut_off),
            strict=True,
        )
        finished = [(reward, length, cut) for error, reward, length, cut in rollouts if error is None]
        versions = [part for part in parts if part.max_version >= 0]
        return ValidationResult(
            success_rate=_mean([reward for reward, _, _ in finished]),
            prompts=len(errors),
            failed=len(errors) - len(finished),
            cut_off=sum(cut for _, _, cut in finished),
            mean_tokens=_mean([length for _, length, _ in finished]),
            min_version=min((part.min_version for part in versions), default=-1),
            max_version=max((part.max_version for part in versions), default=-1),
            first_error=next(filter(None, errors), None),
        )


class Validator:
    """Rolls out held-out prompts. Their trajectories never enter the queue."""

    def __init__(
        self, *, loop: AgentLoop, routing: RoutingSpec | None, resume_routing: ResumeRouting = "append"
    ) -> None:
        self._loop = loop
        self._routing = routing
        self._resume_routing: ResumeRouting = resume_routing

    async def run(self, prompts: Sequence[tuple[int, Prompt]], *, number: int) -> ValidationRound:
        """Roll out each prompt once.

        Args:
            prompts: each with its index among all prompts of the round.
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
        versions = [segment.weights.version for t in trajectories for segment in t.segments if len(segment)]
        return ValidationRound(
            rewards=[t.reward or 0.0 for t in trajectories],
            lengths=[len(t) for t in trajectories],
            cut_off=[t.stop_reason is StopReason.LENGTH for t in trajectories],
            errors=[task.result() for task in tasks],
            min_version=min(versions, default=-1),
            max_version=max(versions, default=-1),
        )

    async def _roll(self, prompt: Prompt, trajectory: Trajectory, session: str) -> str | None:
        """Run one rollout; returns None, or its error."""
        try:
            await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=session)
            if not trajectory.closed:
                raise RolloutError(f"the agent loop returned without closing the trajectory of prompt {prompt.index}")
        except (EngineError, ContractError):
            raise
        except Exception as error:  # noqa: BLE001 - a failed rollout is data, for any error of the task
            return f"{type(error).__name__}: {error}"
        return None


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
