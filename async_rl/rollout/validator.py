"""Held-out prompts through the same engines, while training goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agent_loop.loop import AgentLoop, Prompt, RolloutError
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import ResumeRouting, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """success_rate: mean reward. min_version, max_version: of the weights that sampled tokens; -1 if none was."""

    success_rate: float
    prompts: int
    mean_tokens: float
    min_version: int
    max_version: int


class Validator:
    """Rolls every held-out prompt once. Its trajectories never enter the queue; a failed rollout counts as reward 0."""

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
        """One round over all prompts."""
        self._round += 1
        trajectories = [Trajectory(routing=self._routing, resume_routing=self._resume_routing) for _ in self._prompts]
        async with asyncio.TaskGroup() as rollouts:
            for i, (prompt, trajectory) in enumerate(zip(self._prompts, trajectories, strict=True)):
                session = f"validation{self._round}-{i}"
                rollouts.create_task(self._roll(prompt, trajectory, session))
        versions = np.concatenate([t.param_versions()[t.loss_mask()] for t in trajectories])
        return ValidationResult(
            success_rate=float(np.mean([t.reward or 0.0 for t in trajectories])),
            prompts=len(trajectories),
            mean_tokens=float(np.mean([len(t) for t in trajectories])),
            min_version=int(versions.min(initial=versions.max(initial=-1))),
            max_version=int(versions.max(initial=-1)),
        )

    async def _roll(self, prompt: Prompt, trajectory: Trajectory, session: str) -> None:
        with contextlib.suppress(RolloutError):
            await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=session)
