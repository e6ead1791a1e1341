"""Advantages: how much better a trajectory did than others, of its prompt or of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from message_queue.trajectory import PromptGroup

GroupAdvantageName = Literal["grpo", "dr_grpo", "rloo"]
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
_EPSILON = 1e-4  # keeps a nearly constant group from exploding
_SPREAD = 1e-6  # rewards closer than this are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages. mean and std are over the prompt group, batch mean and std over all trajectories.

    grpo                          (r - mean) / (std + 1e-4). DeepSeekMath, arXiv 2402.03300.
    dr_grpo                       r - mean. Liu et al. 2025, arXiv 2503.20783.
    rloo                          r - mean of the others of the group. Ahmadian et al. 2024, arXiv 2402.14740.
    reinforce_plus_plus           (r - batch mean) / (batch std + 1e-4); a group may be a single trajectory.
                                  Hu et al. 2025, "REINFORCE++", arXiv 2501.03262 (its KL in the reward is
                                  loss.kl_coefficient here).
    reinforce_plus_plus_baseline  (r - mean) / (batch std of r - mean, + 1e-4). The same, with a group baseline.

    Every std is the sample one, n - 1 in the denominator.
    """

    name: AdvantageName = "grpo"

    def __post_init__(self) -> None:
        if self.name not in get_args(AdvantageName):
            raise ValueError(f"advantage.name is {self.name!r}; use {' or '.join(get_args(AdvantageName))}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """values: float32 [S]. informative: bool [S], False where the rewards compared with are all the same.

    Trajectories that are not informative have nothing to teach and are left out of the forward pass.
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
    rewards = [_rewards(group) for group in groups]
    match config.name:
        case "reinforce_plus_plus":
            return _over_batch(rewards)
        case "reinforce_plus_plus_baseline":
            return _over_batch_with_baseline(rewards)
        case name:
            return _join([group_advantages(r, name) for r in rewards])


def group_advantages(rewards: NDArray[np.float64], name: GroupAdvantageName) -> tuple[NDArray[np.float32], bool]:
    """float32 [n] advantages of one group's rewards [n], and whether the rewards differ at all."""
    if not _has_spread(rewards):
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


def _over_batch(rewards: Sequence[NDArray[np.float64]]) -> Advantages:
    """(r - batch mean) / batch std; all are informative where any two differ."""
    batch = np.concatenate(rewards) if rewards else np.zeros(0)
    if not _has_spread(batch):
        return Advantages(values=np.zeros(len(batch), np.float32), informative=np.zeros(len(batch), np.bool_))
    values = (batch - batch.mean()) / (batch.std(ddof=1) + _EPSILON)
    return Advantages(values=values.astype(np.float32), informative=np.ones(len(batch), np.bool_))


def _over_batch_with_baseline(rewards: Sequence[NDArray[np.float64]]) -> Advantages:
    """(r - group mean) / its batch std; its batch mean is zero."""
    centred = [r - r.mean() if _has_spread(r) else np.zeros(len(r)) for r in rewards]
    batch = np.concatenate(centred) if centred else np.zeros(0)
    scale = batch.std(ddof=1) + _EPSILON if len(batch) > 1 else 1.0
    return _join([((c / scale).astype(np.float32), _has_spread(r)) for c, r in zip(centred, rewards, strict=True)])


def _join(groups: Sequence[tuple[NDArray[np.float32], bool]]) -> Advantages:
    """All groups in order, each with whether it is informative."""
    if not groups:
        return Advantages(values=np.zeros(0, np.float32), informative=np.zeros(0, np.bool_))
    return Advantages(
        values=np.concatenate([values for values, _ in groups]),
        informative=np.concatenate([np.full(len(values), informative) for values, informative in groups]),
    )


def _has_spread(rewards: NDArray[np.float64]) -> bool:
    return len(rewards) > 1 and float(np.ptp(rewards)) >= _SPREAD


def _rewards(group: PromptGroup) -> NDArray[np.float64]:
    for index, trajectory in enumerate(group.trajectories):
        if trajectory.reward is None:
            raise ValueError(f"group {group.group}: trajectory {index} has no reward; close it before training")
    return np.array([t.reward for t in group.trajectories], np.float64)
