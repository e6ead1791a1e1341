"""How far a rollout is, one record for each thing that is appended to one of its trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from message_queue.tokens import Int32Array, StopReason, TokenOutput
from message_queue.wire.packed import Packed, Shared


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """segment: as it is, or as one of its messages."""

    segment: TokenOutput | Packed | Shared | bytes


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Something outside is about to be called that is to happen once."""

    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryClosed:
    """The trajectory ended with its reward."""

    stop_reason: StopReason
    reward: float
    info: Mapping[str, float] = field(default_factory=dict[str, float])


RolloutStep: TypeAlias = Int32Array | Sampled | CallBegun | TrajectoryClosed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """`what` was appended to trajectory number `trajectory` of `group`, which held `at` tokens before.

    what: int32 [n] tokens that no policy sampled, a segment, a call outside, or the end.
    """

    group: int
    trajectory: int
    at: int
    what: RolloutStep
