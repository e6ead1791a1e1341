"""Difference of trainer and engine logprobs: sums over tokens, by lag bucket and sign of the advantage.

d = current - behaviour logprob of a token, in nat. All results are sums or maxima over tokens, so that micro-batches
and ranks add up exactly. Quantiles are computed from a histogram with fixed bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from async_rl.metrics.registry import LAGS

SIGNS = ("negative", "zero", "positive")
COLUMNS = ("tokens", "k1", "k3", "abs", "f2", "f5", "chi2", "weight", "weight_squared", "entropy")
LOWEST, HIGHEST, PER_OCTAVE = -24, 6, 8  # |d| from 2^-24 to 2^6 nat; 8 bins per octave: a bin is 9 % wide
BINS = (HIGHEST - LOWEST) * PER_OCTAVE + 1  # the first bin includes smaller |d|, the last one larger |d|


def lag_buckets(lag: Tensor, pure_lag0: Tensor) -> Tensor:
    """Index into LAGS for each token, int64 [n].

    Lags (0, 0, 1, 2, 3, 9) with only the first token pure: (0, 1, 2, 3, 4, 4).

    Args:
        lag: int64 [n], staleness in optimizer updates.
        pure_lag0: bool [n]; see `async_rl.trainer.batch.training_batch`.
    """
    return torch.where(pure_lag0, 0, 1 + lag.long().clamp(0, len(LAGS) - 2))


def token_sums(
    *,
    current: Tensor,
    behaviour: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    lag_bucket: Tensor,
    extra: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Sums over n tokens, for the metrics in `async_rl.trainer.metrics`.

    A token with lag bucket 2 and negative advantage is counted at table[:, 2, 0].

    Args:
        current, behaviour: logprobs [n].
        entropy: [n], nat.
        advantages: [n].
        lag_bucket: int64 [n], index into LAGS.
        extra: further columns [n] of the table.

    Returns:
        table: float64 [columns, LAGS, SIGNS], sums of COLUMNS and `extra`.
        histogram: float64 [LAGS, BINS], number of tokens by |d|.
        abs_max: float64 [LAGS], the largest |d|, 0 without tokens.
    """
    d = (current.detach() - behaviour).double()
    size, excess = d.abs(), torch.expm1(d)  # expm1 keeps the digits of a small d
    weight = excess + 1
    columns = (
        torch.ones_like(d),
        -d,
        excess - d,
        size,
        size > math.log(2),
        size > math.log(5),
        excess.square(),
        weight,
        weight.square(),
        entropy.detach(),
        *extra.values(),
    )
    cell = lag_bucket * len(SIGNS) + advantages.sign().long() + 1
    cells = len(LAGS) * len(SIGNS)
    member = (cell.unsqueeze(1) == torch.arange(cells, device=d.device)).double()
    table = torch.stack([column.double() for column in columns]) @ member
    bins = ((size.log2() - LOWEST) * PER_OCTAVE).clamp(0, BINS - 1).long()
    histogram = d.new_zeros(len(LAGS) * BINS).scatter_add_(0, lag_bucket * BINS + bins, torch.ones_like(d))
    abs_max = d.new_zeros(len(LAGS)).scatter_reduce_(0, lag_bucket, size, "amax")
    return {
        "table": table.view(len(columns), len(LAGS), len(SIGNS)),
        "histogram": histogram.view(len(LAGS), BINS),
        "abs_max": abs_max,
    }


def quantile(histogram: Tensor, share: float, *, largest: float) -> float:
    """Upper bound on the `share` quantile of |d| in nat, at most 9 % too large; NaN without tokens.

    The bound is at least 2^-24. If the quantile is above 2^6, the bound is `largest`. 99 tokens with |d| = 0.1 and one
    with 1.0: the bound for share=0.99 is 0.1051.

    Args:
        histogram: float64 [BINS].
        share: 0..1.
        largest: the largest |d| of the tokens.
    """
    total = float(histogram.sum())
    if not total:
        return math.nan
    reached = int((histogram.cumsum(0) < math.ceil(share * total)).sum())
    if reached >= BINS - 1:
        return largest
    return min(largest, 2.0 ** (LOWEST + (reached + 1) / PER_OCTAVE))


def mismatch_metrics(table: Tensor, histogram: Tensor, *, abs_max: float) -> dict[str, float]:
    """Metrics of a set of tokens; NaN without tokens.

    Args:
        table: float64 [columns], sums of COLUMNS.
        histogram: float64 [BINS].
        abs_max: the largest |d|.
    """
    sums = dict(zip(COLUMNS, table.tolist(), strict=False))
    tokens = sums["tokens"]
    return {
        "mismatch/k1": share(sums["k1"], tokens),
        "mismatch/k3": share(sums["k3"], tokens),
        "mismatch/abs_mean": share(sums["abs"], tokens),
        "mismatch/abs_p99": quantile(histogram, 0.99, largest=abs_max),
        "mismatch/abs_max": abs_max if tokens else math.nan,
        "mismatch/f2": share(sums["f2"], tokens),
        "mismatch/f5": share(sums["f5"], tokens),
        "mismatch/chi2": share(sums["chi2"], tokens),
        "ess/token": share(sums["weight"] ** 2, tokens * sums["weight_squared"]),
    }


def share(part: float, whole: float) -> float:
    """part / whole; NaN if `whole` is 0."""
    return part / whole if whole else math.nan
