"""Sums over the tokens and routing rows of micro-batches, and the metrics of a train step that they become."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from async_rl.train.router_replay import MicroBatchRouting

TOKEN_SUMS: tuple[str, ...] = (
    *("tokens", "loss", "entropy", "k1", "k3", "k3_lag0", "tokens_lag0"),
    *("weight", "weight_squared", "clipped"),
)
ROUTING_SUMS: tuple[str, ...] = ("agreeing", "replayed", "fallback", "rows")


def token_sums(
    loss: Tensor, current: Tensor, behaviour: Tensor, entropy: Tensor, clipped: Tensor, pure_lag0: Tensor
) -> dict[str, Tensor]:
    """Sums over tokens that metrics are made of, and the largest |d|; d = current - behaviour."""
    with torch.no_grad():
        d = current - behaviour
        ratio = torch.exp(d)
        k3 = ratio - 1 - d
        return {
            "tokens": torch.tensor(float(len(d))),
            "loss": loss.detach(),
            "entropy": entropy.sum(),
            "k1": -d.sum(),
            "k3": k3.sum(),
            "weight": ratio.sum(),
            "weight_squared": (ratio * ratio).sum(),
            "clipped": clipped.sum(),
            "k3_lag0": (k3 * pure_lag0).sum(),
            "tokens_lag0": pure_lag0.sum(),
            "abs_max": d.abs().max() if len(d) else d.new_zeros(()),
        }


def metrics_from_sums(sums: dict[str, float], *, abs_max: float) -> dict[str, float]:
    """Metrics of a train step; NaN where nothing was counted."""
    tokens = sums["tokens"]
    return {
        "loss": sums["loss"],
        "entropy": _share(sums["entropy"], tokens),
        "mismatch/k1": _share(sums["k1"], tokens),
        "mismatch/k3": _share(sums["k3"], tokens),
        "mismatch/abs_max": abs_max,
        "mismatch/k3_lag0": _share(sums["k3_lag0"], sums["tokens_lag0"]),
        "ess/token": _share(sums["weight"] ** 2, tokens * sums["weight_squared"]),
        "clip/fraction": _share(sums["clipped"], tokens),
        "routing/overlap": _share(sums["agreeing"], sums["replayed"]),
        "routing/fallback_fraction": _share(sums["fallback"], sums["rows"]),
        "tokens": tokens,
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def routing_sums(routings: Sequence[MicroBatchRouting | None]) -> list[float]:
    """ROUTING_SUMS over the layers and micro-batches of this rank."""
    agreement = [a for routing in routings if routing is not None for a in routing.agreement.values()]
    return [float(sum(float(getattr(a, name)) for a in agreement)) for name in ROUTING_SUMS]
