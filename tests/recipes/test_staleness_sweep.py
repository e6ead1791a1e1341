"""Experiments with staleness: their cells, the runs of the cells, their results and the figure."""

import json
import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from async_rl.config import ConfigError, load_config
from async_rl.metrics.report import RunRecord
from recipes.staleness import results as stored
from recipes.staleness import sweep
from recipes.staleness.experiment import experiments, read_experiment
from recipes.staleness.results import (
    Results,
    _shown,
    collapses,
    draw,
    interval,
    most_speed_up,
    speed_up_of_bound,
    table,
)

MEASURED = Path(stored.__file__).with_name("measured")
IMAGES = Path(__file__).parents[2] / "docs" / "images"
LOSSES = read_experiment("losses").changed(["seed=0,1,2"])


@pytest.mark.parametrize("name", experiments())
def test_each_label_of_an_experiment_is_a_config_of_its_own(name):
    experiment = read_experiment(name)
    cells = list(experiment.cells())
    assert len({cell.name for cell in cells}) == len(cells)
    first, *others = cells
    one_changed = [cell for cell in others if sum(map(str.__ne__, cell.labels.values(), first.labels.values())) == 1]
    configs = [load_config([*experiment.overrides, *cell.overrides]) for cell in (first, *one_changed)]
    assert all(config != other for i, config in enumerate(configs) for other in configs[:i])
    assert experiment.control is None or experiment.control in next(iter(experiment.axes.values()))


def test_cells_are_all_combinations_seed_by_seed():
    cells = [tuple(cell.labels.values()) for cell in LOSSES.cells()]
    assert cells[:3] == [("3", "ppo_clip", "0"), ("3", "decoupled_ppo", "0"), ("7", "ppo_clip", "0")]
    assert len(set(cells)) == 18 and [seed for *_, seed in cells] == sorted(seed for *_, seed in cells)


def test_overrides_with_commas_choose_cells_and_add_axes():
    changed = LOSSES.changed(["seed=4", "loss=gspo", "optimizer.lr=1e-3", "trainer.updates_per_batch=1,2"])
    assert {name: list(axis) for name, axis in changed.axes.items()} == {
        "max_staleness": ["3", "7", "19"],
        "loss": ["gspo"],
        "seed": ["4"],
        "updates_per_batch": ["1", "2"],
    }
    assert changed.overrides[-1] == "optimizer.lr=1e-3"


def test_labels_of_an_axis_are_chosen_by_its_name():
    experiment = read_experiment("levels")
    assert list(experiment.changed(["level=partial,stale"]).axes["level"]) == ["partial", "stale"]
    with pytest.raises(ConfigError, match="'fast' is none of synchronous"):
        experiment.changed(["level=fast"])


def record(cell, *, reward=0.1, oldest=None):
    oldest = int(cell.labels["max_staleness"]) if oldest is None else oldest
    steps = [
        {
            "train_step": i,
            "reward/mean": reward * i,
            "step/seconds": 2.0,
            "idle/trainer": 0.75,
            "staleness/tokens": {str(min(i, oldest)): 10},
        }
        for i in range(1, 6)
    ]
    validations = [{"train_step": i, "validation/success": success} for i, success in ((0, 0.2), (3, 0.5), (5, 0.9))]
    return RunRecord(directory=Path(cell.name), steps=steps, validations=validations)


def results_of(experiment, **options):
    return Results.of(experiment, {cell: record(cell, **options) for cell in experiment.cells()})


def test_results_have_rates_times_and_ages(tmp_path):
    results = results_of(LOSSES.changed(["staleness.max_staleness=2", "loss=tis"]), reward=0.125)
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results
    cell = results.cells[0]
    assert (cell.seconds, cell.tokens_per_second, cell.success) == (10, 5, 0.9)
    assert cell.validations == [(0, 0.0, 0.2), (3, 6.0, 0.5), (5, 10.0, 0.9)]
    assert cell.staleness == {1: 10, 2: 40}
    assert cell.seconds_to(0.7) == pytest.approx(8) and cell.seconds_to(0.1) == 0
    assert np.isnan(cell.seconds_to(0.95))


def test_the_table_has_means_intervals_and_ratios_to_synchronous_training():
    experiment = LOSSES.changed(["staleness.max_staleness=3,7", "loss=tis", "seed=0,1"])
    runs = {cell: record(cell, reward=0.1 + 0.02 * int(cell.labels["seed"])) for cell in experiment.cells()}
    for cell, run in runs.items():  # bound 7 takes half of the time; seed 1 reaches the target in it
        for step in run.steps:
            step["step/seconds"] /= 2 if cell.labels["max_staleness"] == "7" else 1
        if (cell.labels["max_staleness"], cell.labels["seed"]) == ("7", "0"):
            run.validations[-1]["validation/success"] = 0.8
    heading, _, synchronous, ahead = table(Results.of(replace(experiment, target=0.9), runs))
    assert heading.startswith("| loss | max_staleness | success at the end | mean reward | tokens/s | / synchronous |")
    assert synchronous.startswith(
        "| tis | 3 | 0.900 ± 0.000 | 0.330 ± 0.381 | 5.00 ± 0.00 | 1.00 ± 0.00 | 10.0 ± 0.0 |"
    )
    assert ahead.startswith("| tis | 7 | 0.850 ± 0.635 | 0.330 ± 0.381 | 10.0 ± 0.0 | 2.00 ± 0.00 | 5.00 (1 of 2) |")
    untimed = Results.of(experiment, runs)
    assert next(table(untimed)).startswith(
        "| loss | max_staleness | success at the end | mean reward | staleness | k3 |"
    )
    assert len(draw(untimed).axes) == len(draw(replace(untimed, target=0.9)).axes) - 2


def test_the_table_shows_the_tokens_that_were_left_out():
    experiment = LOSSES.changed(["staleness.max_staleness=3", "loss=tis,dis", "seed=0"])
    runs = {cell: record(cell) for cell in experiment.cells()}
    ledger = {"ledger/trained_tokens": 60, "ledger/masked_tokens": 10, "ledger/dropped_tokens": 30}
    for run, counted in zip(runs.values(), (True, False), strict=True):
        run.steps[-1] |= {"length/trained_p90": 50.0, "length/offered_p90": 80.0, **(ledger if counted else {})}
    heading, _, left_out, whole = table(Results.of(experiment, runs))
    assert heading.endswith("| dropped or masked tokens | p90 length, trained / sampled |")
    assert left_out.endswith("| 0.400 | 0.625 |") and whole.endswith("| 0 | 0.625 |")
    assert "masked" not in next(table(results_of(experiment)))


def test_the_most_speed_up_counts_rollouts_that_wait_for_others():
    def span(kind, start, end):
        return {"cat": kind, "ts": start, "dur": end - start}

    first = [span("wait", 0, 10), span("trajectory", 0, 10), span("trajectory", 0, 2), span("train", 10, 12)]
    second = [span("wait", 12, 18), span("trajectory", 12, 18), span("trajectory", 12, 18), span("train", 18, 20)]
    g, unfinished = 16 / 20, (0.6 * 10 + 1.0 * 6) / 16
    events = [{"ph": "M"}, *first, *second]
    assert most_speed_up(events) == pytest.approx(1 / (1 - g + g * unfinished))
    assert most_speed_up([span("train", 0, 1)]) is None


def test_a_bound_limits_the_speed_up_by_the_slowest_rollout_of_each_batch():
    assert speed_up_of_bound([(4, 1), (2, 1)], ahead=1) == 8 / 6
    even = [(9.0, 1.0)] * 1000
    assert [speed_up_of_bound(even, ahead=ahead) for ahead in (0, 1, 4)] == pytest.approx([1, 2, 5], rel=0.01)
    assert speed_up_of_bound([(1.0, 4.0)] * 1000, ahead=4) == pytest.approx(1.25, rel=0.01), "limit of the trainer"
    experiment = replace(read_experiment("speed"), target=0.9).changed(["staleness.max_staleness=0,1", "seed=0,1"])
    heading, _, synchronous, ahead = table(results_of(experiment))
    at = heading.split("|").index(" limit of the bound ")
    (drawn,) = [lines for lines in draw(results_of(experiment)).axes[2].collections if "bound" in lines.get_label()]
    tokens_per_s = [segment[0, 1] for segment in drawn.get_segments()]
    assert tokens_per_s == pytest.approx([5, 5 * speed_up_of_bound([(1.5, 0.5)] * 5, ahead=1)])
    of_five = f"{speed_up_of_bound([(1.5, 0.5)] * 5, ahead=1):.2f} ± 0.00"
    assert [row.split("|")[at].strip() for row in (synchronous, ahead)] == ["1.00 ± 0.00", of_five]


def test_effective_samples_are_compared_between_runs_that_collapse_and_others():
    experiment = LOSSES.changed(["staleness.max_staleness=3,7", "loss=tis", "seed=0,1"])
    collapsing, least = [True, True, False, False], [0.2, 0.6, 0.5, 0.9]
    runs = {cell: record(cell) for cell in experiment.cells()}
    for run, collapses_, value in zip(runs.values(), collapsing, least, strict=True):
        for step, effective in zip(run.steps, (value, 1.0, 0.0, None, 0.0), strict=True):
            step["ess/token"] = effective
            step["reward/mean"] = 1.0 if step["train_step"] == 1 or not collapses_ else 0.1
    assert collapses(Results.of(experiment, runs), share=0.4) == (
        "2 of 4 runs collapse; effective samples in the first 40% of the steps tell which with an AUC of 0.75"
    )
    assert collapses(results_of(experiment)) is None


def test_differences_are_of_pairs_with_the_same_seed(tmp_path, capsys):
    experiment = replace(LOSSES, target=0.9).changed(["staleness.max_staleness=3,7", "loss=tis,dis", "seed=0,1,2"])
    rewards = {"3": (0.3, 0.5, 0.5), "7": (0.4, 0.5, 0.6)}
    runs = {
        cell: record(cell, reward=rewards[cell.labels["max_staleness"]][int(cell.labels["seed"])] / 3)
        for cell in experiment.cells()
    }
    for cell, run in runs.items():  # bound 7 takes half of the time
        for step in run.steps:
            step["step/seconds"] /= 2 if cell.labels["max_staleness"] == "7" else 1
    Results.of(experiment, runs).write(tmp_path / "results.json")
    assert stored.main([str(tmp_path / "results.json"), "--against", "max_staleness=3"]) == 0
    heading, _, *rows = capsys.readouterr().out.splitlines()
    assert heading == "| max_staleness | loss | success at the end | mean reward | tokens/s, ratio |"
    half = 4.303 * 0.1 / 3  # deviation 0.1 / sqrt(3), over sqrt(3)
    assert rows == [f"| 7 | {loss} | 0 ± 0 | 0.0667 ± {half:.4f} | 2.00 ± 0.00 |" for loss in ("tis", "dis")]
    for against, message in (("bound=3", "'bound' is none of the axes"), ("loss=gspo", "'gspo' is none of the labels")):
        assert stored.main([str(tmp_path / "results.json"), "--against", against]) == 2
        assert message in capsys.readouterr().err


def test_intervals_of_one_seed_and_around_zero_are_shown_with_their_digits():
    assert [each.tolist() for each in interval(np.array([[1.0, 2.0]]))] == [[1, 2], [0, 0]]
    assert _shown([-0.05, 0.05]) == "0.000 ± 0.635" and _shown([0.0, 0.0]) == "0 ± 0"


class Runs:
    """Takes the place of subprocess.run: writes the records of a run.

    Cells named in `failing` fail, and those in `stopped` end as a run does after Ctrl-C.
    """

    def __init__(self, monkeypatch, *, failing=(), stopped=()):
        self.names, self.commands, self.failing, self.stopped = [], [], set(failing), set(stopped)
        monkeypatch.setattr(sweep.subprocess, "run", self)

    def __call__(self, command, check):
        directory = Path(command[3].removeprefix("output_dir="))
        self.commands.append(command)
        self.names.append(directory.name)
        if directory.name in self.failing:
            return subprocess.CompletedProcess(command, 1)
        if directory.name in self.stopped:
            return subprocess.CompletedProcess(command, 0)
        (cell,) = [cell for cell in LOSSES.cells() if cell.name == directory.name]
        run = record(cell)
        for name, lines in (("metrics.jsonl", run.steps), ("validation.jsonl", run.validations)):
            (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (directory / "final").mkdir()
        return subprocess.CompletedProcess(command, 0)


def run(out, *words):
    return sweep.main(["losses", "--out", str(out), "seed=0", *words])


LAST = "max_staleness_19-loss_decoupled_ppo-seed_0"
FIRST = "max_staleness_3-loss_ppo_clip-seed_0"


def test_a_finished_cell_is_not_rerun_and_a_failed_one_stops_the_sweep(tmp_path, monkeypatch):
    runs = Runs(monkeypatch, failing=["max_staleness_7-loss_ppo_clip-seed_0"])
    assert run(tmp_path, "optimizer.lr=1e-3") == 1
    assert len(runs.commands) == 3 and all("optimizer.lr=1e-3" in command for command in runs.commands)
    same = ["optimizer.lr=1", "optimizer.lr=0.001"]  # settings are compared by value
    assert run(tmp_path, *same) == 1
    assert len(runs.commands) == 4, "the two finished cells are skipped"
    runs.failing.clear()
    assert run(tmp_path, *same) == 0
    assert len(runs.commands) == 8 and (tmp_path / "figure.png").is_file()
    assert len(Results.read(tmp_path / "results.json").cells) == 6


def test_a_stopped_cell_is_continued_by_the_same_command(tmp_path, monkeypatch, capsys):
    runs = Runs(monkeypatch, stopped=[LAST])
    assert run(tmp_path) == 1
    assert f"error: cell {LAST} was stopped before its end" in capsys.readouterr().err
    runs.stopped.clear()
    assert run(tmp_path) == 0
    assert runs.names.count(LAST) == 2 and len(runs.names) == 7


def test_an_interrupt_starts_no_further_cell(tmp_path, monkeypatch):
    events = []

    def made():
        events.append(threading.Event())
        return events[-1]

    class Interrupted(Runs):
        def __call__(self, command, check):
            os.kill(os.getpid(), signal.SIGINT)  # to the main thread
            assert events[0].wait(60), "nothing stops the next cell"
            return super().__call__(command, check)

    monkeypatch.setattr(sweep, "Event", made)
    runs = Interrupted(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(runs.commands) == 1


def test_cells_follow_the_schedule_of_the_first_label(tmp_path, monkeypatch):
    runs, followed = Runs(monkeypatch), replace(LOSSES, same_schedule="loss")
    monkeypatch.setattr(sweep, "read_experiment", lambda _name: followed)
    assert run(tmp_path, "--jobs", "8") == 0
    schedules = {
        name: [word for word in command if word.startswith("schedule=")]
        for name, command in zip(runs.names, runs.commands, strict=True)
    }
    assert schedules.pop(LAST) == [f"schedule={tmp_path / 'max_staleness_19-loss_ppo_clip-seed_0'}"]
    assert schedules.pop(FIRST) == []
    assert runs.names.index(LAST) > runs.names.index("max_staleness_19-loss_ppo_clip-seed_0")
    settings = json.loads((tmp_path / LAST / sweep.SETTINGS_FILE).read_text())
    assert settings["schedule"] == "max_staleness_19-loss_ppo_clip-seed_0"


@pytest.mark.parametrize("cell", [LAST, FIRST], ids=["finished", "cut-short"])
def test_a_cell_with_other_settings_is_refused_before_any_cell_runs(tmp_path, monkeypatch, capsys, cell):
    runs = Runs(monkeypatch, failing=[cell])  # either some cells are finished, or the first is cut short
    assert run(tmp_path, "optimizer.lr=1e-3") == 1
    runs.commands.clear()
    capsys.readouterr()
    assert run(tmp_path, "optimizer.lr=1e-4") == 2
    error = capsys.readouterr().err
    assert "optimizer.lr" in error and FIRST in error and not runs.commands


def test_a_cell_of_unknown_settings_is_refused(tmp_path, monkeypatch, capsys):
    runs = Runs(monkeypatch)
    (tmp_path / LAST).mkdir()
    (tmp_path / LAST / "done").touch()
    assert run(tmp_path) == 2
    assert LAST in capsys.readouterr().err and not runs.commands


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["losses", "validation.prompts=0"], "validation.prompts"),
        (["losses", "total_train_steps=0", "optimizer.decay=constant"], "total_train_steps"),
        (["losses", "optimizer.lr=fast"], "optimizer.lr"),
        (["losses", "wish=1"], "wish"),
        (["losses", "seed=many"], "seed"),
        (["losses", "staleness.max_staleness=3,x"], "staleness.max_staleness"),
        (["losses", "loss=wish"], "wish"),
        (["losses", "name=x"], "name"),
        (["losses", "seed"], "'seed' is no override"),
        (["wish"], "wish"),
    ],
)
def test_settings_that_give_no_figure_are_refused_before_any_cell_runs(tmp_path, monkeypatch, capsys, words, field):
    runs = Runs(monkeypatch)
    assert sweep.main([*words, "--out", str(tmp_path)]) == 2
    assert field in capsys.readouterr().err and not runs.commands


@pytest.mark.parametrize("path", sorted(MEASURED.glob("*.json")), ids=lambda path: path.stem)
def test_figures_and_tables_of_the_documents_are_those_of_stored_results(path, tmp_path, capsys):
    assert stored.main([str(path), "--out", str(tmp_path / "figures")]) == 0
    *rows, _, figure = capsys.readouterr().out.splitlines()
    document = (MEASURED.parent / "README.md").read_text()
    assert all(row in document for row in rows)
    drawn, shown = (imread(folder / Path(figure).name) for folder in (tmp_path / "figures", IMAGES))
    assert drawn.shape == shown.shape and np.abs(drawn - shown).mean() < 1e-3
