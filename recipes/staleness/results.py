"""Results of an experiment: a JSON file with what the figure shows, the figure, and a table.

`python -m recipes.staleness.results FILE...` prints the tables of results and redraws their figures. With
`--against AXIS=LABEL` it prints differences from the runs with that label, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import TypeAdapter

from async_rl.metrics.report import RunRecord
from async_rl.metrics.trace import read_trace

from .experiment import SEED, Cell, Experiment

DPI = 80
RATE = "tokens trained per second"
BARS_OF_A_PANEL = 20
LONG_LABEL = 8  # letters, above which labels below bars slant
_DIGITS = 5

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""0.975 quantile of Student's t distribution for 1 to 9 degrees of freedom; the last is also used for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """A finished run."""

    labels: Mapping[str, str]
    """Axis -> label."""
    train_steps: Sequence[int]
    """Last optimizer step of each batch."""
    rewards: Sequence[float]
    """Mean reward of each batch."""
    validations: Sequence[tuple[int, float, float]]
    """Optimizer steps, seconds of training before it, and held-out success of each validation that has one."""
    seconds: float
    """Time of all steps."""
    staleness: Mapping[int, int]
    """Optimizer steps of age -> trained tokens."""
    means: Mapping[str, float]
    """Metric -> mean over the batches."""
    effective_samples: Sequence[tuple[int, float]] = ()
    """Optimizer step and effective sample size, as a share of the tokens, of each batch that trained tokens."""
    untrained: float = 0.0
    """Share of the sampled tokens that were dropped or masked, without those of requests that were cancelled."""
    long_lengths: float | None = None
    """90th percentile of the lengths of trained trajectories over that of all, of the newest at the end."""
    s_max: float | None = None
    """Of a synchronous run, see `most_speed_up`; None if it was not measured."""
    waits: Sequence[tuple[float, float]] = ()
    """Of a synchronous run: for each batch the seconds until it was there, and those of the rest of its step."""

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second of all steps."""
        return sum(self.staleness.values()) / self.seconds

    @property
    def success(self) -> float:
        """Held-out success at the end; NaN if it was not measured."""
        return self.validations[-1][2] if self.validations else float("nan")

    @property
    def collapsed(self) -> bool:
        """Whether the reward ends below half of its best."""
        rewards = _smooth(np.array(self.rewards))
        return bool(rewards[-1] < rewards.max() / 2)

    def least_effective_samples(self, *, share: float) -> float:
        """The least effective sample size in the first `share` of the optimizer steps; NaN if none trained tokens."""
        last = share * self.train_steps[-1]
        return min((value for step, value in self.effective_samples if step <= last), default=math.nan)

    def seconds_to(self, target: float) -> float:
        """Seconds until held-out success reaches `target`, on the line between two validations; NaN if it does not.

        0.5 after 10 s and 0.9 after 20 s: 0.7 after 15 s.
        """
        before = None
        for _, seconds, success in self.validations:
            if success >= target:
                if before is None:
                    return seconds
                return before[0] + (seconds - before[0]) * (target - before[1]) / (success - before[1])
            before = seconds, success
        return float("nan")


IDLE = {"idle/trainer": "trainer idle", "idle/rollout": "replicas idle"}
OF_OLD_POLICY = {"old/k3": "k3 of the engine", "old/movement_k3": "k3 of the movement"}
MEANS = {
    "staleness/mean": "staleness",
    **IDLE,
    "mismatch/k3": "k3",
    **OF_OLD_POLICY,
    "ess/token": "effective samples",
    "clip/fraction": "clipped",
    "length/trained_mean": "tokens per trajectory",
}
"""Metric -> heading of its column."""


def result_of(cell: Cell, run: RunRecord, *, synchronous: bool = False) -> CellResult:
    """The result of a run's records."""
    trace = run.directory / "trace.json"
    steps = [int(step["train_step"]) for step in run.steps]
    ends = np.cumsum([step["step/seconds"] for step in run.steps])
    staleness: dict[int, int] = {}
    for step in run.steps:
        for lag, tokens in step["staleness/tokens"].items():
            staleness[int(lag)] = staleness.get(int(lag), 0) + tokens
    validations = [(v["train_step"], v["validation/success"]) for v in run.validations]
    untrained, long_lengths = _left_out(run.steps[-1])
    return CellResult(
        labels=cell.labels,
        train_steps=steps,
        rewards=[float(step["reward/mean"]) for step in run.steps],
        validations=[
            (step, float(ends[np.searchsorted(steps, step, side="right") - 1]) if step >= steps[0] else 0.0, success)
            for step, success in validations
            if success is not None
        ],
        seconds=float(ends[-1]),
        staleness=dict(sorted(staleness.items())),
        means={key: float(np.mean(values)) for key in MEANS if len(values := run.column(key)[1])},
        effective_samples=[(int(step), float(value)) for step, value in zip(*run.column("ess/token"), strict=True)],
        untrained=untrained,
        long_lengths=long_lengths,
        s_max=most_speed_up(read_trace(trace)) if synchronous and trace.exists() else None,
        waits=[
            (wait := step["idle/trainer"] * step["step/seconds"], step["step/seconds"] - wait)
            for step in (run.steps if synchronous else ())
        ],
    )


def _left_out(last: Mapping[str, Any]) -> tuple[float, float | None]:
    """`CellResult.untrained` and `long_lengths`, from the metrics of a run's last step."""
    trained, masked, dropped = (last.get(f"ledger/{kind}_tokens") or 0 for kind in ("trained", "masked", "dropped"))
    of_trained, of_all = (last.get(f"length/{kind}_p90") for kind in ("trained", "offered"))
    share = (masked + dropped) / max(1, trained + masked + dropped)
    return share, of_trained / of_all if of_trained and of_all else None


def most_speed_up(events: Sequence[Mapping[str, Any]]) -> float | None:
    """S_max = 1 / (1 - g + g U) of a synchronous run: its speed-up if no rollout of a batch waited for another one.

    g is the share of the time that the trainer waits for a batch. U is the share of the batch's rollouts that are
    unfinished, as a mean over that time. With g = 0.9 and U = 0.3, S_max is 1 / (0.1 + 0.27) = 2.7.

    Args:
        events: trace of the run.

    Returns:
        None if the trace has no rollouts.
    """

    def of_kind(kind: str) -> np.ndarray:
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == kind]
        return np.array(spans, np.float64).reshape(-1, 2)

    waits, steps, rollouts = of_kind("wait"), of_kind("train"), of_kind("trajectory")
    if not (len(waits) and len(steps) and len(rollouts)):
        return None
    waited = unfinished = 0.0
    for start, end in waits:
        overlaps = np.minimum(rollouts[:, 1], end) - np.maximum(rollouts[:, 0], start)
        if np.any(overlaps > 0):
            waited += end - start
            unfinished += overlaps[overlaps > 0].sum() / np.count_nonzero(overlaps > 0)
    g = waited / (steps[:, 1].max() - waits[:, 0].min())
    return 1 / (1 - g + g * unfinished / waited)


def speed_up_of_bound(waits: Sequence[tuple[float, float]], *, ahead: int) -> float:
    """Speed-up of a synchronous run if each batch were begun `ahead` batches earlier and took as long as it did.

    No batch of the run could be there earlier under policy `wait`, because its slowest rollout starts with the weights
    of that batch. Two batches that take 4 s and 2 s, and 1 s of training each: 8 / 6 with one batch ahead.

    Args:
        waits: `CellResult.waits` of the synchronous run.
        ahead: batches between the one that is trained and the newest that is begun.
    """
    ends = [0.0] * (ahead + 1)
    for wait, rest in waits:
        ends.append(max(ends[-1], ends[-1 - ahead] + wait) + rest)
    return sum(map(sum, waits)) / ends[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of all cells."""

    experiment: str
    """Name of the experiment."""
    control: str | None
    """Label of the first axis that is synchronous training."""
    target: float | None
    """Held-out success whose time is measured; None if times say nothing, because other work may run too."""
    cells: Sequence[CellResult]
    """One for each run."""

    @staticmethod
    def of(experiment: Experiment, runs: Mapping[Cell, RunRecord]) -> Results:
        """Results of an experiment's runs."""
        cells = [
            result_of(cell, run, synchronous=next(iter(cell.labels.values())) == experiment.control)
            for cell, run in runs.items()
        ]
        return Results(experiment=experiment.name, control=experiment.control, target=experiment.target, cells=cells)

    def write(self, path: Path) -> None:
        """Write the file."""
        values = TypeAdapter(Results).dump_python(self, mode="json")
        path.write_text(json.dumps(_rounded(values), separators=(",", ":")) + "\n")

    @staticmethod
    def read(path: Path) -> Results:
        """Read the file.

        Raises:
            pydantic.ValidationError: it is damaged.
        """
        return TypeAdapter(Results).validate_json(path.read_text())

    def labels(self, axis: str) -> list[str]:
        """Labels of an axis, in the order of the runs."""
        return list(dict.fromkeys(cell.labels[axis] for cell in self.cells))

    @property
    def limits_of_bounds(self) -> bool:
        """Whether the speeds of bounds are compared with `limit_of_bound`."""
        return self.control == "0" and self.target is not None

    @property
    def first_axis(self) -> str:
        """The axis from left to right."""
        return next(iter(self.cells[0].labels))

    def speed_up(self, cell: CellResult) -> float:
        """Trained tokens per second over those of the synchronous run with the other labels; NaN if there is none."""
        synchronous = self._synchronous(cell)
        return math.nan if synchronous is None else cell.tokens_per_second / synchronous.tokens_per_second

    def limit_of_bound(self, cell: CellResult) -> float:
        """`speed_up_of_bound` for the bound of a run; NaN without a synchronous run. The first axis is the bound."""
        synchronous = self._synchronous(cell)
        ahead = int(cell.labels[self.first_axis])
        return math.nan if synchronous is None else speed_up_of_bound(synchronous.waits, ahead=ahead)

    def _synchronous(self, cell: CellResult) -> CellResult | None:
        labels = {**cell.labels, self.first_axis: self.control}
        return next((other for other in self.cells if other.labels == labels), None)

    def by_labels(self) -> list[list[CellResult]]:
        """The results of all seeds, for each combination of the other labels."""
        found: dict[tuple[str, ...], list[CellResult]] = {}
        for cell in self.cells:
            found.setdefault(tuple(label for axis, label in cell.labels.items() if axis != SEED), []).append(cell)
        return list(found.values())

    def series(self) -> dict[str, dict[str, list[CellResult]]]:
        """Labels of the other axes -> label of the first axis -> results of all seeds."""
        found: dict[str, dict[str, list[CellResult]]] = {}
        for cell in self.cells:
            others = [
                f"{axis} {label}" if label[0].isdigit() else label
                for axis, label in cell.labels.items()
                if axis not in (self.first_axis, SEED)
            ]
            of_series = found.setdefault(", ".join(others) or self.experiment, {})
            of_series.setdefault(cell.labels[self.first_axis], []).append(cell)
        return found


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of `values` [seeds, ...] over the seeds, and half the width of its 95 % interval (Student's t).

    Values (0.4, 0.5, 0.6): 0.5 and 4.303 * 0.1 / sqrt(3) = 0.248. The half width of a single seed is 0.
    """
    seeds = len(values)
    if seeds == 1:
        return values[0], np.zeros_like(values[0])
    return values.mean(0), T_QUANTILES[min(seeds - 2, len(T_QUANTILES) - 1)] * values.std(0, ddof=1) / np.sqrt(seeds)


def table(results: Results) -> Iterator[str]:
    """Rows of a Markdown table: means over the seeds, and half the width of their 95 % intervals."""
    target = results.target
    columns: dict[str, Callable[[CellResult], float]] = {
        "success at the end": lambda cell: cell.success,
        "mean reward": lambda cell: float(np.mean(cell.rewards)),
    }
    if target is not None:
        columns["tokens/s"] = lambda cell: cell.tokens_per_second
        if results.control is not None:
            columns["/ synchronous"] = results.speed_up
        if results.limits_of_bounds:
            columns["limit of the bound"] = results.limit_of_bound
        columns[f"seconds to {target:g}"] = lambda cell: cell.seconds_to(target)
    measured = {key for cell in results.cells for key in cell.means}
    left_out = {key for key in OF_OLD_POLICY if key not in measured} | ({*IDLE} if target is None else set())
    means = {key: name for key, name in MEANS.items() if key not in left_out}
    columns |= {name: lambda cell, key=key: cell.means.get(key, math.nan) for key, name in means.items()}
    if any(cell.untrained for cell in results.cells):
        columns["dropped or masked tokens"] = lambda cell: cell.untrained
        columns["p90 length, trained / sampled"] = lambda cell: cell.long_lengths or math.nan
    others = [axis for axis in results.cells[0].labels if axis not in (results.first_axis, SEED)]
    yield f"| {' | '.join([*others, results.first_axis, *columns])} |"
    yield "|" + "---|" * (len(others) + 1 + len(columns))
    for cells in results.by_labels():
        labels = [label for axis, label in cells[0].labels.items() if axis in others]
        shown = [_shown([value(cell) for cell in cells]) for value in columns.values()]
        yield f"| {' | '.join([*labels, cells[0].labels[results.first_axis], *shown])} |"
    if target is not None and (limits := [cell.s_max for cell in results.cells if cell.s_max is not None]):
        yield f"\nS_max: {_shown(limits)}"
    if (line := collapses(results)) is not None:
        yield f"\n{line}"


def differences(results: Results, *, axis: str, label: str) -> Iterator[str]:
    """Rows of a Markdown table: differences from the runs with `label` on `axis`, seed by seed.

    Two runs of a pair differ in the label of `axis` alone. Rates are compared as a ratio. Rewards (0.4, 0.5, 0.6) less
    (0.3, 0.5, 0.5) give (0.1, 0, 0.1): 0.0667 ± 0.1434.

    Raises:
        ValueError: the experiment has no such axis, or the axis has no such label.
    """
    axes = [name for name in results.cells[0].labels if name != SEED]
    if axis not in axes:
        raise ValueError(f"{axis!r} is none of the axes {', '.join(axes)}")
    if label not in (found := results.labels(axis)):
        raise ValueError(f"{label!r} is none of the labels of {axis}: {', '.join(found)}")
    columns: dict[str, Callable[[CellResult, CellResult], float]] = {
        "success at the end": lambda cell, other: cell.success - other.success,
        "mean reward": lambda cell, other: float(np.mean(cell.rewards) - np.mean(other.rewards)),
    }
    if results.target is not None:
        columns["tokens/s, ratio"] = lambda cell, other: cell.tokens_per_second / other.tokens_per_second
    partners = {tuple(cell.labels.items()): cell for cell in results.cells}
    yield f"| {' | '.join([*axes, *columns])} |"
    yield "|" + "---|" * (len(axes) + len(columns))
    for cells in results.by_labels():
        if cells[0].labels[axis] == label:
            continue
        pairs = [(cell, partners[tuple({**cell.labels, axis: label}.items())]) for cell in cells]
        shown = [_shown([value(*pair) for pair in pairs]) for value in columns.values()]
        yield f"| {' | '.join([*(cells[0].labels[name] for name in axes), *shown])} |"


def collapses(results: Results, *, share: float = 0.25) -> str | None:
    """Whether the effective sample size tells early which runs collapse.

    Its least value in the first `share` of the steps is compared between runs that collapse and runs that do not. The
    area under the curve (AUC) is the share of such pairs in which the collapsing run has less; ties count half. 1 tells
    all apart, 0.5 tells nothing. Collapsing runs with 0.2 and 0.6, others with 0.5 and 0.9: 3 of 4 pairs, 0.75.

    Returns:
        A line of text; None without runs of both kinds.
    """
    least: dict[bool, list[float]] = {True: [], False: []}
    for cell in results.cells:
        least[cell.collapsed].append(cell.least_effective_samples(share=share))
    if not all(least.values()):
        return None
    collapsing, others = (np.array(least[kind]) for kind in (True, False))
    wins = (collapsing[:, None] < others) + (collapsing[:, None] == others) / 2
    runs = f"{len(collapsing)} of {len(results.cells)} runs collapse"
    return (
        f"{runs}; effective samples in the first {share:.0%} of the steps tell which with an AUC of {wins.mean():.2f}"
    )


def _shown(values: Sequence[float]) -> str:
    """`0.93 ± 0.02`, `4.8e-14 ± 1.4e-14`; with seeds that have no value, `412 ± 30 (4 of 5)`."""
    found = np.array([value for value in values if math.isfinite(value)])
    if not len(found):
        return ""
    mean, half = interval(found)
    size = abs(mean) or half
    digits = max(0, 2 - math.floor(math.log10(size))) if 0 < size < 100 else 0
    form = ".1e" if digits > 5 else f".{digits}f"
    text = f"{mean:{form}}" if len(found) == 1 else f"{mean:{form}} ± {half:{form}}"
    return text if len(found) == len(values) else f"{text} ({len(found)} of {len(values)})"


def draw(results: Results) -> Figure:
    """Draw reward over steps, final success, throughput and time to a target, and the staleness of trained tokens.

    Curves and bars are means over the seeds. Bands and error bars are 95 % intervals of the mean (`interval`), as far
    as they are within a panel.
    """
    series, columns = results.series(), results.labels(results.first_axis)
    bars = {"held-out success after the last step": lambda cell: cell.success}
    if (target := results.target) is not None:
        bars[RATE] = lambda cell: cell.tokens_per_second
        bars[f"seconds to held-out success {target:g}"] = lambda cell: cell.seconds_to(target)
    widths = [1.0] * len(series) + [max(1.0, len(series) * len(columns) / BARS_OF_A_PANEL)] * len(bars)
    figure = Figure(figsize=(3.75 * max(sum(widths), len(columns)), 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = cast(Any, figure.subfigures(2, 1))
    axes = upper.subplots(1, len(widths), width_ratios=widths)
    short = results.first_axis.rpartition("_")[2]
    ticks = {label: f"{short} {label}" for label in columns}
    if results.control in ticks and results.control != "synchronous":
        ticks[results.control] += " (sync)"
    for axis, (name, of_columns) in zip(axes, series.items(), strict=False):
        for label, cells in of_columns.items():
            _curve(axis, cells, label=ticks[label])
        axis.set(title=f"reward, {name}" if len(series) > 1 else "reward", xlabel="train step")
        means = [line.get_ydata() for line in axis.get_lines()]
        axis.set_ylim(min(0, *map(min, means)), max(1, *map(max, means)))  # bands may be wider
    axes[0].legend(fontsize="small")
    for axis, (title, value) in zip(axes[len(series) :], bars.items(), strict=True):
        _bars(axis, series, columns, value)
        axis.set(title=title, xlabel=results.first_axis)
        if title == RATE:
            _limits(axis, results)
        if len(axis.get_legend_handles_labels()[0]) > 1:
            axis.legend(fontsize="small", loc="upper left" if title == RATE else "lower right")
    axes[len(series)].set_ylim(0, 1)
    histograms = lower.subplots(1, len(columns), squeeze=False)[0]
    for axis, label in zip(histograms, columns, strict=True):
        _histogram(axis, {name: of_columns.get(label, []) for name, of_columns in series.items()})
        axis.set_title(f"staleness of trained tokens,\n{ticks[label]}")
    if len(series) > 1:
        histograms[0].legend(fontsize="small")
    return figure


def _curve(axis: Axes, cells: Sequence[CellResult], *, label: str) -> None:
    mean, half = interval(np.stack([_smooth(np.array(cell.rewards)) for cell in cells]))
    steps = cells[0].train_steps
    (line,) = axis.plot(steps, mean, label=label)
    axis.fill_between(steps, mean - half, mean + half, color=line.get_color(), alpha=0.15, linewidth=0)


def _limits(axis: Axes, results: Results) -> None:
    """Draw what limits the speed-up, as multiples of the synchronous speed."""
    if limits := [cell.s_max * cell.tokens_per_second for cell in results.cells if cell.s_max]:
        axis.axhline(float(np.mean(limits)), linestyle="--", color="grey", label="synchronous, times S_max")
    if results.limits_of_bounds:
        of_bounds = [
            np.mean([results.limit_of_bound(cell) * cell.tokens_per_second / results.speed_up(cell) for cell in cells])
            for cells in results.by_labels()
        ]
        places = np.arange(len(of_bounds))
        axis.hlines(of_bounds, places - 0.35, places + 0.35, color="black", label="limit of the bound")


def _bars(axis: Axes, series: Mapping[str, Any], ticks: Sequence[str], value: Any) -> None:
    width = 0.8 / len(series)
    for i, (name, of_columns) in enumerate(series.items()):
        found = [interval(np.array([value(cell) for cell in of_columns.get(label, [])] or [np.nan])) for label in ticks]
        heights, halves = (np.array(column) for column in zip(*found, strict=True))
        axis.bar(np.arange(len(ticks)) + i * width, heights, width, yerr=halves, label=name)
    axis.set_xticks(np.arange(len(ticks)) + width * (len(series) - 1) / 2, ticks)
    axis.set_ylim(bottom=0)
    if any(len(label) > LONG_LABEL for label in ticks):
        for text in axis.get_xticklabels():
            text.set(rotation=30, ha="right")


def _histogram(axis: Axes, series: Mapping[str, Sequence[CellResult]]) -> None:
    """Share of the trained tokens by staleness, over all seeds."""
    width = 0.8 / len(series)
    oldest = max((lag for cells in series.values() for cell in cells for lag in cell.staleness), default=0)
    for i, (name, cells) in enumerate(series.items()):
        counts = np.zeros(oldest + 1)
        for cell in cells:
            for lag, tokens in cell.staleness.items():
                counts[lag] += tokens
        axis.bar(np.arange(oldest + 1) + i * width, counts / max(counts.sum(), 1), width, label=name)
    axis.set(xlabel="optimizer steps", ylabel="share", xlim=(-0.5, oldest + 1))
    cast(Any, axis.xaxis.get_major_locator()).set_params(integer=True)


def _smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Trailing mean over up to `window` values: (1, 2, 3) with window=2 -> (1, 1.5, 2.5)."""
    return np.array([values[max(0, i + 1 - window) : i + 1].mean() for i in range(len(values))])


def _rounded(value: Any) -> Any:
    """JSON with numbers of `_DIGITS` digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in cast(dict[str, Any], value).items()}
    return [_rounded(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and draw the figure of each file, or print its differences.

    Returns:
        exit code: 0 on success, 2 if an experiment has no label of that axis.
    """
    parser = argparse.ArgumentParser(prog="python -m recipes.staleness.results", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results.json of an experiment")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the figures, EXPERIMENT.png each")
    parser.add_argument(
        "--against", metavar="AXIS=LABEL", help="instead print differences from the runs with this label"
    )
    arguments = parser.parse_args(argv)
    for path in arguments.files:
        results = Results.read(path)
        if arguments.against is None:
            show(results, arguments.out / f"{results.experiment}.png")
            continue
        axis, _, label = arguments.against.partition("=")
        try:
            sys.stdout.write("".join(f"{line}\n" for line in differences(results, axis=axis, label=label)))
        except ValueError as error:
            sys.stderr.write(f"error: {path}: {error}\n")
            return 2
    return 0


def show(results: Results, figure: Path) -> None:
    """Print the table, and write the figure."""
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw(results).savefig(figure, dpi=DPI, metadata={"Software": None})
    sys.stdout.write("".join(f"{line}\n" for line in table(results)) + f"\n{figure}\n")


if __name__ == "__main__":
    sys.exit(main())
