"""A run whose rollouts are made by agent programs over HTTP, which rewrite their histories, under publishes."""

import pytest

from tests.e2e.runs import check_records, check_rollouts, finish, k3_bound, start

pytestmark = pytest.mark.timeout(900)
STEPS = 4


def test_agents_that_rewrite_their_histories_are_trained_exactly(tmp_path):
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
    output = finish(process)
    assert process.returncode == 0, output
    steps, groups = check_records(tmp_path, steps=STEPS, staleness=1, k3=k3_bound(tmp_path / "warm_start"))
    check_rollouts(tmp_path, steps, groups)
    assert all(step["info/paths"] > 1.5 and step["info/turns"] > 2 for step in steps)
    assert sum(step["info/retries"] for step in steps) > 0
