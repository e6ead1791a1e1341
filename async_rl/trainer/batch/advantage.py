"""Advantages: the reward of a trajectory relative to its prompt group or to the batch.

If several agents of a program are trained, the part of a rollout that one agent sampled is a separate trajectory here
and has the reward of that agent. Its advantage is relative to the same agent in the other rollouts.

The driver computes them from heads. If the KL is a part of the reward, the trainer ranks recompute them, because
only the trainer knows the KL of a token (`BatchRewards.with_kl`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agent_loop.bounds import bounded
from message_queue.heads import GroupHead

GroupAdvantageName = Literal["grpo", "dr_grpo", "rloo"]
AdvantageName = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
_EPSILON = 1e-6  # of GRPO, as in verl
_VARIANCE_EPSILON = 1e-8  # of REINFORCE++, as in verl and OpenRLHF
_SPREAD = 1e-6  # smaller reward differences count as equal


@bounded("advantage")
class AdvantageConfig:
    """How rewards become advantages.

    `mean` and `std` are over the trajectories of the prompt group. `token mean` and `token variance` are over the
    sampled tokens of the batch, and a token has the value of its trajectory. All are over one agent.

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """Advantages of the S trajectories of all groups, in order."""

    values: NDArray[np.float32]
    """float32 [S]."""
    informative: NDArray[np.bool_]
    """bool [S]; False if the rewards of its agent in the group (or batch) are all equal: it has no policy gradient."""

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
    """Rewards of the S trajectories of a batch that did not fail, in order, and how they become advantages.

    Two rollouts of a prompt. A planner has the rewards 1 and 0, and a critic 0.5 in the second only:

        values (1, 0, 0.5)    groups (0, 0, 1)    agents (1, 1, 0)
    """

    config: AdvantageConfig
    """How rewards become advantages."""
    values: NDArray[np.float64]
    """float64 [S], from the task."""
    groups: NDArray[np.int64]
    """int64 [S], number of the prompt group and agent: rewards of one number are relative to each other."""
    agents: NDArray[np.int64]
    """int64 [S], number of the agent."""
    sampled: NDArray[np.int64]
    """int64 [S], sampled tokens, including tokens that are not in the loss."""

    def advantages(self) -> Advantages:
        """Advantages of the trajectories."""
        match name := self.config.name:
            case "reinforce_plus_plus":
                return _over_tokens(self.values, self.sampled, of=self.agents)
            case "reinforce_plus_plus_baseline":
                centred = self.values.copy()
                for places in _parts(self.groups):
                    rewards = self.values[places]
                    centred[places] = rewards - rewards.mean() if has_spread(rewards) else 0.0
                return _over_tokens(centred, self.sampled, of=self.agents)
            case _:
                return _of_parts(self.groups, lambda places: group_advantages(self.values[places], name))

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
            of=np.concatenate([self.agents[trajectory], self.agents]),
        ).values
        return TokenAdvantages(tokens=found[: len(kl)], trajectories=found[len(kl) :], penalties=penalties)


def batch_rewards(groups: Sequence[GroupHead], config: AdvantageConfig) -> BatchRewards:
    """Rewards of the trajectories of `groups` that did not fail, in the order of `training_batch`."""
    flat = [
        (number, agent, t.reward_of(agent), sum(tokens for i in of_agent for _, tokens in t.sequences[i].spans))
        for number, group in enumerate(groups)
        for t in group.trajectories
        for agent, of_agent in t.trained.items()
    ]
    names = {agent: number for number, agent in enumerate(sorted({agent for _, agent, _, _ in flat}))}
    agents = np.array([names[agent] for _, agent, _, _ in flat], np.int64)
    return BatchRewards(
        config=config,
        values=np.array([reward for _, _, reward, _ in flat], np.float64),
        groups=np.array([number for number, _, _, _ in flat], np.int64) * len(names) + agents,
        agents=agents,
        sampled=np.array([tokens for _, _, _, tokens in flat], np.int64),
    )


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


def _over_tokens(values: NDArray[np.float64], tokens: NDArray[np.int64], *, of: NDArray[np.int64]) -> Advantages:
    """Whiten `values` [S] of trajectories with `tokens` [S] sampled tokens, for each agent `of` [S] on its own."""
    return _of_parts(of, lambda places: _whitened(values[places], tokens[places]))


def _whitened(values: NDArray[np.float64], tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], bool]:
    """Whitened values float32 [n], and False if all values [n] with tokens are equal.

    Values (1, 0) with (3, 1) tokens have the token mean 0.75 and the token variance 0.25, so they become (0.5, -1.5).
    """
    total = int(tokens.sum())
    if total < 2 or not has_spread(values[tokens > 0]):
        return np.zeros(len(values), np.float32), False
    centred = values - (tokens @ values) / total
    variance = (tokens @ centred**2) / (total - 1)
    return (centred / np.sqrt(variance + _VARIANCE_EPSILON)).astype(np.float32), True


def _of_parts(
    labels: NDArray[np.int64], advantages: Callable[[NDArray[np.int64]], tuple[NDArray[np.float32], bool]]
) -> Advantages:
    """Advantages of each part on its own, from its places."""
    values, informative = np.zeros(len(labels), np.float32), np.zeros(len(labels), np.bool_)
    for places in _parts(labels):
        values[places], informative[places] = advantages(places)
    return Advantages(values=values, informative=informative)


def _parts(labels: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Places of each label. Labels (1, 0, 1): [1] and [0, 2]."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def has_spread(rewards: NDArray[np.float64]) -> bool:
    """Whether rewards [n] differ, so that their advantages are not all 0."""
    return len(rewards) > 1 and float(np.ptp(rewards)) >= _SPREAD
