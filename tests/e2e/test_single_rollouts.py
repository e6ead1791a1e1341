"""Whole runs without groups: one rollout of each prompt, with a baseline of its own prompt or from a user's file."""

import json

import numpy as np
import pytest

from async_rl.metrics.trace import read_trace
from async_rl.trainer.batch.baselines import SPO
from tests.docs.pages import module_of
from tests.e2e.runs import check_records, check_rollouts, complete, each, finish, start, tree_of, wait_for_step
from tests.helpers.lanes import WHOLE_RUN

pytestmark = [WHOLE_RUN, pytest.mark.timeout(1000)]
SINGLE = (
    "rollout.groups_per_batch=8",
    "rollout.trajectories_per_group=1",
    "rollout.record.steps=100",
    "rollout.record.trajectories=100",
    "validation.prompts=0",
    "staleness.max_staleness=2",
)


def state_of(directory, step):
    return json.loads((directory / f"checkpoints/step-{step:06d}/run.json").read_text())["state"]


def kinds(directory):
    return {event["cat"] for event in read_trace(directory / "trace.json") if event["ph"] == "X"}


def test_a_loss_and_a_baseline_of_a_file_train_and_no_rollout_waits_for_another_one(tmp_path):
    file = tmp_path / "my_algorithm.py"
    file.write_text(module_of("docs/guides/loss.md", file.name))
    own = (f"loss.name={file}:CappedProximal", f"advantage.name={file}:OverThreshold", "advantage.threshold=0.25")
    directory, warm = tmp_path / "run", tmp_path / "warm_start"
    complete(directory, warm, *SINGLE, *own, "total_train_steps=2")
    complete(directory, warm, *SINGLE, *own, "total_train_steps=4")
    found, groups = check_records(directory, steps=4, staleness=2)
    rows = check_rollouts(directory, found, groups)
    flat = [row for of_step in rows.values() for row in of_step]
    assert len(flat) == 32 and all(row["advantage"] == np.float32(row["reward"] - 0.25) for row in flat)
    assert all(step["truncate/fraction"] is not None and step["grad_norm"] > 0 for step in found)
    assert "trajectory" in kinds(directory) and "wait_group" not in kinds(directory)


def test_the_expected_rewards_of_prompts_are_exact_after_a_kill(tmp_path):
    directory, warm = tmp_path / "run", tmp_path / "warm_start"
    steps = 8
    settings = (
        *SINGLE,
        "algorithm=spo",
        "rollout.groups_per_batch=8",
        f"total_train_steps={steps}",
        "checkpoint.every=3",
    )
    prompts = ("+task.options.distinct_prompts=5",)
    killed = start(directory, warm, *settings, *prompts)
    wait_for_step(directory, 5, killed)
    each(tree_of(killed), lambda one: one.kill())
    killed.communicate()
    finish(start(directory, warm, *settings, *prompts))
    found, groups = check_records(directory, steps=steps, staleness=2)
    rows = check_rollouts(directory, found, groups)
    config, plain = SPO(), {}
    for step in range(1, steps + 1):
        batch = sorted((row["group"], row["prompt_index"] % 5, row["reward"]) for row in rows[step])
        start_value = float(np.mean([reward for _, _, reward in batch]))
        for _, prompt, reward in batch:
            plain[prompt] = config.observe(plain.get(prompt), reward, update=step - 1, start=start_value)
    assert len(plain) == 5
    assert sorted(state_of(directory, steps)["prompt_values"].values()) == sorted(map(list, plain.values()))
