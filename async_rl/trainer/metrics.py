"""Sums over the tokens and routing rows of micro-batches, and the metrics of a train step computed from these sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from async_rl.metrics.registry import LAGS, of_layer
from async_rl.trainer.loss.mismatch import BINS, COLUMNS, SIGNS, mismatch_metrics, share
from async_rl.trainer.router_replay import ROUTING_SUMS


class TokenSums:
    """float64 sums over the tokens of a train step: of this rank, and after `reduce` of all ranks.

    Args:
        extra: columns of the table after COLUMNS: the filters of the objective, and `kl` if it has a KL term.
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
        tokens = self._tokens()
        entropy = self._table[COLUMNS.index("entropy")].sum().item()
        found = {
            "loss": self._loss.item() / updates,
            "tokens": tokens,
            "entropy": share(entropy, tokens),
            "ess/sequence": self._sequence_ess(),
        }
        found |= mismatch_metrics(
            self._table.sum((1, 2)), self._histogram.sum(0), abs_max=float(self._abs_max.max()) if tokens else 0.0
        )
        for i, lag in enumerate(LAGS):
            of_lag = mismatch_metrics(self._table[:, i].sum(1), self._histogram[i], abs_max=float(self._abs_max[i]))
            found |= {f"{key}_{lag}": value for key, value in of_lag.items()}
            found[f"tokens/{lag}"] = self._tokens(lag=i)
        for sign in ("positive", "negative"):
            found[f"tokens/{sign}"] = self._tokens(sign=SIGNS.index(sign))
        for name in self._extra:
            found |= self._kl(tokens) if name == "kl" else self._filter(name)
        return found

    def _tokens(self, *, lag: int | None = None, sign: int | None = None) -> float:
        counts = self._table[0] if lag is None else self._table[0, lag : lag + 1]
        return float((counts if sign is None else counts[:, sign]).sum())

    def _filter(self, name: str) -> dict[str, float]:
        """Share of tokens that a filter changed: of all tokens, by sign of the advantage, and by lag bucket."""
        touched = self._table[self._columns.index(name)]
        found = {f"{name}/fraction": share(touched.sum().item(), self._tokens())}
        for sign in ("positive", "negative"):
            at = SIGNS.index(sign)
            found[f"{name}/fraction_{sign}"] = share(touched[:, at].sum().item(), self._tokens(sign=at))
        for i, lag in enumerate(LAGS):
            found[f"{name}/fraction_{lag}"] = share(touched[i].sum().item(), self._tokens(lag=i))
        return found

    def _kl(self, tokens: float) -> dict[str, float]:
        return {"kl/reference": share(self._table[self._columns.index("kl")].sum().item(), tokens)}

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
    place = {layer: i for i, layer in enumerate(layers)}
    found: dict[int, list[Tensor]] = {}
    for of_one in micro_batches:
        for layer, sums in of_one.items():
            found.setdefault(layer, []).append(sums)
    for layer, sums in found.items():
        out[place[layer]] = torch.stack(sums).sum(0).cpu()
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
