"""Progress of a rollout: one record for each append to one of its trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from message_queue.tokens import Int32Array, StopReason, TokenOutput


@dataclass(frozen=True, slots=True)
class CallStarted:
    """An outside call that must happen once is about to be made."""

    call: str
    """Text that the agent loop gives the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryClosed:
    """The trajectory ended with its reward."""

    stop_reason: StopReason
    """Stop reason of its last segment; ERROR for a rollout that failed."""
    reward: float
    """Reward of the whole trajectory."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that the agent loop or the task noted."""


RolloutStep: TypeAlias = Int32Array | TokenOutput | CallStarted | TrajectoryClosed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """`what` was appended to a trajectory."""

    group: int
    """Id of the group."""
    trajectory: int
    """Number of the trajectory in its group."""
    handout: int
    """Number of the hand-out of the group to a worker; a later one is greater, also after a restart of the run."""
    at: int
    """Tokens that the trajectory held before."""
    what: RolloutStep
    """int32 [n] tokens that no policy sampled, a segment with its rows, a call outside, or the end."""
