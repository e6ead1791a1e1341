"""A run whose rollouts are agent programs over HTTP. They rewrite their histories, under publishes and a kill."""

import os
import signal

import numpy as np
import pytest

from tests.e2e.runs import check_records, check_rollouts, finish, k3_bound, pids, start, wait_for_step

pytestmark = pytest.mark.timeout(1000)
STEPS = 4


def test_agents_that_rewrite_their_histories_are_trained_exactly_though_the_replica_is_killed(tmp_path):
    process = start(
        tmp_path,
        tmp_path / "warm_start",
        "task.factory=tests.e2e.tasks:agent_task",
        "rollout.limits.max_tokens=160",
        "rollout.limits.max_turns=12",
        "rollout.workers=2",
        f"total_train_steps={STEPS}",
        "validation.prompts=4",
    )
    wait_for_step(tmp_path, 1, process)
    os.kill(pids(tmp_path)["replica-0"], signal.SIGKILL)
    output = finish(process)
    assert "replica replica-1 serves in place of replica-0" in output
    steps, groups = check_records(tmp_path, steps=STEPS, staleness=1, k3=k3_bound(tmp_path / "warm_start"))
    files = check_rollouts(tmp_path, steps, groups)
    assert all(step["info/paths"] > 1.5 and step["info/turns"] > 2 for step in steps)
    assert sum(step["info/retries"] for step in steps) > 0
    check_agents([row for rows in files.values() for row in rows if row["stop_reason"] != "error"])


def check_agents(rows):
    """Each agent has a separate baseline; the critic is recorded and not trained."""
    rewards, advantages = {}, {}
    for row in rows:
        effects = {effect for effect in row["effect"] if effect is not None}
        assert (row["agent"] == "critic") == (row["advantage"] is None) == (effects == {"untrained"})
        if row["agent"] != "critic":
            key = row["group"], row["agent"]
            rewards.setdefault(key, {})[row["trajectory"]] = dict(row["info"])[f"reward/{row['agent']}"]
            advantages.setdefault(key, {})[row["trajectory"]] = row["advantage"]
    assert {row["agent"] for row in rows} == {"policy", "solver", "critic"}
    assert any(value for (_, agent), found in advantages.items() if agent == "solver" for value in found.values())
    for key, found in rewards.items():
        values = np.array(list(found.values()))
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        np.testing.assert_allclose(
            list(advantages[key].values()), (values - values.mean()) / (spread + 1e-6), rtol=1e-5
        )
