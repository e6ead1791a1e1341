"""Whole runs with a critic, on single rollouts without groups."""

import math

import pytest

from tests.e2e.runs import check_records, check_rollouts, complete, k3_bound
from tests.helpers.lanes import WHOLE_RUN
from tests.helpers.traces import check_trace

pytestmark = [WHOLE_RUN, pytest.mark.timeout(1000)]
CRITIC = (
    "rollout.groups_per_batch=8",
    "rollout.trajectories_per_group=1",
    "advantage.name=gae",
    "advantage.lam=0.95",
    "critic.optimizer.lr=1e-3",
    "staleness.max_staleness=1",
    "validation.prompts=0",
)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_run_on_single_rollouts_trains_with_a_critic_and_resumes(tmp_path, trunk):
    warm = tmp_path / "warm_start"
    more = ("critic.updates=2", "critic.warmup_steps=1") if trunk == "own" else ("critic.coefficient=0.5",)
    settings = (*CRITIC, f"critic.trunk={trunk}", *more)
    complete(tmp_path, warm, *settings, "total_train_steps=3")
    complete(tmp_path, warm, *settings, "total_train_steps=5")
    steps, groups = check_records(tmp_path, steps=5, staleness=1, k3=k3_bound(warm), trained=40)
    check_rollouts(tmp_path, steps, groups)
    per_step = 2 if trunk == "own" else 1
    assert [s["critic/updates"] for s in steps] == [per_step * step for step in range(1, 6)], "it continues"
    assert steps[0]["critic/value_mean"] == 0 and steps[4]["critic/value_mean"] != 0
    assert (steps[0]["grad_norm"] == 0) == (trunk == "own"), "the critic warms up"
    assert all(s["grad_norm"] > 0 and s["critic/grad_norm"] > 0 for s in steps[1:])
    assert all(math.isfinite(s["critic/loss"]) and s["tokens"] > 0 for s in steps)
    assert all(s["critic/staleness"] == pytest.approx(per_step * s["staleness/mean"]) for s in steps)
    trained = [g["group"] for g in groups if g["outcome"] == "trained" and g["train_step"] > 3]
    assert {"values", "critic"} <= check_trace(tmp_path, trained=trained)["trainer-0"]
