"""Scores of trajectories."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Protocol

from agent_loop.loop import Prompt, RolloutError
from message_queue.tokens import StopReason


class RewardError(RolloutError):
    """The reward failed or timed out; names the prompt and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Text that the model wrote."""

    turns: tuple[str, ...]
    """Text of each sampled turn, without end-of-turn tokens."""
    stop_reason: StopReason
    """Why the last turn ended; LENGTH if it was cut off, TOOL_CALL if its calls were not executed because no turn was
    left."""


class Reward(Protocol):
    """Scores a completion. May take its time: it runs under `limits.reward_timeout_s`."""

    async def score(self, prompt: Prompt, *, completion: Completion) -> float:
        """A finite number. Any exception drops the group."""
        ...


async def score_in_time(reward: Reward, prompt: Prompt, *, completion: Completion, timeout_s: float) -> float:
    """Score within `timeout_s`.

    Raises:
        RewardError: no score in time, an exception, or a score that is not finite.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            value = float(await reward.score(prompt, completion=completion))
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError) and deadline.expired():
            cause = f"no score in {timeout_s:g} s (limits.reward_timeout_s)"
        raise RewardError(f"reward of prompt {prompt.index} failed: {cause}") from error
    if not math.isfinite(value):
        raise RewardError(f"reward of prompt {prompt.index} is {value}; rewards are finite")
    return value
