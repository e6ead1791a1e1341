"""A run that is killed after any record of its journal goes on as if nothing had happened."""

import numpy as np
import pytest

from tests.fakes import fake_logprob, true_rows
from tests.flow.crashes import STEPS, Life, MortalDisk
from tests.flow.test_pipeline import check_ledger

BATCH = 4


async def two_lives(tmp_path, writes, **options):
    """A life that ends after `writes` writes of its journal, and one that goes on; None where the first lived on."""
    directory, left = tmp_path / "run", tmp_path / "left"
    directory.mkdir()
    disk = MortalDisk(directory, left)
    first = Life(directory, disk, **options)
    disk.writes_left = writes
    if not await first.run_until_dead(disk):
        return None
    second = Life(left, disk.after_kill(), **options)
    assert await second.harness.run()
    return first, second


def check_records(second):
    """Each step and each group is there once, and nothing was lost."""
    steps = second.harness.lines("metrics.jsonl")
    assert [s["train_step"] for s in steps] == list(range(1, STEPS + 1))
    assert all(s["ledger/error"] == 0 for s in steps)
    total = check_ledger(second.harness)
    assert total["trained"] == STEPS * BATCH
    return total


def check_prompts(first, second):
    """No prompt is skipped, and none is in two groups."""
    prompts = {}
    for life in (first, second):
        for group, (prompt, _, _) in life.rolled.items():
            assert prompts.setdefault(prompt, group) == group
    assert sorted(prompts) == list(range(len(prompts)))


def check_tokens(first, second):
    """Every token is one that an engine sampled, once, with its logprob and its row."""
    held = sum(tokens for _, _, tokens in second.rolled.values())
    grown = sum(second.delivered[g].num_tokens - second.rolled[g][2] for g in second.delivered)
    assert sum(replica.num_tokens for replica in second.harness.replicas) >= grown
    groups = first.delivered | second.delivered
    trained = [g["group"] for g in second.harness.lines("ledger.jsonl") if g["outcome"] == "trained"]
    for trajectory in (t for group in trained for t in groups[group].trajectories):
        tokens, versions = trajectory.token_ids(), trajectory.param_versions()
        logprobs = [
            fake_logprob(int(token), at, int(version)) if version >= 0 else 0.0
            for at, (token, version) in enumerate(zip(tokens, versions, strict=True))
        ]
        np.testing.assert_allclose(trajectory.behaviour_logprobs(), logprobs, rtol=1e-6)
        assert trajectory.routed_experts().tolist() == true_rows(trajectory).tolist()
    for replica in second.harness.replicas:
        for request in replica.requests:
            group, number = (int(part[1:]) for part in request.session.split("-"))
            lengths = second.rolled[group][1]
            assert not lengths or len(request.token_ids) >= lengths[number]
    return held


def check_batches(first, second):
    """What was trained after the checkpoint is, in the same batches; what was ready is not rolled again."""
    again = second.harness.restored.replay
    begun = second.start.train_step
    assert second.batches[:again] == first.batches[begun : begun + again]
    put_before = {group.group for group in first.delivered.values()} - set(second.rolled)
    assert put_before.isdisjoint(second.delivered)


def check_versions(first, second):
    newest = second.harness.restored.version
    assert all(version > newest for version in second.harness.trainer.exported[1:])
    params = [s["param_version"] for s in second.harness.lines("metrics.jsonl")]
    assert params == sorted(params)


@pytest.mark.parametrize("writes", [2, 4, 7, 11, 16, 22, 30, 40, 52, 70, 90, 120])
async def test_a_run_killed_after_any_record_goes_on_as_if_nothing_had_happened(tmp_path, writes):
    lives = await two_lives(tmp_path, writes)
    if lives is None:
        return
    first, second = lives
    total = check_records(second)
    assert total["dropped"] == 0
    check_prompts(first, second)
    check_tokens(first, second)
    check_batches(first, second)
    check_versions(first, second)
    assert all(s["staleness/max"] <= 1 for s in second.harness.lines("metrics.jsonl"))
