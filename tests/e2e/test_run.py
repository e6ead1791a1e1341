"""The real thing: `python -m async_rl.run` with real Ray, vLLM and megatron-core on a tiny MoE."""

import json
import os
import shlex
import signal
import time

import pytest

from tests.e2e.runs import finish, lines, spawn, start, wait_for_step

pytestmark = pytest.mark.timeout(900)
SHORT = ("staleness.max_staleness=1",)


@pytest.fixture(scope="module")
def warm_starts(tmp_path_factory):
    """Warm-started checkpoints, shared by the runs of this module."""
    return tmp_path_factory.mktemp("warm_start")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, warm_starts):
    """Directory of a run of 4 steps that ended by itself."""
    directory = tmp_path_factory.mktemp("short_run")
    process = start(directory, warm_starts, *SHORT, "total_train_steps=4")
    output = finish(process)
    assert process.returncode == 0, output
    return directory


def test_a_short_run_keeps_every_promise_of_its_metrics(short_run):
    steps = lines(short_run, "metrics.jsonl")
    assert [s["train_step"] for s in steps] == [1, 2, 3, 4]
    assert [s["param_version"] for s in steps] == [1, 2, 3, 4]
    for s in steps:
        assert s["ledger/error"] == 0
        assert s["staleness/max"] <= 1
        assert s["routing/missing_fraction"] == 0
        assert s["mismatch/k3_lag0"] is None or s["mismatch/k3_lag0"] <= 1e-6
    assert steps[0]["mismatch/k3_lag0"] is not None, "the first batch is sampled by the weights it trains"
    assert steps[0]["routing/overlap"] > 0.9999
    assert [v["train_step"] for v in lines(short_run, "validation.jsonl")] == [0, 4]
    total = lines(short_run, "ledger.jsonl")[-1]
    assert total["error"] == 0 and total["trained"] == 16
    for name in ("config.yaml", "trace.json", "report.html", "tensorboard", "checkpoints/step-000004/run.json"):
        assert (short_run / name).exists(), name


def test_a_run_keeps_to_the_schedule_of_another_one(tmp_path, warm_starts, short_run):
    options = (*SHORT, "validation.prompts=0", f"schedule={short_run}")
    process = start(tmp_path / "second", warm_starts, *options, "total_train_steps=4", "loss=ppo_clip")
    output = finish(process)
    assert process.returncode == 0, output
    plans = [lines(short_run, "schedule.jsonl"), lines(tmp_path / "second", "metrics.jsonl")]
    groups = sorted((g for line in plans[0] for g in line["groups"]), key=lambda g: g["group"])
    trained = [g for g in lines(tmp_path / "second", "ledger.jsonl") if g["outcome"] == "trained"]
    assert [g["admitted_version"] for g in sorted(trained, key=lambda g: g["group"])] == [
        g["admitted_update"] for g in groups
    ]
    for line, step in zip(*plans, strict=True):
        oldest = min(spans[0][0] for group in line["groups"] for spans in group["spans"])
        assert step["staleness/max"] == line["train_step"] - 1 - oldest
        assert step["ledger/error"] == 0

    process = start(tmp_path / "third", warm_starts, *options, "rollout.groups_per_batch=2")
    output = finish(process)
    assert process.returncode == 2, output
    assert "rollout.groups_per_batch is 2, and the schedule is of a run with 4; set that" in output


def test_an_interrupt_stops_cleanly_and_the_printed_command_resumes(tmp_path, warm_starts):
    process = start(tmp_path, warm_starts, "total_train_steps=200")
    wait_for_step(tmp_path, 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
    output = finish(process)
    assert process.returncode == 0, output
    printed = shlex.split(output.splitlines()[-1].partition("continue with: ")[2])
    done = len(lines(tmp_path, "metrics.jsonl"))

    output = finish(spawn([*printed, f"total_train_steps={done + 2}"]))
    assert f"total_train_steps: 200 -> {done + 2}" in output, output
    steps = lines(tmp_path, "metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(1, done + 3))
    assert [s["param_version"] for s in steps] == list(range(1, done + 3))
    assert lines(tmp_path, "ledger.jsonl")[-1]["error"] == 0


def test_killing_a_process_that_is_not_restarted_ends_the_run_with_the_cause(tmp_path, warm_starts):
    process = start(tmp_path, warm_starts, "total_train_steps=500", "supervision.max_restarts=0")
    wait_for_step(tmp_path, 1, process)
    os.kill(json.loads((tmp_path / "processes.json").read_text())["trainer-0"], signal.SIGKILL)
    begun = time.monotonic()
    output = finish(process)
    assert process.returncode == 1, output
    assert any(line.startswith("error: stage") and "trainer rank 0" in line for line in output.splitlines()[-4:]), (
        output
    )
    assert time.monotonic() - begun < 90


def test_a_run_outlives_one_of_its_replicas(tmp_path, warm_starts):
    process = start(
        tmp_path,
        warm_starts,
        "total_train_steps=6",
        "supervision.max_restarts=0",
        "engine.replicas=2",
        "rollout.on_update=keep",
        "rollout.resume_routing=force",
        "queue.rank_code_rows=true",
    )
    wait_for_step(tmp_path, 1, process)
    os.kill(json.loads((tmp_path / "processes.json").read_text())["replica-1"], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 0, output
    assert "replica replica-1 is lost, 1 left" in output
    steps = lines(tmp_path, "metrics.jsonl")
    assert [s["train_step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    for s in steps:
        assert s["ledger/error"] == 0
        assert s["staleness/max"] <= 1
        assert s["routing/missing_fraction"] == 0
        assert s["mismatch/k3_lag0"] is None or s["mismatch/k3_lag0"] <= 1e-6
    total = lines(tmp_path, "ledger.jsonl")[-1]
    assert (total["error"], total["trained"], total["dropped"]) == (0, 24, 0)
