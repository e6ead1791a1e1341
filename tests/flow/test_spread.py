"""Groups whose rewards are all equal are dropped and replaced, within the bound and without an end of the run."""

import pytest

from message_queue.ledger import DropKind
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
    assert total["trained"] == STEPS * BATCH and total["reasons"][DropKind.NO_SPREAD] > 0
    assert all(step["reward/groups_without_signal"] == 0 for step in steps)
    assert 0 < steps[-1]["ledger/without_spread"] <= total["reasons"][DropKind.NO_SPREAD]
    dropped = [line for line in harness.groups("dropped") if line["kind"] == DropKind.NO_SPREAD]
    assert all(line["tokens"] > 0 and line["segments"] >= 3 for line in dropped)


async def test_spread_of_one_agent_is_enough_and_an_untrained_agent_has_no_gradient(tmp_path):
    """The rewards of policy and solver are opposite, so that those of the rollouts are all equal."""
    harness = Harness(tmp_path, drop_without_spread=1000, agents={"solver": True, "critic": False})
    assert await harness.run()
    steps, total = harness.check_staleness(1), harness.check_ledger()
    assert all(step["reward/mean"] == 1 and step["reward/std"] == 0 for step in steps)
    assert all(step["reward/groups_without_signal"] == 0 for step in steps)
    for batch in harness.trainer.batches:
        parts = list(zip(batch.trajectory.tolist(), batch.index.tolist(), batch.advantages.tolist(), strict=True))
        assert [at for _, (_, _, at), _ in parts] == [0, 1] * (len(parts) // 2), "path 2 is the critic's"
        assert [number for number, _, _ in parts] == list(range(len(parts)))
        assert all(mine == -other != 0 for (_, _, mine), (_, _, other) in zip(parts[::2], parts[1::2], strict=True))
        assert all(len(batch.contents[g][t]) == 3 for _, (g, t, _), _ in parts), "it is recorded"
    trained = sum(int(batch.num_loss_tokens.sum()) for batch in harness.trainer.batches)
    assert total["trained_tokens"] == trained and total["masked_tokens"] >= 3 * total["trained"]
    assert sum(step["staleness/masked_tokens"] for step in steps) == 0, "they are not too old"


@pytest.mark.parametrize("row", [1, 3])
async def test_a_run_whose_groups_have_no_spread_trains_one_after_each_row(tmp_path, row):
    harness = Harness(tmp_path, drop_without_spread=row, max_staleness=0, reward=lambda trajectory: 1.0)
    assert await harness.run()
    assert harness.check_ledger()["trained"] == STEPS * BATCH
    ended = sorted(harness.groups("trained") + harness.groups("dropped"), key=lambda line: line["group"])
    dropped = sum(line["outcome"] == "dropped" for line in ended)
    assert row * STEPS * BATCH <= dropped <= row * (STEPS + 1) * BATCH
    assert all(step["reward/groups_without_signal"] == 1 for step in harness.lines("metrics.jsonl"))


async def test_a_long_row_of_groups_without_spread_is_reported(tmp_path):
    harness = Harness(tmp_path, steps=1, drop_without_spread=40, max_staleness=0, reward=lambda trajectory: 1.0)
    assert await harness.run()
    told = [note for note in harness.spy.notes if "groups in a row" in note]
    rows = [8, 16, 32]
    assert [int(note.split()[0]) for note in told] == rows * (len(told) // 3) + rows[: len(told) % 3] and len(
        told
    ) >= 12
    assert all("rollout.drop_without_spread (it is 40)" in note for note in told)


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
