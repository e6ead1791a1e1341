"""Advantages: the reward of a trajectory relative to its prompt group, to the batch, or to what its prompt is worth.

If several agents of a program are trained, the part of a rollout that one agent sampled is a separate trajectory here
and has the reward of that agent. Its advantage is relative to the same agent in the other rollouts.

`baselines` has the classes for `advantage.name`. Every std and variance is the sample estimate, with n - 1 in the
denominator. The batch is the result of one `take` from the queue before it is split into mini-batches. It excludes
failed rollouts.

The driver computes them from heads. If the KL is a part of the reward, the trainer ranks recompute them, because
only the trainer knows the KL of a token (`BatchRewards.with_kl`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent_loop.bounds import bounded
from message_queue.heads import GroupHead

_VARIANCE_EPSILON = 1e-8  # of REINFORCE++, as in verl and OpenRLHF
MAX_PROMPTS = 1 << 17  # about 10 MB in a checkpoint
_SPREAD = 1e-6  # smaller reward differences count as equal


class PromptValue(NamedTuple):
    """Expected reward of a prompt and agent; see `Advantage.observe`."""

    value: float
    """The estimate."""
    weight: float
    """Number of rewards in it; older ones count less."""
    update: int
    """Optimizer updates of the weights that were trained on the last one."""


@bounded("advantage")
class Advantage(ABC):
    """Base of the baselines.

    `mean` and `std` are over the trajectories of the prompt group. `token mean` and `token variance` are over the
    sampled tokens of the batch, and a token has the value of its trajectory. All are over one agent.
    """

    compares: ClassVar[Literal["group", "batch"]] = "group"
    """Rewards that it compares. With `batch` a group may be a single trajectory."""
    tracks_prompts: ClassVar[bool] = False
    """Whether it needs `BatchRewards.expected`, which the run then keeps by prompt, also in its checkpoints."""

    name: str = ""
    """Name of the baseline, or FILE.py:CLASS or MODULE:CLASS of a user's one."""

    @abstractmethod
    def of(self, rewards: BatchRewards) -> Advantages:
        """Advantages of the trajectories."""

    def with_kl(
        self, rewards: BatchRewards, kl: NDArray[np.float64], *, trajectory: NDArray[np.int64], coefficient: float
    ) -> TokenAdvantages:
        """See `BatchRewards.with_kl`; baseline and normalisation follow the penalty."""
        of_trajectories = np.bincount(trajectory, weights=kl, minlength=len(rewards.values))
        found = replace(rewards, values=rewards.values - coefficient * of_trajectories).advantages().values
        return TokenAdvantages(tokens=found[trajectory], trajectories=found)

    def observe(self, seen: PromptValue | None, reward: float, *, update: int, start: float) -> PromptValue:
        """The expected reward of a prompt after one more reward; here the mean of all.

        Args:
            seen: estimate so far; None for a new prompt.
            reward: of a trajectory of a batch that is trained.
            update: optimizer updates of the weights at the start of that batch.
            start: estimate of a new prompt, the mean reward of the batch.
        """
        value, weight, _ = seen or PromptValue(start, 0.0, update)
        return PromptValue(value + (reward - value) / (weight + 1), weight + 1, update)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRewards:
    """Rewards of the S trajectories of a batch that did not fail, in order, and how they become advantages.

    Two rollouts of a prompt. A planner has the rewards 1 and 0, and a critic 0.5 in the second only:

        values (1, 0, 0.5)    groups (0, 0, 1)    agents (1, 1, 0)
    """

    config: Advantage
    """How rewards become advantages."""
    values: NDArray[np.float64]
    """float64 [S], from the task."""
    groups: NDArray[np.int64]
    """int64 [S], number of the prompt group and agent: rewards of one number are relative to each other."""
    agents: NDArray[np.int64]
    """int64 [S], number of the agent."""
    sampled: NDArray[np.int64]
    """int64 [S], sampled tokens, including tokens that are not in the loss."""
    expected: NDArray[np.float64] | None = None
    """float64 [S], expected reward of the prompt and agent before the batch, NaN if it is new; None if
    `Advantage.tracks_prompts` is False."""

    def advantages(self) -> Advantages:
        """Advantages of the trajectories.

        Raises:
            ValueError: the baseline did not return a finite advantage of each trajectory.
        """
        found: Any = self.config.of(self)
        if not isinstance(found, Advantages) or found.values.shape != self.values.shape:
            what = f"shape {found.values.shape}" if isinstance(found, Advantages) else f"{found!r}"
            raise ValueError(
                f"the method of of {self.config.name or type(self.config).__name__} returned {what} for "
                f"{len(self.values)} trajectories; return Advantages with a value of each"
            )
        if not np.isfinite(found.values).all():
            worst = int(np.argmin(np.isfinite(found.values)))
            raise ValueError(
                f"the method of of {self.config.name or type(self.config).__name__} returned {found.values[worst]} for "
                f"the trajectory with reward {self.values[worst]:g}; return finite values"
            )
        return found

    def with_kl(self, kl: NDArray[np.float64], *, trajectory: NDArray[np.int64], coefficient: float) -> TokenAdvantages:
        """Advantages with the penalty coefficient * KL in the reward, as in verl.

        The reward of a trajectory is r minus the penalties of its tokens; `ReinforcePlusPlus` has a reward for each
        token.

        Rewards (1, 0), KL (0.2, 0.4) and (0.1), coefficient 0.5: the penalties are 0.3 and 0.05. With dr_grpo the
        rewards (0.7, -0.05) give the advantages 0.375, 0.375 and -0.375. With reinforce_plus_plus the returns 0.7, 0.8
        and -0.05 are whitened.

        Args:
            kl: float64 [N], log(proximal / reference) of each token in the loss, in the order of the batch.
            trajectory: int64 [N], ascending, trajectory of each token.
            coefficient: factor of the KL.
        """
        return self.config.with_kl(self, kl, trajectory=trajectory, coefficient=coefficient)


class PromptValues:
    """Expected reward of each prompt and agent, which the baseline of a run keeps; exact after a restart.

    Of more than MAX_PROMPTS, those without a reward for the longest time are forgotten.

    Args:
        config: baseline with `tracks_prompts`.
        state: `state` of the run before.
    """

    def __init__(self, config: Advantage, state: Mapping[str, PromptValue]) -> None:
        self._config = config
        self.state: dict[str, PromptValue] = dict(state)

    def expected(self, groups: Sequence[GroupHead], keys: Sequence[str]) -> list[dict[str, float]]:
        """Agent -> expected reward, for each group [G]; without the agents of new prompts.

        Args:
            groups: [G].
            keys: [G], name of the prompt of each group, equal for equal prompts.
        """
        return [
            {agent: self.state[name].value for agent in _agents(head) if (name := f"{key}/{agent}") in self.state}
            for head, key in zip(groups, keys, strict=True)
        ]

    def observe(self, groups: Sequence[GroupHead], keys: Sequence[str], *, update: int) -> None:
        """Take in the rewards of a batch, in the order of the groups' ids.

        Args:
            groups: [G].
            keys: [G], as in `expected`.
            update: optimizer updates of the weights at the start of the batch.
        """
        seen = [
            (f"{key}/{agent}", agent, t.reward_of(agent))
            for head, key in sorted(zip(groups, keys, strict=True), key=lambda pair: pair[0].group)
            for t in head.trajectories
            for agent in t.trained
        ]
        start = {
            agent: float(np.mean([reward for _, other, reward in seen if other == agent]))
            for agent in {agent for _, agent, _ in seen}
        }
        for name, agent, reward in seen:
            known = self.state.pop(name, None)  # the newest are at the end
            self.state[name] = self._config.observe(known, reward, update=update, start=start[agent])
        for name in list(itertools.islice(self.state, max(0, len(self.state) - MAX_PROMPTS))):
            del self.state[name]


def _agents(head: GroupHead) -> set[str]:
    return {agent for t in head.trajectories for agent in t.trained}


def batch_rewards(
    groups: Sequence[GroupHead], config: Advantage, *, expected: Sequence[Mapping[str, float]] | None = None
) -> BatchRewards:
    """Rewards of the trajectories of `groups` that did not fail, in the order of `training_batch`.

    Args:
        groups: [G].
        config: how rewards become advantages.
        expected: [G], see `PromptValues.expected`; None if `config` tracks no prompts.
    """
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
        expected=None
        if expected is None
        else np.array([expected[number].get(agent, np.nan) for number, agent, _, _ in flat], np.float64),
    )


def over_tokens(values: NDArray[np.float64], tokens: NDArray[np.int64], *, of: NDArray[np.int64]) -> Advantages:
    """Whiten `values` [S] of trajectories with `tokens` [S] sampled tokens, for each agent `of` [S] on its own."""
    found, informative = np.zeros(len(values), np.float32), np.zeros(len(values), np.bool_)
    for places in parts(of):
        found[places], informative[places] = _whitened(values[places], tokens[places])
    return Advantages(values=found, informative=informative)


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


def of_parts(
    labels: NDArray[np.int64],
    values: NDArray[np.float64],
    advantages: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> Advantages:
    """Advantages of the values [S] of each label on its own; 0, and not informative, where these do not differ."""
    found, informative = np.zeros(len(values), np.float32), np.zeros(len(values), np.bool_)
    for places in parts(labels):
        if has_spread(values[places]):
            found[places], informative[places] = advantages(values[places]), True
    return Advantages(values=found, informative=informative)


def parts(labels: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Places of each label. Labels (1, 0, 1): [1] and [0, 2]."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(labels) else []


def has_spread(rewards: NDArray[np.float64]) -> bool:
    """Whether rewards [n] differ, so that their advantages are not all 0."""
    return len(rewards) > 1 and float(np.ptp(rewards)) >= _SPREAD
