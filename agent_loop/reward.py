"""Scores of trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from agent_loop.boundary import boundary
from agent_loop.loop import Message, Prompt
from agent_loop.timeline import timed
from agent_loop.user_errors import describe_error
from message_queue.errors import OvertimeError, RewardError
from message_queue.tokens import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A rollout as the reward sees it."""

    turns: tuple[str, ...]
    """Text of each sampled turn, without end-of-turn tokens."""
    stop_reason: StopReason
    """Why the last turn ended; LENGTH if it was cut off, TOOL_CALL if its calls were not executed because no turn was
    left."""
    num_tokens: int = 0
    """Sampled tokens of all turns."""
    messages: tuple[Message, ...] = ()
    """The conversation: the messages of the prompt, each turn, and after it the replies to its calls as the model saw
    them (role `tool`)."""

    @property
    def text(self) -> str:
        """Text of the last turn."""
        return self.turns[-1]


class Score(NamedTuple):
    """A reward and its parts."""

    value: float
    """The reward."""
    parts: Mapping[str, float] = {}
    """Name -> value before its weight; they become the entries `reward/NAME` of `Trajectory.info`."""


RewardFunction = Callable[..., Any]
"""A function of any of `prompt`, `completion` and the keys of `prompt.target`; returns a number."""


class Reward(Protocol):
    """Scores a completion. May take its time: it runs under `limits.reward_timeout_s`."""

    async def score(self, prompt: Prompt, *, completion: Completion) -> float | Score:
        """A finite number, and its parts if there are any. Any exception drops the group."""
        ...


async def score_in_time(reward: Reward, prompt: Prompt, *, completion: Completion, timeout_s: float) -> Score:
    """Score within `timeout_s`.

    Raises:
        RewardError: no score in time, an exception, or a score that is not finite.
    """
    try:
        with timed("reward"):
            found = await boundary(
                lambda: reward.score(prompt, completion=completion), name="the reward", timeout_s=timeout_s
            )
        score = found if isinstance(found, Score) else Score(found)
        score = Score(float(score.value), {name: float(value) for name, value in score.parts.items()})
    except RewardError:
        raise
    except Exception as error:
        cause = describe_error(error)
        if isinstance(error, OvertimeError):
            cause = f"no score in {timeout_s:g} s (limits.reward_timeout_s)"
        raise RewardError(f"reward of prompt {prompt.index} failed: {cause}") from error
    for name, value in (("", score.value), *((f" {name}", value) for name, value in score.parts.items())):
        if not math.isfinite(value):
            raise RewardError(f"reward{name} of prompt {prompt.index} is {value}; rewards are finite")
    return score


def number_or_nan(value: object) -> float:
    """A number of Python, numpy or torch as float; NaN for anything else, a text included."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(cast(Any, value))
    except Exception:  # noqa: BLE001 - conversion of a foreign object
        return math.nan
