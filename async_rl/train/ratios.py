"""One parametrised importance weight: a bounded ratio of two named logprobs. Every policy loss is a product of these.

    behaviour  of the engine that sampled            (no gradient)
    proximal   of the trainer before the batch       (no gradient)
    current    of the weights being trained          (gradient)
    reference  of a frozen model, for the KL term    (no gradient)

`CURRENT / BEHAVIOUR` is the ratio of a token, `.product` that of its whole trajectory and `.geometric` the geometric
mean over its tokens. A weight is such a ratio, what becomes of it outside an interval, and whether it has a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

SourceName = Literal["behaviour", "proximal", "current"]
Level = Literal["token", "product", "geometric"]
FilterName = Literal["clip", "truncate", "mask"]
_LARGEST_LOG = 80.0  # its exponential is finite in float32, and beyond every bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """One entry per token, all of one shape. reference: None without a KL term."""

    current: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectories:
    """Which trajectory of the micro-batch each of n tokens is of.

    index: int64 [n], below count. group: ranks that hold further tokens of the same trajectories; None for no others.
    """

    index: Tensor
    count: int
    group: dist.ProcessGroup | None = None

    def sums(self, values: Tensor) -> Tensor:
        """float64 [2, count]: sum of `values` [n] and number of tokens of each trajectory, over all ranks."""
        both = torch.stack([values.detach().double(), torch.ones_like(values, dtype=torch.float64)])
        sums = both.new_zeros(2, self.count).index_add(1, self.index, both)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(sums, group=self.group)
        return sums


@dataclass(frozen=True, slots=True)
class Source:
    """Logprobs by where they come from."""

    name: SourceName

    def __truediv__(self, denominator: Source) -> Ratio:
        return Ratio(self, denominator)


BEHAVIOUR, PROXIMAL, CURRENT = Source("behaviour"), Source("proximal"), Source("current")


@dataclass(frozen=True, slots=True)
class Ratio:
    """numerator / denominator of a token (`token`), of its whole trajectory (`product`), or its geometric mean."""

    numerator: Source
    denominator: Source
    level: Level = "token"

    @property
    def product(self) -> Ratio:
        """Of the trajectory: the product over its tokens."""
        return replace(self, level="product")

    @property
    def geometric(self) -> Ratio:
        """Of the trajectory: the geometric mean over its tokens, which its length does not drive to 0 or infinity."""
        return replace(self, level="geometric")

    def log(self, logprobs: TokenLogprobs, trajectories: Trajectories | None) -> Tensor:
        """[n] log ratio of each token.

        Of a trajectory's ratio each token carries the gradient through its own logprob. Summed over the tokens of a
        trajectory, which share one advantage and one token weight, this is the gradient of its geometric mean (Zheng
        et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071, section 4.3).

        Raises:
            ValueError: a trajectory's ratio without `trajectories`.
        """
        log_ratio: Tensor = getattr(logprobs, self.numerator.name) - getattr(logprobs, self.denominator.name)
        if self.level == "token":
            return log_ratio
        if trajectories is None:
            raise ValueError(
                f"the {self.level} of {self.numerator.name} / {self.denominator.name} is over trajectories, but the "
                "loss was not told which token is of which; give it `trajectories`"
            )
        total, tokens = trajectories.sums(log_ratio)
        shared = total if self.level == "product" else total / tokens.clamp(min=1)
        return shared[trajectories.index].to(log_ratio.dtype) + (log_ratio - log_ratio.detach())


@dataclass(frozen=True, slots=True)
class Interval:
    """Ratios from low to high, both included."""

    low: float = 0.0
    high: float = math.inf

    def excludes(self, ratio: Tensor) -> Tensor:
        """bool of the shape of `ratio`."""
        return (ratio < self.low) | (ratio > self.high)


ANY = Interval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A ratio, bounded.

    positive, negative: where the ratio counts as it is, for tokens of advantage >= 0 and < 0.
    outside: what it becomes elsewhere: the nearest edge of the interval, or zero, which drops the token.
    inside: the ratio itself, or one: then the weight only keeps or drops.
    gradient: whether the ratio carries that of the current logprob; beyond an edge there is none.
    filter: the name under which it reports the tokens it touches; None for a weight without bounds.
    """

    ratio: Ratio
    filter: FilterName | None
    positive: Interval = ANY
    negative: Interval = ANY
    outside: Literal["edge", "zero"] = "edge"
    inside: Literal["ratio", "one"] = "ratio"
    gradient: bool = False

    def __call__(
        self, logprobs: TokenLogprobs, *, advantages: Tensor, trajectories: Trajectories | None = None
    ) -> tuple[Tensor, Tensor]:
        """[n] weight of each token, and bool [n]: the bound changed it and its advantage is not zero."""
        log_ratio = self.ratio.log(logprobs, trajectories)
        ratio = torch.exp((log_ratio if self.gradient else log_ratio.detach()).clamp(max=_LARGEST_LOG))
        harmful = advantages < 0
        excluded = self.positive.excludes(ratio)
        if self.positive != self.negative:
            excluded = torch.where(harmful, self.negative.excludes(ratio), excluded)
        weight = ratio if self.inside == "ratio" else torch.ones_like(ratio)
        if self.outside == "zero":
            weight = weight.masked_fill(excluded, 0.0)
        elif self.positive == self.negative:
            weight = weight.clamp(self.positive.low, self.positive.high)
        else:
            above, below = (weight.clamp(i.low, i.high) for i in (self.positive, self.negative))
            weight = torch.where(harmful, below, above)
        return weight, excluded & (advantages != 0)


def unbounded(ratio: Ratio) -> Weight:
    """r, with gradient."""
    return Weight(ratio=ratio, filter=None, gradient=True)


def pessimistic_clip(ratio: Ratio, *, low: float, high: float, ceiling: float | None = None) -> Weight:
    """The r' with r' A = min(r A, clip(r, low, high) A), with gradient; for A < 0 also r' <= ceiling (dual clip)."""
    return Weight(
        ratio=ratio,
        filter="clip",
        positive=Interval(0.0, high),
        negative=Interval(low, math.inf if ceiling is None else ceiling),
        gradient=True,
    )


def clip(ratio: Ratio, *, low: float, high: float) -> Weight:
    """clip(r, low, high), no gradient."""
    within = Interval(low, high)
    return Weight(ratio=ratio, filter="clip", positive=within, negative=within)


def truncate(ratio: Ratio, *, cap: float) -> Weight:
    """min(r, cap), no gradient."""
    within = Interval(0.0, cap)
    return Weight(ratio=ratio, filter="truncate", positive=within, negative=within)


def mask(ratio: Ratio, *, low: float = 0.0, high: float) -> Weight:
    """r in [low, high], 0 elsewhere, no gradient."""
    within = Interval(low, high)
    return Weight(ratio=ratio, filter="mask", positive=within, negative=within, outside="zero")


def keep(ratio: Ratio, *, positive: Interval, negative: Interval) -> Weight:
    """1 in the interval that the sign of the advantage chooses, 0 elsewhere."""
    return Weight(ratio=ratio, filter="mask", positive=positive, negative=negative, outside="zero", inside="one")


def second_moment_bound(log_ratios: Tensor, *, limit: float) -> float:
    """The |log r| up to which tokens are kept, so that the mean of (log r)^2 over those kept is at most `limit`.

    As many are kept as can be; equal ones go together. Infinite where all are kept. Zheng et al. 2025, "Prosperity
    before Collapse" (M2PO), arXiv 2510.01161, algorithm 1, which takes out the largest until the mean is low enough.

    Args:
        log_ratios: [n], of all tokens of an update.
    """
    moments = (log_ratios.double() ** 2).sort().values
    means = moments.cumsum(0) / torch.arange(1, len(moments) + 1, dtype=torch.float64, device=moments.device)
    kept = int((means <= limit).sum())  # the running mean of rising values rises
    if kept == len(moments):
        return math.inf
    first_out = moments[kept]
    kept = int((moments < first_out).sum())
    last_in = moments[kept - 1].item() if kept else 0.0
    return (math.sqrt(last_in) + math.sqrt(first_out.item())) / 2
