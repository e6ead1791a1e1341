"""Groups whose rewards are all equal are dropped and replaced, within the bound and without an end of the run."""

import pytest

from tests.flow.harness import FakeTrainer, Harness

BATCH, STEPS = 4, 6


@pytest.mark.parametrize("policy", ["wait", "drop", "recycle", "mask"])
@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_only_groups_with_spread_are_trained_and_the_others_are_counted(tmp_path, policy, max_staleness):
    harness = Harness(
        tmp_path,
        policy=policy,
        max_staleness=max_staleness,
        drop_without_spread=1000,
        trainer=FakeTrainer(step_s=0.005),
        reward=lambda trajectory: float(len(trajectory) % 3 == 0),
    )
    assert await harness.run()
    steps, total = harness.check_staleness(max_staleness), harness.check_ledger()
    assert total["trained"] == STEPS * BATCH and total["reasons"]["no spread"] > 0
    assert all(step["reward/groups_without_signal"] == 0 for step in steps)
    assert 0 < steps[-1]["ledger/without_spread"] <= total["reasons"]["no spread"]
    dropped = [line for line in harness.groups("dropped") if line["reason"].startswith("no spread")]
    assert all(line["tokens"] > 0 and line["segments"] >= 3 for line in dropped)


@pytest.mark.parametrize("row", [1, 3])
async def test_a_run_in_which_no_group_has_spread_trains_one_after_each_row(tmp_path, row):
    harness = Harness(tmp_path, drop_without_spread=row, max_staleness=0, reward=lambda trajectory: 1.0)
    assert await harness.run()
    assert harness.check_ledger()["trained"] == STEPS * BATCH
    ended = sorted(harness.groups("trained") + harness.groups("dropped"), key=lambda line: line["group"])
    dropped = sum(line["outcome"] == "dropped" for line in ended)
    assert row * STEPS * BATCH <= dropped <= row * (STEPS + 1) * BATCH
    assert all(step["reward/groups_without_signal"] == 1 for step in harness.lines("metrics.jsonl"))


async def test_a_batch_is_completed_if_nearly_no_group_has_spread(tmp_path):
    def reward(trajectory):
        return float(trajectory.token_ids()[0] == 7 and len(trajectory) % 2)  # prompts 5, 35, 65, ...

    harness = Harness(tmp_path, steps=2, drop_without_spread=1000, max_staleness=0, reward=reward)
    assert await harness.run()
    total = harness.check_ledger()
    assert total["trained"] == 2 * BATCH and total["dropped"] > 10 * total["trained"]


async def test_groups_without_spread_are_trained_by_default(tmp_path):
    harness = Harness(tmp_path, reward=lambda trajectory: 1.0)
    assert await harness.run()
    assert harness.check_ledger()["dropped"] == 0
