"""Group-relative advantages: how much better a trajectory did than the others of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from message_queue.trajectory import PromptGroup

AdvantageName = Literal["grpo", "dr_grpo", "rloo"]
_EPSILON = 1e-4  # keeps a nearly constant group from exploding
_SPREAD = 1e-6  # rewards closer than this are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """grpo: (r - mean) / (std + 1e-4). dr_grpo: r - mean. rloo: r - mean of the others."""

    name: AdvantageName = "grpo"

    def __post_init__(self) -> None:
        if self.name not in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(f"advantage.name is {self.name!r}; use grpo, dr_grpo or rloo")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """values: float32 [S]. informative: bool [S], False where all rewards of the group are the same.

    Trajectories of a group without spread have nothing to teach and are left out of the forward pass.
    S counts the trajectories of all groups in order.
    """

    values: NDArray[np.float32]
    informative: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if self.values.shape != self.informative.shape or self.values.ndim != 1:
            raise ValueError(
                f"Advantages.values has shape {self.values.shape} and informative {self.informative.shape}; need [S]"
            )


def compute_advantages(groups: Sequence[PromptGroup], config: AdvantageConfig) -> Advantages:
    """Advantage of every trajectory of every group.

    Raises:
        ValueError: a trajectory has no reward yet.
    """
    values: list[NDArray[np.float32]] = []
    informative: list[NDArray[np.bool_]] = []
    for group in groups:
        advantages, has_spread = group_advantages(_rewards(group), config.name)
        values.append(advantages)
        informative.append(np.full(len(advantages), has_spread))
    return Advantages(
        values=np.concatenate(values) if values else np.zeros(0, np.float32),
        informative=np.concatenate(informative) if informative else np.zeros(0, np.bool_),
    )


def group_advantages(rewards: NDArray[np.float64], name: AdvantageName) -> tuple[NDArray[np.float32], bool]:
    """float32 [n] advantages of one group's rewards [n], and whether the rewards differ at all.

    The standard deviation is the sample one, n - 1 in the denominator.
    """
    if len(rewards) < 2 or float(np.ptp(rewards)) < _SPREAD:
        return np.zeros(len(rewards), np.float32), False
    centred = rewards - rewards.mean()
    match name:
        case "grpo":
            centred = centred / (rewards.std(ddof=1) + _EPSILON)
        case "rloo":
            centred = centred * (len(rewards) / (len(rewards) - 1))
        case "dr_grpo":
            pass
    return centred.astype(np.float32), True


def _rewards(group: PromptGroup) -> NDArray[np.float64]:
    for index, trajectory in enumerate(group.trajectories):
        if trajectory.reward is None:
            raise ValueError(f"group {group.group}: trajectory {index} has no reward; close it before training")
    return np.array([t.reward for t in group.trajectories], np.float64)
