"""The staleness sweep: its cells, their runs, and its figure."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from async_rl.config import load_config
from async_rl.metrics.report import RunRecord
from recipes.staleness import sweep

RECIPE = yaml.safe_load(sweep.RECIPE.read_text())


@pytest.fixture(autouse=True)
def one_seed(tmp_path_factory, monkeypatch):
    """Each cell costs a composed config, so that the sweeps here have the cells of one seed."""
    recipe = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "cells": {**RECIPE["cells"], "seed": [0]}}, sort_keys=False))
    monkeypatch.setattr(sweep, "RECIPE", recipe)


def test_every_cell_builds_a_run_with_its_bound_and_its_loss():
    seen = set()
    for cell in sweep.cells(RECIPE):
        config = load_config([*RECIPE["overrides"], *cell.overrides()])
        seen.add((config.staleness.max_staleness, config.loss.name, config.seed))
    assert seen == {(s, loss, seed) for s in (3, 7, 19) for loss in ("ppo_clip", "decoupled_ppo") for seed in (0, 1, 2)}


def record(cell, *, oldest=None, reward=0.1):
    oldest = cell.max_staleness if oldest is None else oldest
    steps = [
        {
            "train_step": i,
            "reward/mean": reward * i,
            "throughput/tokens_per_s": 100.0,
            "staleness/tokens": {str(min(i, oldest)): 10},
        }
        for i in range(1, 6)
    ]
    return RunRecord(name=cell.name, steps=steps, validations=[{"train_step": 5, "validation/success": 0.5}])


def test_the_figure_shows_means_over_seeds_with_their_intervals():
    chosen = list(sweep.cells({"cells": {"loss": {"naive": "ppo_clip"}, "max_staleness": [0], "seed": [0, 1, 2]}}))
    runs = {cell: record(cell, reward=0.1 + 0.03 * cell.seed) for cell in chosen}
    curve = sweep.draw(runs, synchronous=0).axes[0]
    mean, half = 0.13, 4.303 * 0.03 / 3**0.5  # rewards of the first step: 0.1, 0.13, 0.16
    assert curve.lines[0].get_ydata()[0] == pytest.approx(mean)
    band = curve.collections[0].get_paths()[0].vertices
    at_first = band[band[:, 0] == 1, 1]
    assert (at_first.min(), at_first.max()) == pytest.approx((mean - half, mean + half))
    mean, half = sweep.interval(sweep.np.array([[1.0, 2.0]]))
    assert mean.tolist() == [1, 2] and half.tolist() == [0, 0], "the interval of one seed"


def test_the_figure_shows_tokens_that_are_older_than_the_bound():
    cell = sweep.Cell(loss_name="naive", loss="ppo_clip", max_staleness=1, seed=0)
    histogram = sweep.draw({cell: record(cell, oldest=3)}, synchronous=0).axes[-1]
    assert [patch.get_height() for patch in histogram.patches] == pytest.approx([0, 0.2, 0.2, 0.6])


class Runs:
    """Takes the place of subprocess.run: writes the records of a run. Cells named in `failing` fail."""

    def __init__(self, monkeypatch, *, failing=()):
        self.commands, self.failing = [], set(failing)
        monkeypatch.setattr(sweep.subprocess, "run", self)

    def __call__(self, command, check):
        self.commands.append(command)
        directory = Path(command[3].removeprefix("output_dir="))
        if directory.name in self.failing:
            raise subprocess.CalledProcessError(1, command)
        bound = next(int(o.rpartition("=")[2]) for o in command if o.startswith("staleness.max_staleness="))
        run = record(sweep.Cell(loss_name="", loss="", max_staleness=bound, seed=0))
        for name, lines in (("metrics.jsonl", run.steps), ("validation.jsonl", run.validations)):
            (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_finished_cell_is_not_run_again_and_a_failed_one_stops_the_sweep(tmp_path, monkeypatch):
    runs = Runs(monkeypatch, failing=["naive-s19-seed0"])
    assert sweep.main(["--out", str(tmp_path), "optimizer.lr=1e-3"]) == 1
    assert len(runs.commands) == 3 and all("optimizer.lr=1e-3" in command for command in runs.commands)
    same = ["optimizer.lr=1", "optimizer.lr=0.001"]  # settings are compared by value
    assert sweep.main(["--out", str(tmp_path), *same]) == 1
    assert len(runs.commands) == 4, "the two finished cells are skipped"
    runs.failing.clear()
    assert sweep.main(["--out", str(tmp_path), *same]) == 0
    assert len(runs.commands) == 8 and (tmp_path / "staleness.png").is_file()


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "cut-short"])
def test_a_cell_with_other_settings_is_refused_before_any_cell_runs(tmp_path, monkeypatch, capsys, finished):
    # Either some cells are finished, or the first is cut short.
    runs = Runs(monkeypatch, failing=["decoupled-s3-seed0" if finished else "naive-s3-seed0"])
    assert sweep.main(["--out", str(tmp_path), "optimizer.lr=1e-3"]) == 1
    runs.commands.clear()
    capsys.readouterr()
    assert sweep.main(["--out", str(tmp_path), "optimizer.lr=1e-4"]) == 2
    error = capsys.readouterr().err
    assert "optimizer.lr" in error and "naive-s3-seed0" in error
    assert not runs.commands


def test_a_cell_of_unknown_settings_is_refused(tmp_path, monkeypatch, capsys):
    runs = Runs(monkeypatch)
    (tmp_path / "naive-s7-seed0").mkdir()
    (tmp_path / "naive-s7-seed0" / "done").touch()
    assert sweep.main(["--out", str(tmp_path)]) == 2
    assert "naive-s7" in capsys.readouterr().err and not runs.commands


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["validation.prompts=0"], "validation.prompts"),
        (["total_train_steps=0", "optimizer.decay=constant"], "total_train_steps"),
        (["optimizer.lr=fast"], "optimizer.lr"),
        (["wish=1"], "wish"),
        (["seed=many"], "seed"),
        (["staleness.max_staleness=3,x"], "staleness.max_staleness"),
        (["loss=wish"], "wish"),
        (["name=x"], "name"),
    ],
)
def test_settings_that_give_no_figure_are_refused_before_any_cell_runs(tmp_path, monkeypatch, capsys, overrides, field):
    runs = Runs(monkeypatch)
    assert sweep.main(["--out", str(tmp_path), *overrides]) == 2
    assert field in capsys.readouterr().err and not runs.commands


def test_values_with_commas_choose_other_cells():
    recipe, common = sweep.with_cells(RECIPE, ["seed=4,5", "loss=naive,gspo", "optimizer.lr=1e-3"])
    found = {(cell.loss_name, cell.loss, cell.max_staleness, cell.seed) for cell in sweep.cells(recipe)}
    losses = (("naive", "ppo_clip"), ("gspo", "gspo"))
    assert found == {(*loss, s, seed) for loss in losses for s in (3, 7, 19) for seed in (4, 5)}
    assert common == ["optimizer.lr=1e-3"]


def test_smoothing_is_a_trailing_mean():
    values = sweep.np.array([0.0, 3.0, 6.0])
    assert sweep._smooth(values, 1).tolist() == [0, 3, 6]
    assert sweep._smooth(values, 3).tolist() == [0, 1.5, 3]
