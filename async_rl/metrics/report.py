"""Reports of one or more runs: curves as PNG, and a self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from async_rl.files.jsonl import read_lines
from async_rl.metrics.registry import INFO, METRICS, Metric, metric_of, split_layer

_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean",)),
    ("staleness (optimizer updates)", ("staleness/mean", "staleness/max")),
    ("mismatch k3", ("mismatch/k3", "mismatch/k3_probe")),
    ("idle share", ("idle/trainer", "idle/rollout")),
    ("partial rollouts", ("partial/resumed_fraction",)),
    ("cut-off answers (share)", ("rollout/cut_off_fraction", "rollout/out_of_turns_fraction")),
    ("groups without signal (share)", ("reward/groups_without_signal",)),
)
_BY_LAYER = ("routing/overlap", "routing/gate_mass", "routing/refused_fraction", "routing/fallback_fraction")
_STYLES = ("-", "x")  # first and second metric of a panel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Records of a run directory."""

    name: str
    """Name of the directory."""
    steps: Sequence[dict[str, Any]]
    """Objects of metrics.jsonl, one per batch."""
    validations: Sequence[dict[str, Any]]
    """Objects of validation.jsonl; empty if the file does not exist."""

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(train steps, values) of a metric, float64 [n] each; steps without a value are left out."""
        rows = [(s["train_step"], s[key]) for s in self.steps if s.get(key) is not None]
        table = np.array(rows, np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def by_layer(self, key: str) -> dict[int, float]:
        """Layer (global, from 0) -> mean over the train steps of a routing metric; see `registry.of_layer`."""
        values: dict[int, list[float]] = {}
        for step in self.steps:
            for name, value in step.items():
                found = split_layer(name)
                if found is not None and found[0] == key and value is not None:
                    values.setdefault(found[1], []).append(value)
        return {layer: float(np.mean(values[layer])) for layer in sorted(values)}


def read_run(directory: Path) -> RunRecord:
    """Read the records of a run directory.

    Raises:
        ValueError: metrics.jsonl does not exist, or a line is damaged; the message names the file.
    """
    return RunRecord(
        name=directory.name,
        steps=_read_lines(directory / "metrics.jsonl"),
        validations=_read_lines(directory / "validation.jsonl", required=False),
    )


def draw_curves(runs: Sequence[RunRecord]) -> Figure:
    """Draw held-out success and the main metrics of one or more runs over train steps."""
    figure = Figure(figsize=(16, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 4).ravel()
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        points = [(v["train_step"], v["validation/success"]) for v in run.validations]
        points = [(step, success) for step, success in points if success is not None]  # None: every rollout failed
        steps, success = np.array(points, np.float64).reshape(-1, 2).T
        axes[0].plot(steps, success, marker="o", color=colour, label=run.name)
    _finish(axes[0], "held-out success")
    axes[0].set_ylim(0, 1)
    for axis, (title, keys) in zip(axes[1:], _PANELS, strict=True):
        for run, colour in zip(runs, _colours(len(runs)), strict=True):
            for key, style in zip(keys, _STYLES, strict=False):
                steps, values = run.column(key)
                label = key if run is runs[0] and len(keys) > 1 else None
                axis.plot(steps, values, style, color=colour, markersize=4, linewidth=1.2, label=label)
        _finish(axis, title)
        if title.startswith("mismatch"):
            axis.set_yscale("log")
    return figure


def draw_layers(runs: Sequence[RunRecord]) -> Figure | None:
    """Draw metrics of router replay over the layers of the model, as means over a run; None if no run has them."""
    if not any(run.by_layer(key) for run in runs for key in _BY_LAYER):
        return None
    figure = Figure(figsize=(13, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, key in zip(figure.subplots(1, len(_BY_LAYER)), _BY_LAYER, strict=True):
        for run, colour in zip(runs, _colours(len(runs)), strict=True):
            values = run.by_layer(key)
            axis.plot(list(values), list(values.values()), marker="o", color=colour, label=run.name)
        _finish(axis, key, over="layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _colours(count: int) -> list[str]:
    """A matplotlib colour per run."""
    return [f"C{i}" for i in range(count)]


def write_report(runs: Sequence[RunRecord], path: Path) -> None:
    """Write one self-contained HTML page: curves, router replay by layer, lengths and the values of the last step."""
    layers = draw_layers(runs)
    by_layer = "" if layers is None else f"<h2>Router replay by layer, mean over the run</h2>{_image(layers)}"
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    last = {key: None for run in runs for step in run.steps[-1:] for key in step if step[key] is not None}
    own = sorted(key for key in last if key.startswith(INFO) and key not in METRICS)
    rows = "".join(_row(key, metric, runs) for key in (*METRICS, *own) if key in last and (metric := metric_of(key)))
    path.write_text(
        "<!doctype html><meta charset=utf-8><title>async_rl report</title>"
        "<style>body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
        "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child{text-align:left}</style>"
        f"<h1>{html.escape(', '.join(run.name for run in runs))}</h1>"
        f"{_image(draw_curves(runs))}{by_layer}{_lengths(runs)}"
        f"<h2>Last train step</h2><table><tr><th></th>{head}<th>meaning</th></tr>{rows}</table>"
    )


def _lengths(runs: Sequence[RunRecord]) -> str:
    """HTML section of offered and trained trajectory lengths; empty if no run has them."""
    if not any(step.get("length/trained_p50") is not None for run in runs for step in run.steps):
        return ""
    figure = Figure(figsize=(13, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    _draw_lengths(axis, runs)
    _finish(axis, "tokens per trajectory: offered, and trained with gradient")
    return f"<h2>Lengths</h2>{_image(figure)}"


def _image(figure: Figure) -> str:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return f'<img style="max-width:100%" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def _row(key: str, metric: Metric, runs: Sequence[RunRecord]) -> str:
    cells = "".join(f"<td>{_number(run.steps[-1].get(key) if run.steps else None)}</td>" for run in runs)
    return f"<tr><td>{html.escape(key)}</td>{cells}<td>{html.escape(metric.meaning)}</td></tr>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _finish(axis: Axes, title: str, *, over: str = "train step") -> None:
    axis.set_title(title)
    axis.set_xlabel(over)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")


def _read_lines(path: Path, *, required: bool = True) -> list[dict[str, Any]]:
    if not path.is_file():
        if required:
            raise ValueError(f"{path} does not exist; give the output_dir of a run")
        return []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is damaged: {error}") from error
    return records


def _draw_lengths(axis: Axes, runs: Sequence[RunRecord]) -> None:
    """Draw median and 90th percentile of offered (lines) and trained (crosses) lengths over train steps."""
    for number, run in enumerate(runs):
        for quantile, width in (("p50", 1.0), ("p90", 2.0)):
            for kind, style in (("offered", "-"), ("trained", "x")):
                steps, values = run.column(f"length/{kind}_{quantile}")
                label = f"{kind} {quantile}" if not number else None
                axis.plot(steps, values, style, color=f"C{number}", linewidth=width, markersize=3 * width, label=label)
    axis.set_ylim(bottom=0)
