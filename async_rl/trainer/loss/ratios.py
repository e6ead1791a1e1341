"""Corrections of a token: a statistic of named logprobs, its aggregate over the trajectory, and a gate on the result.

The policy losses are products of such weights.

    statistic  ratio, `binary_kl`, `total_variation`, `behaviour_rank`
    aggregate  of the token; `.product` or `.geometric` mean of a ratio, `.mean` of a divergence over the trajectory
    gate       `clip`, `truncate`, `mask` or `keep` by an interval, that may differ by the sign of the advantage

The logprobs are

    behaviour  of the engine that sampled            (no gradient)
    old        of the trainer with the weights of    (no gradient)
               the version that sampled
    proximal   of the trainer before the batch       (no gradient)
    current    of the weights being trained          (gradient)
    reference  of a frozen model, for the KL term    (no gradient)

`CURRENT / BEHAVIOUR` is the ratio of a token, `.product` the product over its trajectory and `.geometric` the geometric
mean over its trajectory. Log ratios (0.1, 0.3) of one trajectory: product (0.4, 0.4), geometric (0.2, 0.2).

A divergence compares two policies by the sampled token alone, as one of two outcomes: this token, or another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

SourceName = Literal["behaviour", "old", "proximal", "current"]
Level = Literal["token", "product", "geometric"]
FilterName = Literal["clip", "truncate", "mask"]
_LARGEST_LOG = 80.0  # exp of this is finite in float32 and larger than any bound
_LARGEST_LOGPROB = -1e-7  # about that of the largest probability below 1 in float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Logprobs of n tokens; see the top of this module."""

    current: Tensor
    """float32 [n], with gradient."""
    behaviour: Tensor
    """float32 [n]."""
    proximal: Tensor
    """float32 [n]."""
    reference: Tensor | None = None
    """float32 [n]; None without a KL term."""
    old: Tensor | None = None
    """float32 [n]; None if they were not computed."""
    behaviour_rank: Tensor | None = None
    """float64 [n], share of the tokens in the loss of the same trajectory that have a lower behaviour logprob; of equal
    ones the first is the lower. None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """Trajectories of the n tokens of a micro-batch."""

    index: Tensor
    """int64 [n], trajectory of each token, below `count`."""
    count: int
    """Number of trajectories in the micro-batch."""
    group: dist.ProcessGroup | None = None
    """Ranks with further tokens of the same trajectories; None if this rank has all tokens."""

    def sums(self, values: Tensor) -> Tensor:
        """Sum of `values` [n] and number of tokens per trajectory over the ranks of `group`, float64 [2, count].

        Values (0.1, 0.3, 0) with index (0, 0, 1): [[0.4, 0], [2, 1]].
        """
        import torch
        import torch.distributed as dist

        both = torch.stack([values.detach().double(), torch.ones_like(values, dtype=torch.float64)])
        sums = both.new_zeros(2, self.count).index_add(1, self.index, both)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(sums, group=self.group)
        return sums


@dataclass(frozen=True, slots=True)
class Source:
    """A named logprob; dividing two sources gives a Ratio."""

    name: SourceName
    """Field of TokenLogprobs."""

    def __truediv__(self, denominator: Source) -> Ratio:
        return Ratio(self, denominator)


BEHAVIOUR, OLD, PROXIMAL, CURRENT = Source("behaviour"), Source("old"), Source("proximal"), Source("current")


@dataclass(frozen=True, slots=True)
class Ratio:
    """numerator / denominator of a token, or its product or geometric mean over a trajectory."""

    numerator: Source
    """Logprob of the numerator."""
    denominator: Source
    """Logprob of the denominator."""
    level: Level = "token"
    """`token`, or `product` or `geometric` mean over the trajectory."""

    @property
    def product(self) -> Ratio:
        """The product over the trajectory."""
        return replace(self, level="product")

    @property
    def geometric(self) -> Ratio:
        """The geometric mean over the trajectory; it does not grow or vanish with the length."""
        return replace(self, level="geometric")

    def log(self, logprobs: TokenLogprobs, trajectories: Trajectories | None) -> Tensor:
        """Log ratio [n] of each token.

        For the ratio of a trajectory, each token has the gradient of its own logprob. The tokens of a trajectory share
        one advantage and one token weight, so the sum of these gradients is the gradient of the geometric mean (Zheng
        et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071, section 4.3).

        Raises:
            ValueError: the ratio is over trajectories, but `trajectories` is None.
        """
        log_ratio: Tensor = getattr(logprobs, self.numerator.name) - getattr(logprobs, self.denominator.name)
        if self.level == "token":
            return log_ratio
        if trajectories is None:
            raise ValueError(
                f"the {self.level} of {self.numerator.name} / {self.denominator.name} is over trajectories, but "
                "`trajectories` is None; pass the trajectory of each token"
            )
        total, tokens = trajectories.sums(log_ratio)
        shared = total if self.level == "product" else total / tokens.clamp(min=1)
        return shared[trajectories.index].to(log_ratio.dtype) + (log_ratio - log_ratio.detach())

    def value(self, logprobs: TokenLogprobs, trajectories: Trajectories | None, *, gradient: bool = False) -> Tensor:
        """The ratio [n] of each token; see `log`."""
        import torch

        log_ratio = self.log(logprobs, trajectories)
        return torch.exp((log_ratio if gradient else log_ratio.detach()).clamp(max=_LARGEST_LOG))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Distance of two policies in the two outcomes "the sampled token" and "another token", without gradient."""

    kind: Literal["binary_kl", "total_variation"]
    """`binary_kl`: p log(p / q) + (1 - p) log((1 - p) / (1 - q)), in nat. `total_variation`: |p - q|."""
    p: Source
    """Policy whose expectation it is."""
    q: Source
    """The other policy."""
    level: Literal["token", "mean"] = "token"
    """Of the token, or mean over the trajectory."""
    signed: bool = False
    """Whether it is negative if q < p: the token has become less likely."""

    @property
    def mean(self) -> Divergence:
        """The mean over the trajectory."""
        return replace(self, level="mean")

    def value(self, logprobs: TokenLogprobs, trajectories: Trajectories | None, *, gradient: bool = False) -> Tensor:
        """The divergence float64 [n] of each token. p = 0.5 and q = 0.25: binary_kl 0.144, or -0.144 if signed.

        It is computed in float64, because the terms of the KL nearly cancel if p and q are close.

        Raises:
            ValueError: it is over trajectories, but `trajectories` is None.
        """
        import torch

        p, q = (
            getattr(logprobs, source.name).detach().double().clamp(max=_LARGEST_LOGPROB) for source in (self.p, self.q)
        )
        if self.kind == "total_variation":
            found = (p.exp() - q.exp()).abs()
        else:
            other_p, other_q = -torch.expm1(p), -torch.expm1(q)
            found = (p.exp() * (p - q) + other_p * (other_p.log() - other_q.log())).clamp(min=0.0)
        if self.signed:
            found = found * torch.where(q < p, -1.0, 1.0)
        if self.level == "mean":
            if trajectories is None:
                raise ValueError(f"the mean of {self.kind} is over trajectories, but `trajectories` is None; pass them")
            total, tokens = trajectories.sums(found)
            found = (total / tokens.clamp(min=1))[trajectories.index]
        return found


@dataclass(frozen=True, slots=True)
class BehaviourRank:
    """`TokenLogprobs.behaviour_rank` as statistic: 0 for the token that its engine found least likely."""

    level: Literal["trajectory"] = "trajectory"
    """It compares tokens of a trajectory."""

    def value(self, logprobs: TokenLogprobs, trajectories: Trajectories | None, *, gradient: bool = False) -> Tensor:
        """The rank [n] of each token.

        Raises:
            ValueError: it is not known.
        """
        if logprobs.behaviour_rank is None:
            raise ValueError("TokenLogprobs.behaviour_rank is None, and the loss compares it; pass it")
        return logprobs.behaviour_rank


Statistic = Ratio | Divergence | BehaviourRank


def binary_kl(p: Source, q: Source) -> Divergence:
    """KL(p || q) of the sampled token against all others."""
    return Divergence("binary_kl", p, q)


def total_variation(p: Source, q: Source) -> Divergence:
    """|p - q| of the sampled token."""
    return Divergence("total_variation", p, q)


def sources_of(statistic: Statistic) -> tuple[Source, ...]:
    """Logprobs that a statistic compares."""
    match statistic:
        case Ratio():
            return statistic.numerator, statistic.denominator
        case Divergence():
            return statistic.p, statistic.q
        case BehaviourRank():
            return (BEHAVIOUR,)


class Interval(NamedTuple):
    """Values from low to high, both included."""

    low: float = 0.0
    """Lower bound."""
    high: float = math.inf
    """Upper bound."""


ANY = Interval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A statistic with a gate.

    `pessimistic_clip` to 0.8 .. 1.28: a ratio of 1.5 becomes 1.28 if the advantage is positive and remains 1.5 if it is
    negative; a ratio of 0.5 remains 0.5 if the advantage is positive and becomes 0.8 if it is negative.
    """

    statistic: Statistic
    """The statistic of each token, or of its trajectory."""
    filter: FilterName | None
    """Name of the metric that counts changed tokens; None for a weight without bounds."""
    positive: Interval = ANY
    """Interval of unchanged values if the advantage is >= 0."""
    negative: Interval = ANY
    """Interval of unchanged values if the advantage is < 0."""
    outside: Literal["edge", "zero"] = "edge"
    """Weight outside the interval: its nearest edge, or zero to drop the token."""
    inside: Literal["value", "one"] = "value"
    """Weight inside the interval: the value, or one for a weight that only keeps or drops."""
    gradient: bool = False
    """Whether the ratio has the gradient of the current logprob; there is none outside the interval."""

    def __call__(
        self, logprobs: TokenLogprobs, *, advantages: Tensor, trajectories: Trajectories | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weight [n] of each token, and bool [n], whether a bound changed it and the advantage is not zero."""
        import torch

        value = self.statistic.value(logprobs, trajectories, gradient=self.gradient)
        low, high = (
            torch.where(advantages < 0, *(value.new_tensor(bound) for bound in bounds))
            for bounds in zip(self.negative, self.positive, strict=True)
        )
        excluded = (value < low) | (value > high)
        weight = value if self.inside == "value" else torch.ones_like(value)
        weight = weight.masked_fill(excluded, 0.0) if self.outside == "zero" else weight.clamp(low, high)
        return weight.to(logprobs.current.dtype), excluded & (advantages != 0)


def unbounded(ratio: Ratio, *, gradient: bool = True) -> Weight:
    """r without bounds."""
    return Weight(statistic=ratio, filter=None, gradient=gradient)


def pessimistic_clip(ratio: Ratio, *, low: float, high: float, ceiling: float | None = None) -> Weight:
    """The weight r' with r' A = min(r A, clip(r, low, high) A), with gradient; if A < 0 also r' <= ceiling (dual clip).

    `Weight` has an example.
    """
    return Weight(
        statistic=ratio,
        filter="clip",
        positive=Interval(0.0, high),
        negative=Interval(low, math.inf if ceiling is None else ceiling),
        gradient=True,
    )


def clip(ratio: Ratio, *, low: float, high: float) -> Weight:
    """clip(r, low, high), no gradient."""
    within = Interval(low, high)
    return Weight(statistic=ratio, filter="clip", positive=within, negative=within)


def truncate(ratio: Ratio, *, cap: float) -> Weight:
    """min(r, cap), no gradient."""
    within = Interval(0.0, cap)
    return Weight(statistic=ratio, filter="truncate", positive=within, negative=within)


def mask(ratio: Ratio, *, low: float = 0.0, high: float) -> Weight:
    """r inside [low, high], 0 outside, no gradient."""
    within = Interval(low, high)
    return Weight(statistic=ratio, filter="mask", positive=within, negative=within, outside="zero")


def keep(statistic: Statistic, *, positive: Interval, negative: Interval) -> Weight:
    """1 inside the interval for the sign of the advantage, 0 outside."""
    return Weight(
        statistic=statistic, filter="mask", positive=positive, negative=negative, outside="zero", inside="one"
    )


def second_moment_bound(log_ratios: Tensor, *, limit: float) -> float:
    """The bound b such that the mean of (log r)^2 over the tokens with |log r| < b is at most `limit`.

    As many tokens as possible are kept; tokens with equal |log r| are kept or dropped together. The bound is infinite
    if all tokens are kept. Log ratios (0.1, -0.5, 0.2) with limit=0.04: the squares are 0.01, 0.04 and 0.25, the first
    two have the mean 0.025, and the bound is (0.2 + 0.5) / 2 = 0.35.

    Zheng et al. 2025, "Prosperity before Collapse" (M2PO), arXiv 2510.01161, algorithm 1: it removes the largest
    until the mean is low enough.

    Args:
        log_ratios: [n], of all tokens of an update, in nat.
        limit: in nat^2.
    """
    import torch

    moments = (log_ratios.double() ** 2).sort().values
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1, dtype=torch.float64, device=moments.device)
    kept = int((means <= limit).sum())  # the running mean of ascending values ascends
    if kept == len(moments):
        return math.inf
    first_out = moments[kept]
    kept = int((moments < first_out).sum())
    last_in = moments[kept - 1].item() if kept else 0.0
    return (math.sqrt(last_in) + math.sqrt(first_out.item())) / 2
