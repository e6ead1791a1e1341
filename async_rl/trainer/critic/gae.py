"""Generalized advantage estimation (GAE) over the sampled tokens of trajectories.

Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", arXiv 1506.02438.
Token i of a trajectory has the value V_i of the state before it: prompt, tool replies and tokens so far. With the
reward r_i of the token:

    delta_i  = r_i + gamma V_(i+1) - V_i
    A_i      = delta_i + gamma lam A_(i+1)
    R_i      = A_i + V_i

R_i is the target of the value model. Decisions:

- The tokens are those in the loss, in order: the sequences of a trajectory (resume_routing=split, forks) follow one
  another, and i + 1 is the next sampled token. Prompts and tool replies between the two are a part of its state.
- The reward of the trajectory comes with its last token. With loss.kl_in=reward each token also has its own penalty.
- A trajectory that ended is terminal: the value after its last token is 0. One that a token limit cut (LENGTH) is not:
  it continues with the value after the last token of its last sequence.
- Tokens that are too old for the loss (staleness.policy=mask) are left out, as tool replies are. They are at the front
  of a trajectory, and the advantage of a token depends on itself and later tokens only.

Values (0.5, 0.25) with the reward 1, gamma=1 and lam=0.5: the deltas are (-0.25, 0.75), the advantages
(0.125, 0.75) and the returns (0.625, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from agent_loop.bounds import bounded
from async_rl.trainer.batch.advantage import Advantage, Advantages, BatchRewards

_VARIANCE_EPSILON = 1e-8
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


@bounded("advantage")
class GAE(Advantage):
    """Advantages of tokens from the values of the critic; see `async_rl.trainer.critic.gae`. arXiv 1506.02438."""

    compares: ClassVar[Literal["group", "batch"]] = "batch"

    name: Literal["gae"] = "gae"
    """Name of the advantage."""
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """Discount of the next token."""
    lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """Weight of later tokens: 1 is the return minus the value, without bias of the critic; 0 looks one token ahead."""
    whiten: bool = True
    """Whether the advantages are whitened over the tokens in the loss of the batch: mean 0, variance 1."""

    def of(self, rewards: BatchRewards) -> Advantages:
        """Zeros, because the trainer ranks compute those of tokens from the values of their critic."""
        count = len(rewards.values)
        return Advantages(values=np.zeros(count, np.float32), informative=np.ones(count, np.bool_))


def batch_advantages(
    gae: GAE,
    values: Float64Array,
    *,
    tokens: Int64Array,
    trajectory: Int64Array,
    rewards: Float64Array,
    ends: Float64Array,
    truncated: Sequence[int],
    penalties: Float64Array | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Advantages, whitened if set, and returns float64 [N] of the tokens in the loss of a batch of S sequences.

    Args:
        gae: discount and weights.
        values: [N], value of the state before each token, one sequence after the other.
        tokens: [S], tokens in the loss of each sequence.
        trajectory: [S], ascending, number of its trajectory.
        rewards: [trajectories].
        ends: [S], value after the last token of each sequence.
        truncated: numbers of the trajectories that a token limit cut.
        penalties: [N], subtracted from the reward of each token; None for none.
    """
    count = len(rewards)
    counts = np.bincount(trajectory, weights=tokens, minlength=count).astype(np.int64)
    after, own = np.zeros(count), counts > 0
    for number in truncated:
        valued = np.flatnonzero((trajectory == number) & (tokens > 0))
        after[number] = ends[valued[-1]] if len(valued) else 0.0
    of_token = np.zeros(len(values)) if penalties is None else -penalties
    of_token[counts.cumsum()[own] - 1] += rewards[own]
    found = token_advantages(values, of_token, counts=counts, after=after, gamma=gae.gamma, lam=gae.lam)
    return (whitened(found) if gae.whiten else found), found + values


def token_advantages(
    values: Float64Array,
    rewards: Float64Array,
    *,
    counts: Int64Array,
    after: Float64Array,
    gamma: float,
    lam: float,
) -> Float64Array:
    """Advantages float64 [N] of the tokens of S trajectories, one trajectory after the other.

    Args:
        values: [N], value of the state before each token.
        rewards: [N], reward of each token.
        counts: [S], tokens of each trajectory; 0 is allowed.
        after: [S], value after the last token of each trajectory; 0 if it is terminal.
        gamma: discount.
        lam: weight of later tokens.
    """
    ends, own = counts.cumsum() - 1, counts > 0
    following = np.append(values[1:], 0.0)[: len(values)]
    following[ends[own]] = after[own]
    found = rewards + gamma * following - values
    order = np.argsort(-counts, kind="stable")
    for back in range(1, int(counts.max(initial=0))):
        at = ends[order[: int((counts > back).sum())]] - back
        found[at] += gamma * lam * found[at + 1]
    return found


def whitened(advantages: Float64Array) -> Float64Array:
    """Advantages [N] with mean 0 and sample variance 1; fewer than two are 0."""
    if len(advantages) < 2:
        return np.zeros_like(advantages)
    return (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + _VARIANCE_EPSILON)


def explained_variance(values: Float64Array, returns: Float64Array) -> float:
    """1 - Var(R - V) / Var(R): 1 for exact values, 0 for a constant; NaN if all returns are equal."""
    spread = returns.var() if len(returns) else 0.0
    return float(1.0 - (returns - values).var() / spread) if spread else float("nan")
