"""The staleness sweep: its cells, its figure, and that finished cells are not run again."""

import subprocess

import pytest
import yaml

from async_rl.config import load_config
from async_rl.observe.report import RunRecord
from recipes.staleness import sweep

RECIPE = yaml.safe_load(sweep.RECIPE.read_text())


def test_every_cell_builds_a_run_with_its_bound_and_its_loss():
    seen = set()
    for cell in sweep.cells(RECIPE):
        config = load_config([*RECIPE["overrides"], *cell.overrides()])
        seen.add((config.staleness.max_staleness, config.loss.name))
    assert seen == {(s, loss) for s in (0, 1, 2, 4) for loss in ("ppo_clip", "decoupled_ppo")}


def test_the_figure_shows_every_cell():
    runs = {}
    for cell in sweep.cells(RECIPE):
        steps = [
            {
                "train_step": i,
                "reward/mean": 0.1 * i,
                "throughput/tokens_per_s": 100.0,
                "staleness/tokens": {str(min(i, cell.max_staleness)): 10},
            }
            for i in range(1, 6)
        ]
        validations = [{"train_step": 5, "validation/success": 0.5}]
        runs[cell] = RunRecord(name=cell.name, steps=steps, validations=validations)
    figure = sweep.draw(runs)
    assert [len(axis.lines) for axis in figure.axes[:2]] == [4, 4]
    assert [len(axis.patches) for axis in figure.axes[2:]] == [8, 8, 2, 4, 6, 10]


def test_a_finished_cell_is_not_run_again_and_a_failed_one_stops_the_sweep(tmp_path, monkeypatch):
    commands = []

    def run(command, check):
        commands.append(command)
        if "staleness.max_staleness=2" in command:
            raise subprocess.CalledProcessError(1, command)
        (tmp_path / command[3].rpartition("/")[2]).mkdir(exist_ok=True)

    monkeypatch.setattr(sweep.subprocess, "run", run)
    assert sweep.main(["--out", str(tmp_path), "seed=3"]) == 1
    assert len(commands) == 3 and all("seed=3" in command for command in commands)
    assert sweep.main(["--out", str(tmp_path)]) == 1
    assert len(commands) == 4, "the two finished cells are skipped"


@pytest.mark.parametrize("window", [1, 3])
def test_smoothing_is_a_trailing_mean(window):
    values = sweep.np.array([0.0, 3.0, 6.0])
    assert sweep._smooth(values, window).tolist() == ([0, 3, 6] if window == 1 else [0, 1.5, 3])
