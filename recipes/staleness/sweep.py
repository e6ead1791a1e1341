"""`python -m recipes.staleness.sweep EXPERIMENT`: one run for each cell of an experiment, then a table and a figure.

A finished cell is skipped; an unfinished cell resumes from its checkpoint. If the directory of a cell contains a run
with other settings, the command ends before any cell runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from async_rl.config import ConfigError, load_config
from async_rl.files.command import end_process
from async_rl.metrics.report import read_run

from .experiment import Cell, Experiment, experiments, read_experiment
from .results import Results, show

SETTINGS_FILE = "settings.json"
SHOWN_DIFFERENCES = 5


class CellError(RuntimeError):
    """A cell whose run is not finished."""


def settings_of(cell: Cell, experiment: Experiment) -> dict[str, Any]:
    """Dotted key -> value of the cell's config, without paths of outputs.

    Raises:
        ConfigError: the overrides are not a valid config, or the run would have no data for the figure.
    """
    own = [f"name={cell.name}", *([] if cell.schedule is None else [f"schedule={cell.schedule}"])]
    config = load_config([*experiment.overrides, *cell.overrides, *own])
    for name, count in (
        ("validation.prompts", config.validation.prompts),
        ("total_train_steps", config.total_train_steps),
    ):
        if count == 0:
            raise ConfigError(f"{name} is 0, but the figure needs data; set at least 1")
    values = json.loads(json.dumps(asdict(config), default=str))
    found = {key: value for key, value in _flat(values) if key not in ("output_dir", "warm_start.cache")}
    return found | {"schedule": cell.schedule}


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
        CellError: the run failed, and the cause is in its output, or it was stopped.
    """
    directory = out / cell.name
    if (directory / "done").exists():
        sys.stdout.write(f"{cell.name}: already finished\n")
        return
    sys.stdout.write(f"{cell.name}: running\n")
    sys.stdout.flush()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
    own = [f"output_dir={directory}", f"name={cell.name}"]
    if cell.schedule is not None:
        own.append(f"schedule={out / cell.schedule}")
    ended = subprocess.run([sys.executable, "-m", "async_rl.run", *own, *overrides, *cell.overrides], check=False)
    if ended.returncode:
        raise CellError(f"cell {cell.name} ended with exit code {ended.returncode}")
    if not (directory / "final").is_dir():  # its exit code is 0 after Ctrl-C too
        raise CellError(f"cell {cell.name} was stopped before its end; the same command continues it")
    (directory / "done").touch()


def run_cells(chosen: Mapping[Cell, Mapping[str, Any]], *, out: Path, overrides: Sequence[str], jobs: int) -> list[str]:
    """Run all cells, `jobs` at a time; none is started after a failure or Ctrl-C.

    Returns:
        a line for each cell that is not finished.
    """
    failed, stop = list[str](), Event()
    ended = {cell.name: Event() for cell in chosen}

    def run(cell: Cell) -> None:
        if cell.schedule is not None:
            ended[cell.schedule].wait()  # an earlier cell, so that it was started before
        try:
            if not stop.is_set():
                run_cell(cell, out=out, overrides=overrides, settings=chosen[cell])
        except CellError as error:
            stop.set()
            failed.append(str(error))
        finally:
            ended[cell.name].set()

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(run, chosen))
        except KeyboardInterrupt:
            stop.set()
            raise
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run an experiment, and write `results.json` and `figure.png`.

    Returns:
        exit code: 0 on success, 1 if a run failed, 2 if a setting is wrong.
    """
    arguments = _parse(argv)
    try:
        experiment = read_experiment(arguments.experiment).changed(arguments.overrides)
        out = arguments.out or Path("outputs/staleness") / experiment.name
        chosen = {cell: settings_of(cell, experiment) for cell in experiment.cells()}
        for cell, settings in chosen.items():
            check_cell(cell, out=out, settings=settings)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if failed := run_cells(chosen, out=out, overrides=experiment.overrides, jobs=arguments.jobs):
        sys.stderr.write("".join(f"error: {text}\n" for text in failed))
        return 1
    results = Results.of(experiment, {cell: read_run(out / cell.name) for cell in chosen})
    results.write(out / "results.json")
    show(results, out / "figure.png")
    return 0


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs (dotted key, value) of nested mappings: {"a": {"b": 1}} -> ("a.b", 1). Empty mappings are values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.staleness.sweep",
        description="Runs every cell of an experiment and draws figure.png. A finished cell is skipped, and an "
        "unfinished cell resumes. If the directory of a cell contains a run with other settings, the command ends "
        "before any cell runs.",
    )
    parser.add_argument("experiment", help=f"one of {', '.join(experiments())}")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder of results.json, of the figure and of one run directory per cell; default: "
        "outputs/staleness/EXPERIMENT",
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; more than one disturbs measured times")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides for every cell, such as total_train_steps=40; other values need another --out. Values with "
        "commas choose the cells: seed=0,1 loss=ppo_clip,gspo",
    )
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    end_process(f"{__package__}.sweep")  # in a wheel, a package of async_rl
