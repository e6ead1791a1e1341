"""`python -m recipes.staleness.sweep`: max_staleness x loss, one run a cell, then one figure.

A cell that already has all its train steps is not run again; one that was cut short continues from its checkpoint.
The synchronous run, max_staleness 0, is the control.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from async_rl.observe.report import RunRecord, read_run

RECIPE = Path(__file__).parent / "recipe.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the sweep."""

    loss_name: str
    loss: str
    max_staleness: int

    @property
    def name(self) -> str:
        return f"{self.loss_name}-s{self.max_staleness}"

    def overrides(self) -> list[str]:
        return [f"name=staleness-{self.name}", f"loss={self.loss}", f"staleness.max_staleness={self.max_staleness}"]


def cells(recipe: dict) -> Iterator[Cell]:
    """Every cell of the recipe."""
    for loss_name, loss in recipe["cells"]["loss"].items():
        for max_staleness in recipe["cells"]["max_staleness"]:
            yield Cell(loss_name=loss_name, loss=loss, max_staleness=max_staleness)


def run_cell(cell: Cell, *, out: Path, overrides: Sequence[str]) -> None:
    """Run a cell to its end, or skip it when it is there.

    Raises:
        subprocess.CalledProcessError: the run failed; its last lines say why.
    """
    directory = out / cell.name
    if (directory / "done").exists():
        sys.stdout.write(f"{cell.name}: done before\n")
        return
    sys.stdout.write(f"{cell.name}: running\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "async_rl.run", f"output_dir={directory}", *overrides, *cell.overrides()]
    subprocess.run(command, check=True)
    (directory / "done").touch()


def draw(runs: dict[Cell, RunRecord]) -> Figure:
    """Reward over steps, throughput and final success by bound, and the staleness of trained tokens."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 4)
    losses = list(dict.fromkeys(cell.loss_name for cell in runs))
    bounds = list(dict.fromkeys(cell.max_staleness for cell in runs))
    for axis, loss_name in zip(top[:2], losses, strict=False):
        for cell, run in runs.items():
            if cell.loss_name == loss_name:
                steps, reward = run.column("reward/mean")
                axis.plot(steps, _smooth(reward), label=_label(cell.max_staleness))
        axis.set(title=f"reward, {loss_name}", xlabel="train step", ylim=(0, 1))
        axis.legend(fontsize="small")
    _bars(top[2], runs, losses, bounds, "held-out success after the last step", _success)
    _bars(top[3], runs, losses, bounds, "tokens trained per second", _tokens_per_second)
    for axis, bound in zip(bottom, bounds, strict=False):
        _histogram(axis, {c.loss_name: r for c, r in runs.items() if c.max_staleness == bound}, bound)
    return figure


def _bars(
    axis: Axes,
    runs: dict[Cell, RunRecord],
    losses: list[str],
    bounds: list[int],
    title: str,
    value: Callable[[RunRecord], float],
) -> None:
    width = 0.8 / len(losses)
    for i, loss_name in enumerate(losses):
        heights = [value(r) for c, r in runs.items() if c.loss_name == loss_name]
        axis.bar(np.arange(len(bounds)) + i * width, heights, width, label=loss_name)
    axis.set_xticks(np.arange(len(bounds)) + width * (len(losses) - 1) / 2, [_label(b) for b in bounds])
    axis.set_title(title)
    axis.legend(fontsize="small", loc="lower right")


def _histogram(axis: Axes, runs: dict[str, RunRecord], bound: int) -> None:
    width = 0.8 / len(runs)
    for i, (loss_name, run) in enumerate(runs.items()):
        counts = np.zeros(bound + 1)
        for step in run.steps:
            for lag, tokens in step["staleness/tokens"].items():
                counts[int(lag)] += tokens
        axis.bar(np.arange(bound + 1) + i * width, counts / counts.sum(), width, label=loss_name)
    axis.set(
        title=f"staleness of trained tokens, {_label(bound)}", xlabel="optimizer updates", ylabel="share", ylim=(0, 1)
    )
    axis.set_xticks(range(bound + 1))
    axis.legend(fontsize="small")


def _label(bound: int) -> str:
    return "s=0 (sync)" if bound == 0 else f"s={bound}"


def _success(run: RunRecord) -> float:
    return float(run.validations[-1]["validation/success"])


def _tokens_per_second(run: RunRecord) -> float:
    """Sampled tokens trained over the time of all steps."""
    tokens = np.array([sum(step["staleness/tokens"].values()) for step in run.steps])
    rates = np.array([step["throughput/tokens_per_s"] for step in run.steps])
    return float(tokens.sum() / (tokens / rates).sum())


def _smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Trailing mean."""
    return np.array([values[max(0, i + 1 - window) : i + 1].mean() for i in range(len(values))])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep and write `staleness.png`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.staleness.sweep", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/staleness"))
    parser.add_argument("overrides", nargs="*", help="further overrides for every cell")
    arguments = parser.parse_args(argv)
    recipe = yaml.safe_load(RECIPE.read_text())
    chosen = list(cells(recipe))
    for cell in chosen:
        try:
            run_cell(cell, out=arguments.out, overrides=[*recipe["overrides"], *arguments.overrides])
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"error: cell {cell.name} ended with exit code {error.returncode}\n")
            return 1
    figure = draw({cell: read_run(arguments.out / cell.name) for cell in chosen})
    figure.savefig(arguments.out / "staleness.png", dpi=110)
    sys.stdout.write(f"{arguments.out / 'staleness.png'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
