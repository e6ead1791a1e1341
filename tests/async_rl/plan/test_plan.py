"""The command `async_rl.plan`."""

import json
from pathlib import Path

import pytest

from async_rl.plan.__main__ import main

WINS = """
cluster: {gpus: 8, train_gpus: 2, synchronous: colocated}
workload:
  groups_per_batch: 16
  trajectories_per_group: 4
  lengths: {kind: lognormal, mean: 500, cv: 1.5, maximum: 8000}
rates: {decode_s: 0.01, max_running: 16, train_tokens_per_s: 1000, model_bytes: 1.0e+9}
staleness: {max_staleness: 3}
"""
LOSES = WINS.replace("train_tokens_per_s: 1000", "train_tokens_per_s: 40").replace("cv: 1.5", "cv: 0.1")


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        (tmp_path / "plan.yaml").write_text(text)
        return str(tmp_path / "plan.yaml")

    return write


def test_plan_of_a_run_that_pays_has_all_figures_and_no_warning(file, capsys):
    assert main([file(WINS), "--steps", "4"]) == 0
    shown, warned = capsys.readouterr()
    assert not warned
    for row in ("speed-up", "S_max", "staleness, p99", "length, trained over ended", "weights, GB/s", "rollouts, MB/s"):
        assert row in shown
    assert main([file(WINS), "--steps", "4", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["best"]["speed_up"] >= values["given"]["speed_up"] > 1
    assert values["given"]["seen"]["sync_bytes_per_s"] == pytest.approx(6e9 / values["given"]["seen"]["step_s"])


def test_plan_of_ten_thousand_gpus(file, capsys):
    large = WINS.replace("gpus: 8, train_gpus: 2", "gpus: 10000, train_gpus: 4000").replace("batch: 16", "batch: 4096")
    assert main([file(large), "--steps", "2", "--no-search", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)["given"]
    assert given["replicas"] == 6000
    assert given["speed_up"] < given["s_max"]
    tokens_of_step = given["seen"]["tokens_per_s"] * given["seen"]["step_s"]
    assert tokens_of_step == pytest.approx(4096 * 4 * 500, rel=0.1)


def test_plan_warns_of_a_run_that_would_lose(file, capsys):
    assert main([file(LOSES), "--steps", "4", "--no-search"]) == 1
    assert "train_gpus=2 is slower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("gpus: 8", "gpus: 2", "cluster.train_gpus"),
        ("decode_s: 0.01", "decode_s: 0", "rates.decode_s"),
        ("cv: 1.5", "spread: 1", "workload.lengths.spread"),
        ("staleness:", "stale:", "stale"),
        ("kind: lognormal", "kind: empirical", "values"),
        ("staleness: {max_staleness: 3}", "staleness: {max_staleness: 1}\npublish: {every: 3}", "publish.every=3"),
    ],
)
def test_plan_refuses_what_makes_no_sense(file, capsys, old, new, named):
    assert main([file(WINS.replace(old, new)), "--steps", "1"]) == 2
    assert named in capsys.readouterr().err


def test_plan_of_a_run_that_publishes_every_second_batch_has_a_synchronous_one_that_publishes_each(file, capsys):
    assert main([file(WINS + "publish: {every: 2}\n"), "--steps", "2", "--no-search", "--json"]) == 0
    synchronous = json.loads(capsys.readouterr().out)["synchronous"]
    assert synchronous["sync_bytes_per_s"] == pytest.approx(8e9 / synchronous["step_s"])


def test_plan_names_the_share_of_groups_without_a_gradient(file, capsys):
    text = WINS.replace("  lengths", "  without_signal: 0.81\n  lengths")
    assert main([file(text), "--steps", "1", "--no-search"]) == 0
    warned = capsys.readouterr().err
    assert "81% of the groups" in warned and "rollout.drop_without_spread" in warned
