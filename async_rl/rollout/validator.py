"""Held-out prompts through the same engines, while training goes on."""

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
    """Mean reward of the rollouts that finished; NaN if none did."""
    prompts: int
    """Rollouts, failed ones included."""
    failed: int
    """Rollouts that raised an error; they are neither right nor wrong."""
    cut_off: int
    """Finished rollouts whose last turn hit a token limit."""
    mean_tokens: float
    """Tokens per rollout that finished, prompt and tool replies included; NaN if none did."""
    min_version: int
    """Oldest weights that sampled a token; -1 if none was sampled."""
    max_version: int
    """Newest weights that sampled a token; -1 if none was sampled."""
    first_error: str | None = None
    """Of the failed rollouts, that of the first prompt."""


class Validator:
    """Rolls every held-out prompt once. Its trajectories never enter the queue."""

    def __init__(
        self,
        *,
        loop: AgentLoop,
        routing: RoutingSpec | None,
        prompts: Sequence[Prompt],
        resume_routing: ResumeRouting = "append",
    ) -> None:
        self._loop = loop
        self._routing = routing
        self._resume_routing: ResumeRouting = resume_routing
        self._prompts = prompts
        self._round = 0

    async def run(self) -> ValidationResult:
        """One round over all prompts.

        Raises:
            ExceptionGroup: of EngineError and ContractError: the engines cannot serve.
        """
        self._round += 1
        trajectories = [Trajectory(routing=self._routing, resume_routing=self._resume_routing) for _ in self._prompts]
        async with asyncio.TaskGroup() as rollouts:
            tasks = [
                rollouts.create_task(self._roll(prompt, trajectory, f"validation{self._round}-{i}"))
                for i, (prompt, trajectory) in enumerate(zip(self._prompts, trajectories, strict=True))
            ]
        errors = [task.result() for task in tasks]
        finished = [t for t, error in zip(trajectories, errors, strict=True) if error is None]
        versions = np.concatenate([t.param_versions()[t.loss_mask()] for t in trajectories])
        return ValidationResult(
            success_rate=_mean([t.reward or 0.0 for t in finished]),
            prompts=len(trajectories),
            failed=len(trajectories) - len(finished),
            cut_off=sum(t.stop_reason is StopReason.LENGTH for t in finished),
            mean_tokens=_mean([len(t) for t in finished]),
            min_version=int(versions.min(initial=versions.max(initial=-1))),
            max_version=int(versions.max(initial=-1)),
            first_error=next(filter(None, errors), None),
        )

    async def _roll(self, prompt: Prompt, trajectory: Trajectory, session: str) -> str | None:
        """None, or why the rollout failed."""
        try:
            await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=session)
            if not trajectory.closed:
                raise RolloutError(f"the agent loop returned without closing the trajectory of prompt {prompt.index}")
        except (EngineError, ContractError):
            raise
        except Exception as error:  # noqa: BLE001 - a failed rollout is data, whatever the task raised
            return f"{type(error).__name__}: {error}"
        return None


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
