"""Length distributions of offered trajectories (finished or given up) and of trained ones.

Trajectories that a staleness policy gives up are mostly long, so the difference shows the bias of the policy. Both
distributions are over a window of the newest trajectories. The length of a trajectory that was given up is known only
as a lower bound. Therefore the offered distribution is the product-limit estimate; it accounts for lower bounds
(Kaplan and Meier 1958, "Nonparametric Estimation from Incomplete Observations"). An engine does not report the tokens
of a cancelled request, so the estimate is too short if many trajectories are given up; see length/given_up_fraction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 2048  # trajectories
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Lengths:
    """Lengths of the newest trajectories: sampled tokens of offered ones, tokens in the loss of trained ones."""

    def __init__(self) -> None:
        self._offered: deque[tuple[int, bool]] = deque(maxlen=WINDOW)
        self._trained: deque[int] = deque(maxlen=WINDOW)

    def offered(self, lengths: Iterable[tuple[int, bool]]) -> None:
        """Add (sampled tokens, whether the trajectory finished); False if it was given up."""
        self._offered.extend(lengths)

    def trained(self, lengths: Sequence[int]) -> None:
        """Add the tokens in the loss of each trajectory of a batch."""
        self._trained.extend(lengths)

    def metrics(self) -> dict[str, float]:
        """Quantiles of both distributions in tokens, mean of the offered one, fraction given up.

        The quantiles are NaN before the first trajectory.
        """
        lengths, left = survival(self._offered)
        given_up = sum(not finished for _, finished in self._offered)
        lengths_trained = np.array(self._trained or [np.nan], np.float64)
        trained = np.quantile(lengths_trained, [*QUANTILES.values()], method="inverted_cdf").tolist()
        return {
            "length/offered_mean": float(np.diff(lengths, prepend=0) @ np.concatenate([[1.0], left])[:-1]),
            "length/given_up_fraction": given_up / max(1, len(self._offered)),
            **{f"length/offered_{name}": _first_below(lengths, left, 1 - q) for name, q in QUANTILES.items()},
            **{f"length/trained_{name}": length for name, length in zip(QUANTILES, trained, strict=True)},
        }


def survival(lengths: Iterable[tuple[int, bool]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Product-limit estimate of the share of trajectories that are longer than each length.

    Lengths 2, 5, 8 and a lower bound of 3: the shares for (2, 3, 5, 8) are (0.75, 0.75, 0.375, 0).

    Args:
        lengths: (length, whether it is exact); otherwise it is a lower bound.

    Returns:
        int64 [L] distinct lengths, ascending; float64 [L] share of trajectories that are longer. The last share is
        above 0 if the largest length is a lower bound.
    """
    table = np.array(list(lengths), np.int64).reshape(-1, 2)
    distinct, at = np.unique(table[:, 0], return_inverse=True)
    there = np.bincount(at, minlength=len(distinct))
    ended = np.bincount(at, weights=table[:, 1], minlength=len(distinct))
    at_risk = there[::-1].cumsum()[::-1]
    return distinct, np.cumprod(1 - ended / np.maximum(at_risk, 1), dtype=np.float64)


def _first_below(lengths: NDArray[np.int64], left: NDArray[np.float64], share: float) -> float:
    """The first length that at most `share` of the trajectories exceed, or the last length; NaN without lengths."""
    if not len(lengths):
        return float("nan")
    below = np.flatnonzero(left <= share + 1e-9)
    return float(lengths[below[0] if len(below) else -1])
