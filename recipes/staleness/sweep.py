"""`python -m recipes.staleness.sweep`: max_staleness x loss x seed, one run per cell, then one figure.

A finished cell is skipped; an unfinished cell resumes from its checkpoint. If the directory of a cell contains a run
with other settings, the sweep ends before any cell runs. The control is the synchronous run: its bound is the number of
optimizer steps per batch minus one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from async_rl.config import ConfigError, load_config
from async_rl.metrics.curves import include_unit_interval
from async_rl.metrics.report import RunRecord, read_run

RECIPE = Path(__file__).parent / "recipe.yaml"
SETTINGS_FILE = "settings.json"
SHOWN_DIFFERENCES = 5
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""0.975 quantile of Student's t distribution for 1 to 9 degrees of freedom; the last is also used for more."""
CELL_KEYS = {"staleness.max_staleness": "max_staleness", "loss": "loss", "seed": "seed"}
"""Config keys that differ between cells -> their names in the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the sweep."""

    loss_name: str
    """Name of the loss in the figure."""
    loss: str
    """Name of the file in configs/loss."""
    max_staleness: int
    """Bound in optimizer steps."""
    seed: int
    """Seed of the run."""

    @property
    def name(self) -> str:
        """Name of the directory, such as `naive-s7-seed0`."""
        return f"{self.loss_name}-s{self.max_staleness}-seed{self.seed}"

    def overrides(self) -> list[str]:
        """Overrides `key=value` of the run, one for its name and for each of CELL_KEYS."""
        return [
            f"name=staleness-{self.name}",
            f"loss={self.loss}",
            f"staleness.max_staleness={self.max_staleness}",
            f"seed={self.seed}",
        ]


def cells(recipe: dict[str, Any]) -> Iterator[Cell]:
    """All cells of the recipe, ordered by seed first."""
    for seed in recipe["cells"]["seed"]:
        for loss_name, loss in recipe["cells"]["loss"].items():
            for max_staleness in recipe["cells"]["max_staleness"]:
                yield Cell(loss_name=loss_name, loss=loss, max_staleness=max_staleness, seed=seed)


def with_cells(recipe: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The recipe with other cells, and the overrides that are the same in all cells.

    `seed=0,1` and `loss=naive,gspo` replace the seeds and the losses; a loss is a name of the recipe or of a preset.

    Raises:
        ConfigError: an override sets the name, which differs from cell to cell, or a bound or seed is not a number.
    """
    chosen, common = dict(recipe["cells"]), list[str]()
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "name":
            raise ConfigError(f"{word} would give all cells one name; leave it out, --out names the folder")
        if key not in CELL_KEYS:
            common.append(word)
        elif key == "loss":
            chosen["loss"] = {name: recipe["cells"]["loss"].get(name, name) for name in value.split(",")}
        else:
            try:
                chosen[CELL_KEYS[key]] = [int(number) for number in value.split(",")]
            except ValueError as error:
                raise ConfigError(f"{key} is {value!r}; give whole numbers, as in {key}=0,1") from error
    return {**recipe, "cells": chosen}, common


def settings_of(cell: Cell, overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value of the cell's config, without paths of outputs.

    Raises:
        ConfigError: the overrides are not a valid config, or the run would have no data for the figure.
    """
    config = load_config([*overrides, *cell.overrides()])
    for name, count in (
        ("validation.prompts", config.validation.prompts),
        ("total_train_steps", config.total_train_steps),
    ):
        if count == 0:
            raise ConfigError(f"{name} is 0, but the figure needs data; set at least 1")
    values = json.loads(json.dumps(asdict(config), default=str))
    return {key: value for key, value in _flat(values) if key not in ("output_dir", "warm_start.cache")}


def check_cell(cell: Cell, *, out: Path, settings: Mapping[str, Any]) -> None:
    """Check that the directory of a cell is empty or contains a run with the same settings.

    Raises:
        ConfigError: it does not; the message names the directory, the differences and a fix.
    """
    directory = out / cell.name
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    way_out = "give the settings of that run or another --out, or remove the directory"
    try:
        before = json.loads((directory / SETTINGS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} contains files of an unknown run ({error!r}); {way_out}") from error
    keys = [key for key in sorted({*before, *settings}) if before.get(key) != settings.get(key)]
    if keys:
        shown = [f"{key} was {before.get(key)!r}, is {settings.get(key)!r}" for key in keys[:SHOWN_DIFFERENCES]]
        more = f"; {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
        raise ConfigError(f"{directory} contains a run with other settings ({'; '.join(shown)}{more}); {way_out}")


def run_cell(cell: Cell, *, out: Path, overrides: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Run or resume a cell until it is finished; skip it if it is finished already.

    Raises:
        subprocess.CalledProcessError: the run failed; the cause is in its output.
    """
    directory = out / cell.name
    if (directory / "done").exists():
        sys.stdout.write(f"{cell.name}: already finished\n")
        return
    sys.stdout.write(f"{cell.name}: running\n")
    sys.stdout.flush()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
    command = [sys.executable, "-m", "async_rl.run", f"output_dir={directory}", *overrides, *cell.overrides()]
    subprocess.run(command, check=True)
    (directory / "done").touch()


def draw(runs: dict[Cell, RunRecord], *, synchronous: int) -> Figure:
    """Draw reward over steps, final success and throughput by bound, and the staleness of trained tokens.

    Curves and bars are means over the seeds. Bands and error bars are 95 % intervals of the mean (`interval`).

    Args:
        runs: records of all cells.
        synchronous: bound of the synchronous run, in optimizer steps.
    """
    losses = list(dict.fromkeys(cell.loss_name for cell in runs))
    label = partial(_label, synchronous=synchronous)
    bounds = list(dict.fromkeys(cell.max_staleness for cell in runs))
    figure = Figure(figsize=(3.75 * max(len(losses) + 2, len(bounds)), 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = cast(Any, figure.subfigures(2, 1))
    *curves, success, throughput = upper.subplots(1, len(losses) + 2)
    histograms = lower.subplots(1, len(bounds), squeeze=False)[0]
    for axis, loss_name in zip(curves, losses, strict=True):
        for bound in bounds:
            _curve(axis, _runs_of(runs, loss_name, bound), label=label(bound))
        axis.set(title=f"reward, {loss_name}", xlabel="train step")
        include_unit_interval(axis)
        axis.legend(fontsize="small")
    ticks = [label(bound) for bound in bounds]
    _bars(success, runs, losses, bounds, ticks, "held-out success after the last step", _success)
    _bars(throughput, runs, losses, bounds, ticks, "tokens trained per second", _tokens_per_second)
    for axis, bound in zip(histograms, bounds, strict=True):
        _histogram(axis, {loss_name: _runs_of(runs, loss_name, bound) for loss_name in losses}, bound)
        axis.set_title(f"staleness of trained tokens, {label(bound)}")
    return figure


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of `values` [seeds, ...] over the seeds, and half the width of its 95 % interval (Student's t).

    Values (0.4, 0.5, 0.6): 0.5 and 4.303 * 0.1 / sqrt(3) = 0.248. The half width of a single seed is 0.
    """
    seeds = len(values)
    if seeds == 1:
        return values[0], np.zeros_like(values[0])
    return values.mean(0), T_QUANTILES[min(seeds - 2, len(T_QUANTILES) - 1)] * values.std(0, ddof=1) / np.sqrt(seeds)


def _runs_of(runs: dict[Cell, RunRecord], loss_name: str, bound: int) -> list[RunRecord]:
    """The runs of all seeds for one loss and bound."""
    return [run for cell, run in runs.items() if (cell.loss_name, cell.max_staleness) == (loss_name, bound)]


def _curve(axis: Axes, runs: list[RunRecord], *, label: str) -> None:
    steps = runs[0].column("reward/mean")[0]
    mean, half = interval(np.stack([_smooth(run.column("reward/mean")[1]) for run in runs]))
    (line,) = axis.plot(steps, mean, label=label)
    axis.fill_between(steps, mean - half, mean + half, color=line.get_color(), alpha=0.15, linewidth=0)


def _bars(
    axis: Axes,
    runs: dict[Cell, RunRecord],
    losses: list[str],
    bounds: list[int],
    ticks: list[str],
    title: str,
    value: Callable[[RunRecord], float],
) -> None:
    width = 0.8 / len(losses)
    for i, loss_name in enumerate(losses):
        found = [interval(np.array([value(run) for run in _runs_of(runs, loss_name, bound)])) for bound in bounds]
        heights, halves = (np.array(column) for column in zip(*found, strict=True))
        axis.bar(np.arange(len(bounds)) + i * width, heights, width, yerr=halves, label=loss_name)
    axis.set_xticks(np.arange(len(bounds)) + width * (len(losses) - 1) / 2, ticks)
    axis.set_title(title)
    axis.legend(fontsize="small", loc="lower right")


def _histogram(axis: Axes, runs: dict[str, list[RunRecord]], bound: int) -> None:
    """Share of the trained tokens by staleness, over all seeds."""
    width = 0.8 / len(runs)
    steps_of = {loss_name: [step for run in of_loss for step in run.steps] for loss_name, of_loss in runs.items()}
    lags = [int(lag) for steps in steps_of.values() for step in steps for lag in step["staleness/tokens"]]
    oldest = max([bound, *lags])  # with policy mask, records also include tokens older than the bound
    for i, (loss_name, steps) in enumerate(steps_of.items()):
        counts = np.zeros(oldest + 1)
        for step in steps:
            for lag, tokens in step["staleness/tokens"].items():
                counts[int(lag)] += tokens
        axis.bar(np.arange(oldest + 1) + i * width, counts / counts.sum(), width, label=loss_name)
    axis.set(xlabel="optimizer steps", ylabel="share", ylim=(0, 1))
    cast(Any, axis.xaxis.get_major_locator()).set_params(integer=True)
    axis.legend(fontsize="small")


def _label(bound: int, *, synchronous: int) -> str:
    return f"s={bound} (sync)" if bound == synchronous else f"s={bound}"


def _success(run: RunRecord) -> float:
    """Success of the last validation; NaN, which draws no bar, if all its rollouts failed."""
    success = run.validations[-1]["validation/success"]
    return float("nan") if success is None else float(success)


def _tokens_per_second(run: RunRecord) -> float:
    """Trained tokens of all steps, divided by the time of all steps in seconds.

    Two steps of 100 tokens at 100 and 50 tokens per second take 3 s: 66.7 tokens per second.
    """
    tokens = np.array([sum(step["staleness/tokens"].values()) for step in run.steps])
    rates = np.array([step["throughput/tokens_per_s"] for step in run.steps])
    return float(tokens.sum() / (tokens / rates).sum())


def _smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Trailing mean over up to `window` values: (1, 2, 3) with window=2 -> (1, 1.5, 2.5)."""
    return np.array([values[max(0, i + 1 - window) : i + 1].mean() for i in range(len(values))])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs (dotted key, value) of nested mappings: {"a": {"b": 1}} -> ("a.b", 1). Empty mappings are values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep and write `staleness.png`.

    Returns:
        exit code: 0 on success, 1 if a run failed, 2 if a setting is wrong.
    """
    arguments = _parse(argv)
    recipe = yaml.safe_load(RECIPE.read_text())
    try:
        recipe, common = with_cells(recipe, arguments.overrides)
        overrides = [*recipe["overrides"], *common]
        chosen = {cell: settings_of(cell, overrides) for cell in cells(recipe)}
        for cell, settings in chosen.items():
            check_cell(cell, out=arguments.out, settings=settings)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for cell, settings in chosen.items():
        try:
            run_cell(cell, out=arguments.out, overrides=overrides, settings=settings)
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"error: cell {cell.name} ended with exit code {error.returncode}\n")
            return 1
    runs = {cell: read_run(arguments.out / cell.name) for cell in chosen}
    figure = draw(runs, synchronous=next(iter(chosen.values()))["trainer.updates_per_batch"] - 1)
    figure.savefig(arguments.out / "staleness.png", dpi=110)
    sys.stdout.write(f"{arguments.out / 'staleness.png'}\n")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.staleness.sweep",
        description="Runs every max_staleness with every loss and seed of recipe.yaml, one run per cell, and draws "
        "staleness.png. A finished cell is skipped, and an unfinished cell resumes. If the directory of a cell "
        "contains a run with other settings, the sweep ends before any cell runs.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/staleness"),
        help="folder of the figure and of one run directory per cell; default: %(default)s",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides for every cell, applied after recipe.yaml, such as total_train_steps=40; other values need "
        "another --out. seed=0,1 staleness.max_staleness=3,7 loss=naive,gspo choose other cells",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
