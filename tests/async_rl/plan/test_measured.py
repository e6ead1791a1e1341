"""Rates that are read from the directory of a run."""

import json

import numpy as np
import pytest
import yaml

from async_rl.plan.__main__ import main
from async_rl.plan.measured import describe_run
from async_rl.plan.simulation import simulate_synchronous

DECODE_S, PER_REQUEST_S, TRAIN_S, PAUSE_S = 0.01, 0.002, 3.0, 0.5
CONFIG = {
    "engine": {"replicas": 1, "device": "cpu", "threads": 1, "max_num_seqs": 64},
    "trainer": {"ranks": 1, "threads": 2},
    "staleness": {"max_staleness": 0, "policy": "wait", "max_requeues": 3},
    "rollout": {
        "groups_per_batch": 32,
        "trajectories_per_group": 1,
        "workers": 1,
        "on_update": "resume",
        "kv": "recompute",
    },
    "sync": {"mode": "at_once", "max_paused": 1},
}


@pytest.fixture
def run(tmp_path):
    """A synchronous run of 12 steps of 32 groups, whose requests share the decode steps of one replica."""
    draw, at, metrics, schedule, events = np.random.default_rng(0), 0.0, [], [], []
    for step in range(12):
        lengths = np.sort(draw.integers(5, 200, 32))
        steps_s = DECODE_S + PER_REQUEST_S * np.arange(32, 0, -1)  # while 32, 31, ... requests run
        ends = (np.diff(lengths, prepend=0) * steps_s).cumsum()
        groups = enumerate(lengths.tolist(), 32 * step)
        schedule.append({"groups": [{"group": group, "spans": [[[step, length]]]} for group, length in groups]})
        for group, end in enumerate(ends, 32 * step):
            took = {"ts": 1e6 * at, "dur": 1e6 * float(end)}
            events.append({"ph": "X", "cat": "rollout", "args": {"group": group}, **took})
        seconds = float(ends[-1]) + TRAIN_S + PAUSE_S
        metrics.append(
            {"step/seconds": seconds, "idle/trainer": 1 - TRAIN_S / seconds, "staleness/mean": 0}
            | {"sync/seconds": PAUSE_S, "sync/pause_seconds": PAUSE_S}
        )
        at += seconds
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    for name, lines in (("metrics", metrics), ("schedule", schedule)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "trace.json").write_text("".join(["[\n", *(json.dumps(event) + ",\n" for event in events)]))
    return tmp_path


def test_rates_of_a_run_predict_its_step(run):
    described = describe_run(run, cores=2)
    rates = described.rates
    found = (rates.decode_s, rates.decode_s_per_request, rates.load_s, rates.shared_speed)
    assert found == pytest.approx((DECODE_S, PER_REQUEST_S, PAUSE_S, 2 / 4), rel=0.1)
    seconds = np.mean([json.loads(line)["step/seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert simulate_synchronous(described, steps=24).step_s == pytest.approx(seconds, rel=0.1)


def test_rates_of_an_asynchronous_run_are_faster_on_cores_of_their_own(run):
    alone = describe_run(run, cores=2).rates
    (run / "config.yaml").write_text(
        yaml.safe_dump(CONFIG | {"staleness": {**CONFIG["staleness"], "max_staleness": 1}})
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][6:]
    busy = TRAIN_S / np.mean([step["step/seconds"] for step in steps])
    shared = describe_run(run, cores=2).rates
    assert shared.decode_s == pytest.approx(alone.decode_s * (1 - busy / 2))
    assert shared.train_tokens_per_s == pytest.approx(alone.train_tokens_per_s * 2)
    assert describe_run(run, cores=4).rates.shared_speed == 1


def test_plan_of_a_run_is_made_for_another_bound(run, capsys):
    assert main(["--run", str(run), "--bound", "2", "--no-search", "--steps", "4", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["given"]["seen"]["staleness_p99"] == 2


def test_rates_are_found_though_validations_last_as_long_as_the_run(run):
    alone = describe_run(run, cores=2).rates
    with (run / "trace.json").open("a") as file:
        file.write(json.dumps({"ph": "X", "cat": "validate", "args": {}, "ts": 0, "dur": 1e12}) + ",\n")
    assert describe_run(run, cores=2).rates.decode_s == pytest.approx(alone.decode_s)


def test_plan_refuses_a_directory_that_is_no_run_and_a_run_that_is_too_short(run, tmp_path, capsys):
    for name in ("metrics", "schedule"):
        path = run / f"{name}.jsonl"
        path.write_text("\n".join(path.read_text().splitlines()[:3]))
    assert main(["--run", str(run)]) == 2
    assert "3 train steps" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert main(["--run", str(run)]) == 2
    assert "config.yaml" in capsys.readouterr().err
