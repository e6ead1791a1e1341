"""Rates that are read from the directory of a run."""

import json
from dataclasses import replace

import numpy as np
import pytest

from async_rl.plan.__main__ import main
from async_rl.plan.description import Distribution
from async_rl.plan.measured import describe_run
from async_rl.plan.simulation import simulate, simulate_synchronous
from benchmarks import explain
from tests.async_rl.plan.traces import CONFIG, generate, span, write_run

DECODE_S, PER_REQUEST_S, TRAIN_S, PAUSE_S = 0.01, 0.002, 3.0, 0.5
REWARD_S = 2.0
BATCHES, GROUPS = 12, 32
SYNCHRONOUS = {
    "engine": {"replicas": 1, "device": "cpu", "threads": 1, "max_num_seqs": 64},
    "trainer": CONFIG["trainer"] | {"threads": 2},
    "staleness": {"max_staleness": 0, "policy": "wait", "max_requeues": 3},
    "rollout": CONFIG["rollout"] | {"groups_per_batch": GROUPS, "workers": 1},
    "checkpoint": {"every": 0},
}


def write(directory, **config):
    """A synchronous run, whose requests share the decode steps of one replica; slow in its first half."""
    draw, at, events, schedule, seconds = np.random.default_rng(0), 0.0, [], [], []
    for step in range(BATCHES):
        lengths = np.sort(draw.integers(5, 200, GROUPS))
        steps_s = DECODE_S + PER_REQUEST_S * np.arange(GROUPS, 0, -1)  # while 32, 31, ... requests run
        steps_s *= 3 if step < BATCHES // 2 else 1
        start = at + PAUSE_S
        ends = start + (np.diff(lengths, prepend=0) * steps_s).cumsum()
        groups = [(step * GROUPS + n, int(lengths[n]), float(ends[n])) for n in range(GROUPS)]
        for group, length, end in groups:
            events += [span("rollout", start, end, group=group), generate(start, end, tokens=length, group=group)]
        events += [span("publish", at, start), span("pause", at, start, process="replica-0")]
        events += [span("wait", at, ends[-1], step=step + 1)]
        events += [span("train", ends[-1], ends[-1] + TRAIN_S, step=step + 1)]
        schedule.append(
            {"train_step": step + 1, "groups": [{"group": g, "spans": [[[step, n]]]} for g, n, _ in groups]}
        )
        seconds.append(float(ends[-1]) + TRAIN_S - at)
        at += seconds[-1]
    metrics = [{"train_step": n, "step/seconds": each, "idle/trainer": 0.5} for n, each in enumerate(seconds, 1)]
    write_run(directory, events, config=SYNCHRONOUS | config, schedule=schedule, metrics=metrics)
    return directory


@pytest.fixture
def run(tmp_path):
    return write(tmp_path)


def test_rates_of_a_run_predict_its_step(run):
    described = describe_run(run, cores=2)
    rates = described.rates
    found = (rates.decode_s, rates.decode_s_per_request, rates.load_s, rates.shared_speed)
    assert found == pytest.approx((DECODE_S, PER_REQUEST_S, PAUSE_S, 2 / 4), rel=0.1)
    lines = (run / "metrics.jsonl").read_text().splitlines()[BATCHES // 2 :]
    seconds = np.mean([json.loads(line)["step/seconds"] for line in lines])
    assert simulate_synchronous(described, steps=24).step_s == pytest.approx(seconds, rel=0.1)


def test_a_rank_without_a_number_of_threads_has_its_share_of_the_cores(tmp_path):
    run = write(tmp_path, trainer=SYNCHRONOUS["trainer"] | {"threads": None})
    assert describe_run(run, cores=8).rates.shared_speed == 8 / (1 + 8 + 1)


def test_rates_of_an_asynchronous_run_are_faster_on_cores_of_their_own(run):
    alone = describe_run(run, cores=2).rates
    write(run, staleness=SYNCHRONOUS["staleness"] | {"max_staleness": 1})
    lines = (run / "metrics.jsonl").read_text().splitlines()[BATCHES // 2 :]
    seconds = sum(json.loads(line)["step/seconds"] for line in lines)
    trained, paused = len(lines) * TRAIN_S / seconds, len(lines) * PAUSE_S / seconds
    shared = describe_run(run, cores=2).rates
    assert shared.decode_s == pytest.approx(alone.decode_s * (1 - trained / 2))
    requested = 1 - trained - paused  # and the first pause and the last train step are not between two requests
    assert shared.train_tokens_per_s == pytest.approx(alone.train_tokens_per_s / (1 - requested / 2), rel=0.05)
    assert describe_run(run, cores=4).rates.shared_speed == 1
    four_updates = SYNCHRONOUS["trainer"] | {"updates_per_batch": 4}
    write(run, staleness=SYNCHRONOUS["staleness"] | {"max_staleness": 3}, trainer=four_updates)
    assert describe_run(run, cores=2).rates.decode_s == pytest.approx(alone.decode_s)  # synchronous, four updates


@pytest.mark.parametrize("bound", [0, 2])
def test_plan_of_a_run_with_tools_predicts_other_bounds(tmp_path, bound):
    made = explain.workload(0, held_out=False)
    made = replace(made, staleness=replace(made.staleness, max_staleness=bound))
    made = replace(
        made, workload=made.workload.model_copy(update={"turns": 3, "reward_s": Distribution(mean=REWARD_S)})
    )
    explain.write_run(made, tmp_path, steps=16, seed=0)
    found = describe_run(tmp_path)
    assert (found.workload.turns, found.rates.shared_speed) == (3, 1)
    assert {round(each, 4) for each in found.workload.reward_s.values} == {REWARD_S}
    assert np.mean(found.workload.tool_s.values) == pytest.approx(made.workload.tool_s.mean, rel=0.1)
    made = replace(made, workload=made.workload.model_copy(update={"lengths": found.workload.lengths}))
    for other in (0, 1, 4):
        of_made, of_found = (
            simulate(replace(each, staleness=replace(each.staleness, max_staleness=other)), steps=12, seed=1).step_s
            for each in (made, found)
        )
        assert of_found == pytest.approx(of_made, rel=0.1)


def test_plan_of_a_run_is_made_for_another_bound(run, capsys):
    assert main(["--run", str(run), "--bound", "2", "--no-search", "--steps", "4", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["given"]["seen"]["staleness_p99"] == 2


def test_plan_refuses_no_run_one_that_is_too_short_and_one_of_another_version(run, capsys):
    lines = (run / "trace.json").read_text().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if '"train"' in line and '"step": 3' in line)
    (run / "trace.json").write_text("".join(lines[: last + 1]))
    assert main(["--run", str(run)]) == 2
    assert "3 batches" in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert main(["--run", str(run)]) == 2
    assert "config.yaml" in capsys.readouterr().err
    write(run, trainer={key: value for key, value in SYNCHRONOUS["trainer"].items() if key != "ranks"})
    assert main(["--run", str(run)]) == 2
    assert "'ranks'" in capsys.readouterr().err
