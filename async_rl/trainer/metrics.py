"""Sums over the tokens and routing rows of micro-batches, and the metrics of a train step computed from these sums.

The mismatch is the difference d = current - behaviour logprob of a token, in nat, by lag bucket and sign of the
advantage. All results are sums or maxima over tokens, so that micro-batches and ranks add up exactly. Quantiles are
computed from a histogram with fixed bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from async_rl.metrics.registry import LAGS, of_layer
from async_rl.trainer.loss.distillation import SCORED, SUMS, teacher_metrics
from async_rl.trainer.mismatch import k3_of
from async_rl.trainer.router_replay import ROUTING_SUMS

SIGNS = ("negative", "zero", "positive")
COLUMNS = ("tokens", "k1", "k3", "abs", "f2", "f5", "chi2", "weight", "weight_squared", "entropy")
LOWEST, HIGHEST, PER_OCTAVE = -24, 6, 8  # |d| from 2^-24 to 2^6 nat; 8 bins per octave: a bin is 9 % wide
BINS = (HIGHEST - LOWEST) * PER_OCTAVE + 1  # the first bin includes smaller |d|, the last one larger |d|
_CUTS = {
    "": (slice(None), slice(None)),
    **{sign: (slice(None), SIGNS.index(sign)) for sign in ("positive", "negative")},
    **{lag: (i, slice(None)) for i, lag in enumerate(LAGS)},
}
"""Ending of a metric's key -> its part of a column [LAGS, SIGNS] of the table."""


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
    """Sums over n tokens, for `TokenSums`.

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


OLD_COLUMNS = ("old_k3", "old_exact", "old_k3_inexact", "old_known", "old_movement")


def old_columns(old: Tensor, *, known: Tensor, exact: Tensor, current: Tensor, behaviour: Tensor) -> dict[str, Tensor]:
    """Columns [n] of the table for old logprobs, by OLD_COLUMNS; k3 as in `mismatch/k3`.

    Args:
        old, current, behaviour: [n].
        known: bool [n], whether `old` was computed with the weights of the token's version.
        exact: bool [n]; see `async_rl.trainer.batch.training_batch`.
    """
    exact = exact & known
    engine, movement = k3_of(old, behaviour), k3_of(current, old) * known
    columns = (engine * exact, exact, engine * (known & ~exact), known, movement)
    return dict(zip(OLD_COLUMNS, columns, strict=True))


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


class TokenSums:
    """float64 sums over the tokens of a train step: of this rank, and after `reduce` of all ranks.

    Args:
        extra: columns of the table after COLUMNS: the filters of the objective, `kl` if it has a KL term, those of
            `distillation.sum_names` if there are teachers, and OLD_COLUMNS if there are old logprobs.
        trajectories: number of trajectories in the batch.
    """

    def __init__(self, extra: Sequence[str], *, trajectories: int) -> None:
        self._columns = (*COLUMNS, *extra)
        self._extra = tuple(extra)
        self._table = torch.zeros(len(self._columns), len(LAGS), len(SIGNS), dtype=torch.float64)
        self._histogram = torch.zeros(len(LAGS), BINS, dtype=torch.float64)
        self._loss = torch.zeros(1, dtype=torch.float64)
        # Sum of d, and number of tokens.
        self._trajectory = torch.zeros(2, trajectories, dtype=torch.float64)
        self._abs_max = torch.zeros(len(LAGS), dtype=torch.float64)

    def add(self, results: dict[str, Tensor], *, trajectories: Tensor) -> None:
        """Add the sums of a micro-batch.

        Args:
            results: from `step.Objective` with kind `policy`.
            trajectories: int64 [count], numbers in the batch of the trajectories in the micro-batch.
        """
        results = {name: value.to("cpu", torch.float64) for name, value in results.items()}
        self._table += results["table"]
        self._histogram += results["histogram"]
        self._loss += results["loss"]
        self._trajectory.index_add_(1, trajectories, results["trajectory"])
        self._abs_max = torch.maximum(self._abs_max, results["abs_max"])

    def reduce(self, over_ranks: Callable[[Tensor], Tensor], maximum: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums of this rank by the sums over all ranks.

        Args:
            over_ranks: sums a float64 vector over ranks; called once.
            maximum: takes the maximum of a float64 vector over ranks; called once.
        """
        parts = (self._table, self._histogram, self._loss, self._trajectory)
        whole = over_ranks(torch.cat([part.flatten() for part in parts]))
        for part, summed in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))
        self._abs_max = maximum(self._abs_max)

    def metrics(self, *, updates: int) -> dict[str, float]:
        """Metrics of a train step with `updates` optimizer updates; shares without tokens are NaN."""
        count = self._table[0]
        tokens = float(count.sum())
        found = {
            "loss": self._loss.item() / updates,
            "entropy": self._share("entropy"),
            "ess/sequence": self._sequence_ess(),
        }
        found |= mismatch_metrics(
            self._table.sum((1, 2)), self._histogram.sum(0), abs_max=float(self._abs_max.max()) if tokens else 0.0
        )
        for i, lag in enumerate(LAGS):
            of_lag = mismatch_metrics(self._table[:, i].sum(1), self._histogram[i], abs_max=float(self._abs_max[i]))
            found |= {f"{key}_{lag}": value for key, value in of_lag.items()}
        found |= {f"tokens/{part}" if part else "tokens": float(count[at].sum()) for part, at in _CUTS.items()}
        for name in self._extra:
            if name == "kl":
                found["kl/reference"] = self._share("kl")
            elif name not in (*OLD_COLUMNS, SCORED, *SUMS.values()):
                found |= {f"{name}/fraction{part and '_'}{part}": self._share(name, part) for part in _CUTS}
        if SCORED in self._extra:
            sums = {name: float(self._table[self._columns.index(name)].sum()) for name in self._extra}
            found |= teacher_metrics(sums, tokens=tokens)
        return found | (self._old_metrics() if OLD_COLUMNS[0] in self._extra else {})

    def _old_metrics(self) -> dict[str, float]:
        """Metrics of old logprobs; NaN without tokens."""
        k3, exact, k3_inexact, known, movement = (self._table[self._columns.index(name)].sum(1) for name in OLD_COLUMNS)
        tokens = float(self._table[0].sum())
        inexact = known.sum() - exact.sum()
        return {
            "old/k3": share(float(k3.sum()), float(exact.sum())),
            **{f"old/k3_{lag}": share(float(k3[i]), float(exact[i])) for i, lag in enumerate(LAGS)},
            "old/k3_inexact": share(float(k3_inexact.sum()), float(inexact)),
            "old/movement_k3": share(float(movement.sum()), float(known.sum())),
            "old/exact_fraction": share(float(exact.sum()), tokens),
            "old/missing_fraction": share(tokens - float(known.sum()), tokens),
        }

    def _share(self, name: str, part: str = "") -> float:
        """Mean of a column over the tokens of a part of the table."""
        column, at = self._table[self._columns.index(name)], _CUTS[part]
        return share(float(column[at].sum()), float(self._table[0][at].sum()))

    def _sequence_ess(self) -> float:
        """Effective sample size of the trajectories with weights prod(exp(d)), as a share of their number."""
        log_weights = self._trajectory[0, self._trajectory[1] > 0]
        if not len(log_weights):
            return math.nan
        weights = torch.exp(log_weights - log_weights.max())  # the scale cancels
        return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


def routing_sums(micro_batches: Sequence[Mapping[int, Tensor]], *, layers: Sequence[int]) -> Tensor:
    """ROUTING_SUMS float64 [layers, 6] over the micro-batches of this rank; 0 for layers of other ranks.

    Args:
        micro_batches: `MicroBatchRouting.sums` of each micro-batch.
        layers: global numbers of all layers with experts.
    """
    out = torch.zeros(len(layers), len(ROUTING_SUMS), dtype=torch.float64)
    for row, layer in zip(out, layers, strict=True):
        if found := [of_one[layer] for of_one in micro_batches if layer in of_one]:
            row.copy_(torch.stack(found).sum(0))
    return out


def routing_metrics(sums: Tensor, *, layers: Sequence[int]) -> dict[str, float]:
    """Metrics of replay over all layers and per layer, from `routing_sums` summed over ranks; NaN without rows."""
    found = _routing_shares(sums.sum(0).tolist())
    for layer, of_one in zip(layers, sums.tolist(), strict=True):
        found |= {of_layer(key, layer): value for key, value in _routing_shares(of_one).items()}
    return found


def _routing_shares(sums: Sequence[float]) -> dict[str, float]:
    agreeing, replayed, refused, mass, fallback, rows = sums
    return {
        "routing/overlap": share(agreeing, replayed),
        "routing/gate_mass": share(mass, rows - fallback),
        "routing/refused_fraction": share(refused, replayed),
        "routing/fallback_fraction": share(fallback, rows),
    }


def tree_metrics(unique: float, total: float) -> dict[str, float]:
    """Metrics of shared prefixes.

    Args:
        unique: rows of all ranks, without padding.
        total: the same, counted once for each sequence that has the row: the tokens of the batch.
    """
    return {"tree/unique_tokens": unique, "tree/tokens": total, "tree/compression": total / unique if unique else 1.0}
