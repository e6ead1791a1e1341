"""How long trajectories are: those that were offered to training, and those that were trained.

What a staleness policy gives up is mostly long, so the two differ by its bias. Both are over a window of the newest
trajectories. Of one that was given up only a lower bound is known, how far it got; the distribution of what was offered
is the product-limit estimate, which takes that as it is (Kaplan and Meier 1958, "Nonparametric Estimation from
Incomplete Observations"). An engine does not tell what a cancelled request had sampled, so where much is given up the
estimate is still too short; the share that was given up says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

WINDOW = 2048  # trajectories
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Lengths:
    """Counts trajectories by their sampled tokens; of trained ones, those that took gradient."""

    def __init__(self) -> None:
        self._offered: deque[tuple[int, bool]] = deque(maxlen=WINDOW)
        self._trained: deque[int] = deque(maxlen=WINDOW)

    def offered(self, lengths: Iterable[tuple[int, bool]]) -> None:
        """(tokens, whether it was finished) of each trajectory; False: given up."""
        self._offered.extend(lengths)

    def trained(self, lengths: Sequence[int]) -> None:
        """Trajectories of a batch."""
        self._trained.extend(lengths)

    def metrics(self) -> dict[str, float]:
        """Quantiles of both, NaN where there is nothing yet, and the mean of what was offered."""
        lengths, left = survival(self._offered)
        given_up = sum(not finished for _, finished in self._offered)
        found = {
            "length/offered_mean": float(np.diff(lengths, prepend=0) @ np.concatenate([[1.0], left])[:-1]),
            "length/given_up_fraction": given_up / max(1, len(self._offered)),
        }
        for name, share in QUANTILES.items():
            found[f"length/offered_{name}"] = _first_below(lengths, left, 1 - share)
            found[f"length/trained_{name}"] = _quantile(self._trained, share)
        return found


def survival(lengths: Iterable[tuple[int, bool]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Product-limit estimate of how many are longer than each length.

    Args:
        lengths: (length, whether it is known; else it is a lower bound).

    Returns:
        int64 [L] distinct lengths, rising; float64 [L] share of trajectories that are longer than each. The share does
        not fall to 0 where the longest is not known.
    """
    table = np.array(list(lengths), np.int64).reshape(-1, 2)
    distinct, at = np.unique(table[:, 0], return_inverse=True)
    there = np.bincount(at, minlength=len(distinct))
    ended = np.bincount(at, weights=table[:, 1], minlength=len(distinct))
    at_risk = there[::-1].cumsum()[::-1]
    return distinct, np.cumprod(1 - ended / np.maximum(at_risk, 1), dtype=np.float64)


class HasColumns(Protocol):
    """A run, by its metrics."""

    def column(self, key: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]: ...


def draw_lengths(axis: Axes, runs: Sequence[HasColumns]) -> None:
    """Median and 90th percentile of what was offered (lines) and trained (crosses) over train steps."""
    for number, run in enumerate(runs):
        for quantile, width in (("p50", 1.0), ("p90", 2.0)):
            for kind, style in (("offered", "-"), ("trained", "x")):
                steps, values = run.column(f"length/{kind}_{quantile}")
                label = f"{kind} {quantile}" if not number else None
                axis.plot(steps, values, style, color=f"C{number}", linewidth=width, markersize=3 * width, label=label)
    axis.set_ylim(bottom=0)


def _first_below(lengths: NDArray[np.int64], left: NDArray[np.float64], share: float) -> float:
    """The first length that at most `share` are longer than; the longest where it is longer than that."""
    if not len(lengths):
        return float("nan")
    below = np.flatnonzero(left <= share + 1e-9)
    return float(lengths[below[0] if len(below) else -1])


def _quantile(window: Sequence[int], share: float) -> float:
    return float(np.quantile(window, share, method="inverted_cdf")) if window else float("nan")
