"""How long trajectories are: those that were offered to training, and those that were trained.

What a staleness policy gives up is mostly long, so the two differ by its bias. Quantiles are over a window of the
newest trajectories of each kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes

from message_queue.trajectory import NOT_SAMPLED, PromptGroup

WINDOW = 2048  # trajectories
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Lengths:
    """Counts trajectories by their sampled tokens; of trained ones, those that took gradient."""

    def __init__(self) -> None:
        self._num_offered = self._sum_offered = 0
        self._offered: deque[int] = deque(maxlen=WINDOW)
        self._trained: deque[int] = deque(maxlen=WINDOW)

    def offered(self, lengths: Sequence[int]) -> None:
        """Finished trajectories, or given up ones as far as they got."""
        self._num_offered += len(lengths)
        self._sum_offered += sum(lengths)
        self._offered.extend(lengths)

    def trained(self, lengths: Sequence[int]) -> None:
        """Trajectories of a batch."""
        self._trained.extend(lengths)

    def metrics(self) -> dict[str, float]:
        """Quantiles of both, and the mean of all that were offered."""
        found = {"length/offered_mean": self._sum_offered / max(1, self._num_offered)}
        for kind, window in (("offered", self._offered), ("trained", self._trained)):
            for name, share in QUANTILES.items():
                found[f"length/{kind}_{name}"] = _quantile(window, share)
        return found


def gradient_lengths(groups: Sequence[PromptGroup], *, versions: frozenset[int]) -> list[int]:
    """Tokens of each trajectory that weights of `versions` sampled."""
    young = np.array(sorted(versions - {NOT_SAMPLED}), np.int32)
    return [int(np.isin(t.param_versions(), young).sum()) for group in groups for t in group.trajectories]


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


def _quantile(window: Sequence[int], share: float) -> float:
    return float(np.quantile(window, share, method="inverted_cdf")) if window else float("nan")
