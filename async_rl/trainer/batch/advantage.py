"""Advantages: the reward of a trajectory relative to its prompt group or to the batch.

The driver computes them from heads. If the KL is a part of the reward, the trainer ranks compute them again, because
only the trainer knows the KL of a token (`BatchRewards.with_kl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
                                  trajectory. Hu et al. 2025, "REINFORCE++", arXiv 2501.03262, as in verl; their KL in
                                  the reward is loss.kl_in=reward.
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenAdvantages:
    """Advantages of the N tokens in the loss of a batch of S trajectories, with the KL in the reward."""

    tokens: NDArray[np.float32]
    """float32 [N]."""
    trajectories: NDArray[np.float32]
    """float32 [S], of the first token of each trajectory."""
    penalties: NDArray[np.float64]
    """float64 [S], subtracted from the reward of each trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRewards:
    """Rewards of the S trajectories of a batch that did not fail, in order, and how they become advantages."""

    config: AdvantageConfig
    """How rewards become advantages."""
    values: NDArray[np.float64]
    """float64 [S], from the task."""
    groups: NDArray[np.int64]
    """int64 [S], ascending, number of the prompt group."""
    sampled: NDArray[np.int64]
    """int64 [S], sampled tokens, including tokens that are not in the loss."""

    def advantages(self) -> Advantages:
        """Advantages of the trajectories."""
        if self.config.name == "reinforce_plus_plus":
            return _over_tokens(self.values, self.sampled)
        rewards = np.split(self.values, np.flatnonzero(np.diff(self.groups)) + 1)
        if self.config.name == "reinforce_plus_plus_baseline":
            centred = [r - r.mean() if has_spread(r) else np.zeros(len(r)) for r in rewards]
            return _over_tokens(np.concatenate(centred), self.sampled)
        return _join([group_advantages(r, self.config.name) for r in rewards])

    def with_kl(self, kl: NDArray[np.float64], *, trajectory: NDArray[np.int64], coefficient: float) -> TokenAdvantages:
        """Advantages with the penalty coefficient * KL in the reward, as in verl.

        reinforce_plus_plus  The reward of a token is r minus the penalties of this token and of the later ones (the
                             return). It is whitened over the sampled tokens of the batch. Sampled tokens that are too
                             old for the loss are at the front, so their return is that of the whole trajectory.
        other names          The reward of a trajectory is r minus the penalties of its tokens. Baseline and
                             normalisation follow as without a penalty.

        Rewards (1, 0), KL (0.2, 0.4) and (0.1), coefficient 0.5: the penalties are 0.3 and 0.05. With dr_grpo the
        rewards (0.7, -0.05) give the advantages 0.375, 0.375 and -0.375. With reinforce_plus_plus the returns 0.7, 0.8
        and -0.05 are whitened.

        Args:
            kl: float64 [N], log(proximal / reference) of each token in the loss, in the order of the batch.
            trajectory: int64 [N], ascending, trajectory of each token.
            coefficient: factor of the KL.
        """
        count = len(self.values)
        in_loss = np.bincount(trajectory, minlength=count)
        penalties = coefficient * np.bincount(trajectory, weights=kl, minlength=count).astype(np.float64)
        penalised = replace(self, values=self.values - penalties)
        if self.config.name != "reinforce_plus_plus":
            found = penalised.advantages().values
            return TokenAdvantages(tokens=found[trajectory], trajectories=found, penalties=penalties)
        later = [of[::-1].cumsum()[::-1] for of in np.split(kl, in_loss.cumsum()[:-1])]
        returns = self.values[trajectory] - coefficient * np.concatenate(later)
        found = _over_tokens(
            np.concatenate([returns, penalised.values]),
            np.concatenate([np.ones_like(trajectory), self.sampled - in_loss]),
        ).values
        return TokenAdvantages(tokens=found[: len(kl)], trajectories=found[len(kl) :], penalties=penalties)


def batch_rewards(groups: Sequence[GroupHead], config: AdvantageConfig) -> BatchRewards:
    """Rewards of all trajectories of `groups`, which must not include failed ones."""
    flat = [(number, t) for number, group in enumerate(groups) for t in group.trajectories]
    return BatchRewards(
        config=config,
        values=np.array([t.reward for _, t in flat], np.float64),
        groups=np.array([number for number, _ in flat], np.int64),
        sampled=np.array([t.num_sampled for _, t in flat], np.int64),
    )


def compute_advantages(groups: Sequence[GroupHead], config: AdvantageConfig) -> Advantages:
    """Advantages of all trajectories of `groups`, which must not include failed ones."""
    return batch_rewards(groups, config).advantages()


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
    return Advantages(
        values=np.concatenate([values for values, _ in groups]),
        informative=np.concatenate([np.full(len(values), informative) for values, informative in groups]),
    )


def has_spread(rewards: NDArray[np.float64]) -> bool:
    """Whether rewards [n] differ, so that their advantages are not all 0."""
    return len(rewards) > 1 and float(np.ptp(rewards)) >= _SPREAD
