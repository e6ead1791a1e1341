"""Baselines: how the rewards of a batch become advantages.

A new baseline is a new class here, listed in `AdvantageConfig`, or a class of a user's file:
`advantage.name=FILE.py:CLASS` or `advantage.name=MODULE:CLASS`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, get_args, get_type_hints

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from pydantic import Field

from agent_loop.bounds import bounded
from async_rl.files.user_code import or_user_class
from async_rl.trainer.batch.advantage import (
    Advantage,
    Advantages,
    BatchRewards,
    PromptValue,
    TokenAdvantages,
    has_spread,
    of_parts,
    over_tokens,
    parts,
)
from async_rl.trainer.critic.gae import GAE

_EPSILON = 1e-6  # of GRPO, as in verl


@bounded("advantage")
class GroupBaseline(Advantage):
    """Base of the baselines that compare the trajectories of a group, each group on its own."""

    @abstractmethod
    def of_group(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Advantages [n] of the rewards [n] of a group, n > 1, that differ."""

    def of(self, rewards: BatchRewards) -> Advantages:
        return of_parts(rewards.groups, rewards.values, self.of_group)


@bounded("advantage")
class GRPO(GroupBaseline):
    """(r - mean) / (std + 1e-6). DeepSeekMath, arXiv 2402.03300, without the 1e-6.

    A group with the rewards (1, 0, 0, 0): (1.5, -0.5, -0.5, -0.5).
    """

    name: Literal["grpo"] = "grpo"
    """Name of the baseline."""

    def of_group(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        return _standardised(rewards)


@bounded("advantage")
class DrGRPO(GroupBaseline):
    """r - mean. Liu et al. 2025, arXiv 2503.20783. Rewards (1, 0, 0, 0): (0.75, -0.25, -0.25, -0.25)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the baseline."""

    def of_group(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        return rewards - rewards.mean()


@bounded("advantage")
class RLOO(GroupBaseline):
    """r - mean of the other trajectories of the group. Ahmadian et al. 2024, arXiv 2402.14740.

    Rewards (1, 0, 0, 0): (1, -1/3, -1/3, -1/3).
    """

    name: Literal["rloo"] = "rloo"
    """Name of the baseline."""

    def of_group(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


@bounded("advantage")
class ReinforcePlusPlus(Advantage):
    """(r - token mean of r) / sqrt(token variance of r + 1e-8). Hu et al. 2025, "REINFORCE++", arXiv 2501.03262, as in
    verl; their KL in the reward is loss.kl_in=reward.
    """

    compares: ClassVar[Literal["group", "batch"]] = "batch"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Name of the baseline."""

    def of(self, rewards: BatchRewards) -> Advantages:
        return over_tokens(rewards.values, rewards.sampled, of=rewards.agents)

    def with_kl(
        self, rewards: BatchRewards, kl: NDArray[np.float64], *, trajectory: NDArray[np.int64], coefficient: float
    ) -> TokenAdvantages:
        """See `BatchRewards.with_kl`. The reward of a token is its return: r minus the penalties of this token and of
        the later ones. It is whitened over the sampled tokens of the batch. Sampled tokens that are too old for the
        loss are at the front, so their return is that of the whole trajectory.
        """
        in_loss = np.bincount(trajectory, minlength=len(rewards.values))
        of_trajectories = np.bincount(trajectory, weights=kl, minlength=len(rewards.values))
        later = [of[::-1].cumsum()[::-1] for of in np.split(kl, in_loss.cumsum()[:-1])]
        returns = rewards.values[trajectory] - coefficient * np.concatenate(later)
        found = over_tokens(
            np.concatenate([returns, rewards.values - coefficient * of_trajectories]),
            np.concatenate([np.ones_like(trajectory), rewards.sampled - in_loss]),
            of=np.concatenate([rewards.agents[trajectory], rewards.agents]),
        ).values
        return TokenAdvantages(tokens=found[: len(kl)], trajectories=found[len(kl) :])


@bounded("advantage")
class ReinforcePlusPlusBaseline(Advantage):
    """As `ReinforcePlusPlus`, with r - mean in place of r."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Name of the baseline."""

    def of(self, rewards: BatchRewards) -> Advantages:
        centred = rewards.values.copy()
        for places in parts(rewards.groups):
            own = rewards.values[places]
            centred[places] = own - own.mean() if has_spread(own) else 0.0
        return over_tokens(centred, rewards.sampled, of=rewards.agents)


@bounded("advantage")
class BatchMean(Advantage):
    """r - mean of r over the trajectories of the batch, as in `FlashREINFORCE`. Rewards (1, 0, 0, 0) of four groups:
    (0.75, -0.25, -0.25, -0.25).
    """

    compares: ClassVar[Literal["group", "batch"]] = "batch"

    name: Literal["batch_mean"] = "batch_mean"
    """Name of the baseline."""

    def of(self, rewards: BatchRewards) -> Advantages:
        return of_parts(rewards.agents, rewards.values, lambda own: own - own.mean())


@bounded("advantage")
class Contrastive(Advantage):
    """S / (2 P) of the P trajectories of the batch with a reward above the threshold, -S / (2 (S - P)) of the others; 1
    or -1 if there is one kind only. With loss.aggregation=sequence_mean both kinds weigh the same. Wu et al. 2026,
    "Rethinking Groups in Critic-Free RLVR", arXiv 2606.17250, with loss=ppo_clip and loss.negative_token_share.
    """

    compares: ClassVar[Literal["group", "batch"]] = "batch"

    name: Literal["contrastive"] = "contrastive"
    """Name of the baseline."""
    threshold: float = 0.5
    """Rewards above it are positive."""

    def of(self, rewards: BatchRewards) -> Advantages:
        found = np.zeros(len(rewards.values), np.float32)
        for places in parts(rewards.agents):
            positive = rewards.values[places] > self.threshold
            count, kinds = len(places), 2 if 0 < positive.sum() < len(places) else 1
            own = np.where(positive, count / positive.sum().clip(1), -count / (~positive).sum().clip(1))
            found[places] = own / kinds
        return Advantages(values=found, informative=np.ones(len(found), np.bool_))


@bounded("advantage")
class SPO(Advantage):
    """(r - v - mean) / (std + 1e-6), v = expected reward of the prompt before the batch; mean and std over r - v of the
    batch. Xu and Ding 2025, "Single-stream Policy Optimization", arXiv 2509.13232.

    A reward moves v by (r - v) / n, n = rho times the n before + 1. The paper's rho falls with the KL that the policy
    has moved since the prompt's last reward; here it falls with the optimizer updates since then. v of a new prompt is
    the mean reward of the batch, with n = 1 / (1 - least_memory).
    """

    compares: ClassVar[Literal["group", "batch"]] = "batch"
    tracks_prompts: ClassVar[bool] = True

    name: Literal["spo"] = "spo"
    """Name of the baseline."""
    half_life: Annotated[float, Gt(0)] = 100.0
    """Optimizer updates after which an old reward counts half."""
    least_memory: Annotated[float, Ge(0), Le(1)] = 0.875
    """Lower bound on rho."""
    most_memory: Annotated[float, Ge(0), Le(1)] = 0.96
    """Upper bound on rho."""

    def __post_init__(self) -> None:
        if not self.least_memory <= self.most_memory < 1:
            raise ValueError(
                f"advantage.least_memory is {self.least_memory} with advantage.most_memory={self.most_memory}; the "
                "first must be <= the second, and the second < 1"
            )

    def of(self, rewards: BatchRewards) -> Advantages:
        assert rewards.expected is not None
        expected = rewards.expected.copy()
        for places in parts(rewards.agents):
            known = expected[places]
            expected[places] = np.where(np.isnan(known), rewards.values[places].mean(), known)
        return of_parts(rewards.agents, rewards.values - expected, _standardised)

    def observe(self, seen: PromptValue | None, reward: float, *, update: int, start: float) -> PromptValue:
        value, weight, last = seen or PromptValue(start, 1 / (1 - self.least_memory), update)
        rho = float(np.clip(0.5 ** ((update - last) / self.half_life), self.least_memory, self.most_memory))
        weight = rho * weight + 1
        return PromptValue(value + (reward - value) / weight, weight, update)


def _standardised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return (values - values.mean()) / (values.std(ddof=1) + _EPSILON)


def _problem_of(advantage: Advantage) -> str:
    """What is wrong with a user's baseline before it has a batch; "" for nothing."""
    known = get_args(get_type_hints(Advantage)["compares"])[0]
    if advantage.compares not in get_args(known):
        return f"which has compares={advantage.compares!r}; use {' or '.join(map(repr, get_args(known)))}"
    return ""


AdvantageConfig = Annotated[
    Annotated[
        GRPO | DrGRPO | RLOO | ReinforcePlusPlus | ReinforcePlusPlusBaseline | BatchMean | Contrastive | SPO | GAE,
        Field(discriminator="name"),
    ],
    or_user_class(Advantage, key="advantage", problem_of=_problem_of),
]
