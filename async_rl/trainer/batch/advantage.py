"""Advantages: the reward of a trajectory relative to its prompt group or to the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from message_queue.heads import GroupHead

GroupAdvantageName = Literal["grpo", "dr_grpo", "rloo"]
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
_EPSILON = 1e-6  # of GRPO, as in verl
_VARIANCE_EPSILON = 1e-8  # of REINFORCE++, as in verl and OpenRLHF
_SPREAD = 1e-6  # smaller reward differences count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages.

    `mean` and `std` are over the trajectories of the prompt group. `token mean` and `token variance` are over the
    sampled tokens of the batch, and a token has the value of its trajectory.

    grpo                          (r - mean) / (std + 1e-6). DeepSeekMath, arXiv 2402.03300, without the 1e-6.
    dr_grpo                       r - mean. Liu et al. 2025, arXiv 2503.20783.
    rloo                          r - mean of the other trajectories of the group. Ahmadian et al. 2024, arXiv
                                  2402.14740.
    reinforce_plus_plus           (r - token mean of r) / sqrt(token variance of r + 1e-8); a group may be a single
                                  trajectory. Hu et al. 2025, "REINFORCE++", arXiv 2501.03262, as in verl. verl puts the
                                  KL into the reward; here it is loss.kl_coefficient, outside the normalisation.
    reinforce_plus_plus_baseline  the same with r - mean in place of r.

    A group with the rewards (1, 0, 0, 0): grpo gives (1.5, -0.5, -0.5, -0.5), dr_grpo (0.75, -0.25, -0.25, -0.25), rloo
    (1, -1/3, -1/3, -1/3).

    Every std and variance is the sample estimate, with n - 1 in the denominator. The batch is the result of one `take`
    from the queue before it is split into mini-batches. It excludes failed rollouts.
    """

    name: AdvantageName = "grpo"
    """One of the names above."""

    def __post_init__(self) -> None:
        if self.name not in get_args(AdvantageName):
            raise ValueError(f"advantage.name is {self.name!r}; use {' or '.join(get_args(AdvantageName))}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """Advantages of the S trajectories of all groups, in order."""

    values: NDArray[np.float32]
    """float32 [S]."""
    informative: NDArray[np.bool_]
    """bool [S]; False if the rewards of the group (or batch) are all equal: the trajectory has no policy gradient."""

    def __post_init__(self) -> None:
        if self.values.shape != self.informative.shape or self.values.ndim != 1:
            raise ValueError(
                f"Advantages.values has shape {self.values.shape} and informative {self.informative.shape}; need [S]"
            )


def compute_advantages(groups: Sequence[GroupHead], config: AdvantageConfig) -> Advantages:
    """Advantages of all trajectories of `groups`, which must not include failed ones."""
    rewards = [np.array([t.reward for t in group.trajectories], np.float64) for group in groups]
    tokens = np.array([t.num_sampled for group in groups for t in group.trajectories], np.int64)
    match config.name:
        case "reinforce_plus_plus":
            return _over_tokens(np.concatenate([*rewards, np.zeros(0)]), tokens)
        case "reinforce_plus_plus_baseline":
            centred = [r - r.mean() if has_spread(r) else np.zeros(len(r)) for r in rewards]
            return _over_tokens(np.concatenate([*centred, np.zeros(0)]), tokens)
        case name:
            return _join([group_advantages(r, name) for r in rewards])


def group_advantages(rewards: NDArray[np.float64], name: GroupAdvantageName) -> tuple[NDArray[np.float32], bool]:
    """Advantages float32 [n] of one group's rewards [n], and False if all rewards are equal."""
    if not has_spread(rewards):
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


def _over_tokens(values: NDArray[np.float64], tokens: NDArray[np.int64]) -> Advantages:
    """Whiten `values` [S] of trajectories with `tokens` [S] sampled tokens; all are informative if any two differ.

    Values (1, 0) with (3, 1) tokens have the token mean 0.75 and the token variance 0.25, so they become (0.5, -1.5).
    """
    total = int(tokens.sum())
    if total < 2 or not has_spread(values[tokens > 0]):
        return Advantages(values=np.zeros(len(values), np.float32), informative=np.zeros(len(values), np.bool_))
    centred = values - (tokens @ values) / total
    variance = (tokens @ centred**2) / (total - 1)
    whitened = centred / np.sqrt(variance + _VARIANCE_EPSILON)
    return Advantages(values=whitened.astype(np.float32), informative=np.ones(len(values), np.bool_))


def _join(groups: Sequence[tuple[NDArray[np.float32], bool]]) -> Advantages:
    """Concatenate (values, informative) of the groups."""
    if not groups:
        return Advantages(values=np.zeros(0, np.float32), informative=np.zeros(0, np.bool_))
    return Advantages(
        values=np.concatenate([values for values, _ in groups]),
        informative=np.concatenate([np.full(len(values), informative) for values, informative in groups]),
    )


def has_spread(rewards: NDArray[np.float64]) -> bool:
    """Whether rewards [n] differ, so that their advantages are not all 0."""
    return len(rewards) > 1 and float(np.ptp(rewards)) >= _SPREAD
