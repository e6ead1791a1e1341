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
class Forked:
    """The path started with the first turns of another one; see `Trajectory.fork`. It is the first record of a path."""

    parent: int
    """Number of the other path."""
    turns: int
    """Number of shared turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryClosed:
    """The trajectory ended with its reward, and all its paths with it."""

    stop_reason: StopReason
    """Stop reason of its last segment; ERROR for a rollout that failed."""
    reward: float
    """Reward of the whole trajectory."""
    rewards: Mapping[str, float] | None = None
    """Agent -> its reward, for the agents that are trained; None trains all paths with `reward`."""
    agents: Mapping[int, str] = field(default_factory=dict[int, str])
    """Number of a path -> its agent, if that is not the policy."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that the agent loop or the task noted."""
    forks: Mapping[int, int] = field(default_factory=dict[int, int])
    """Number of each fork -> its tokens, shared ones included."""


RolloutStep: TypeAlias = Int32Array | TokenOutput | CallStarted | Forked | TrajectoryClosed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """`what` was appended to a path of a trajectory."""

    group: int
    """Id of the group."""
    trajectory: int
    """Number of the trajectory in its group."""
    handout: int
    """Number of the hand-out of the group to a worker; a later one is greater, also after a restart of the run."""
    at: int
    """Tokens that the path held before; those that it shares if this is its start."""
    what: RolloutStep
    """int32 [n] tokens that no policy sampled, a segment with its rows, a call outside, the start of a fork, or the
    end."""
    path: int = 0
    """Number of the path; 0 is the root."""
