"""Curves of one or more runs as a picture, for documents; `async_rl.metrics.report` has the page for the screen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from async_rl.metrics.report import RunRecord

_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean",)),
    ("staleness (optimizer updates)", ("staleness/mean", "staleness/max")),
    ("mismatch k3", ("mismatch/k3", "mismatch/k3_probe")),
    ("idle share", ("idle/trainer", "idle/rollout")),
    ("partial rollouts", ("partial/resumed_fraction",)),
    ("cut-off answers (share)", ("rollout/cut_off_fraction", "rollout/out_of_turns_fraction")),
    ("groups without signal (share)", ("reward/groups_without_signal",)),
)
_STYLES = ("-", "x")  # first and second metric of a panel


def draw_curves(runs: Sequence[RunRecord]) -> Figure:
    """Draw held-out success and the main metrics of one or more runs over train steps."""
    figure = Figure(figsize=(16, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 4).ravel()
    for number, run in enumerate(runs):
        axes[0].plot(*run.column("validation/success"), marker="o", color=f"C{number}", label=run.name)
    _finish(axes[0], "held-out success")
    _include_unit_interval(axes[0])
    for axis, (title, keys) in zip(axes[1:], _PANELS, strict=True):
        for number, run in enumerate(runs):
            for key, style in zip(keys, _STYLES, strict=False):
                label = key if number == 0 and len(keys) > 1 else None
                axis.plot(*run.column(key), style, color=f"C{number}", markersize=4, linewidth=1.2, label=label)
        _finish(axis, title)
        if title.startswith("mismatch"):
            axis.set_yscale("log")
    return figure


def _include_unit_interval(axis: Axes) -> None:
    """Widen the limits of the data to 0 and 1, the range of most rewards; other rewards stay inside."""
    low, high = axis.dataLim.intervaly if axis.lines and np.isfinite(axis.dataLim.intervaly).all() else (0.0, 1.0)
    margin = 0.03 * (max(high, 1.0) - min(low, 0.0))
    axis.set_ylim(min(low, 0.0) - margin * (low < 0), max(high, 1.0) + margin * (high > 1))


def _finish(axis: Axes, title: str) -> None:
    axis.set_title(title)
    axis.set_xlabel("train step")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")
