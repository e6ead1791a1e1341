"""A run with the schedule of another one: the same prompts, of the same age, in the same batches."""

import numpy as np
import pytest

from async_rl.rollout.schedule import read_schedule, scheduled_groups
from async_rl.run import causes
from tests.flow.harness import FakeTrainer, Harness

OPTIONS = {"max_staleness": 3, "mean_length": 40, "steps": 6}


async def recorded(path, **options):
    """A free run with aborts in it."""
    harness = Harness(path, token_s=0.002, trainer=FakeTrainer(step_s=0.03), **{**OPTIONS, **options})
    assert await harness.run()
    spans = [s for line in harness.lines("schedule.jsonl") for g in line["groups"] for s in g["spans"]]
    assert any(len(s) > 1 for s in spans), "nothing was aborted"
    return harness


async def kept_to(path, first, **options):
    schedule = read_schedule(first.directory)
    options = {"token_s": 0.0, "trainer": FakeTrainer(step_s=0.005), "schedule": schedule, **options}
    harness = Harness(path, **{**OPTIONS, **options})
    assert await harness.run()
    return harness


def batches_before_a_gap(harness):
    """Leading batches whose groups have the same ids in both runs: no group before theirs was left out at the end.

    The fake engine's tokens depend on the ids.
    """
    groups = read_schedule(harness.directory).groups
    shifted = [group.train_step for position, group in enumerate(groups) if group.group != position]
    return min(shifted, default=OPTIONS["steps"] + 1) - 1


def trained_of(harness):
    """Sorted tokens of all sequences of each batch, with their staleness in the trainer."""
    return [
        sorted(
            (batch.sequence(number).token_ids.tolist(), batch.loss_tokens(number).lag.tolist())
            for number in range(len(batch))
        )
        for batch in harness.trainer.batches
    ]


@pytest.mark.parametrize("options", [{}, {"publish_every": 2, "max_staleness": 4}, {"max_staleness": 0}])
async def test_schedule_with_the_same_weights_gives_the_same_batches(tmp_path, options):
    """The engine's tokens follow from weights and context alone, so the same schedule gives the same tokens."""
    if options.get("max_staleness") == 0:
        first = Harness(tmp_path / "first", trainer=FakeTrainer(step_s=0.01), **{**OPTIONS, **options})
        assert await first.run()
    else:
        first = await recorded(tmp_path / "first", **options)
    second = await kept_to(tmp_path / "second", first, **options)
    whole = batches_before_a_gap(first)
    assert whole >= 3
    assert trained_of(second)[:whole] == trained_of(first)[:whole]
    assert np.array_equal(
        *([s["staleness/max"] for s in run.lines("metrics.jsonl")][:whole] for run in (first, second))
    )


async def test_schedule_with_another_policy_gives_the_same_prompts_and_ages(tmp_path):
    first = await recorded(tmp_path / "first")
    schedule = read_schedule(first.directory)
    second = Harness(
        tmp_path / "second", seed=1, schedule=schedule, replica_options=[{}, {}], trainer=FakeTrainer(), **OPTIONS
    )
    batches, take = [], second.queue.take

    async def watched():
        batches.append(await take())
        return batches[-1]

    second.queue.take = watched
    assert await second.run()
    at, cut = 0, 0
    for number, batch in enumerate(batches, start=1):
        found = sorted(
            scheduled_groups(batch.groups, version_updates=batch.version_updates),
            key=lambda g: g["prompt"],
        )
        like = [(i, g) for i, g in enumerate(schedule.groups) if g.train_step == number]
        assert [g["prompt"] for g in found] == [i for i, _ in like]
        assert [g["admitted_update"] for g in found] == [g.admitted_update for _, g in like]
        for spans, planned in zip(
            [spans for group in found for spans in group["spans"]],
            [spans for _, group in like for spans in group.spans],
            strict=True,
        ):
            at += 1
            *whole, (update, tokens) = spans
            assert whole == list(planned[: len(whole)])
            assert update == planned[len(whole)][0]
            last = len(whole) == len(planned) - 1
            assert last or tokens <= planned[len(whole)][1]
            cut += len(whole) > 0
    assert at == 6 * 4 * 3
    assert cut, "no trajectory was sampled under several weights"


async def test_a_failed_group_ends_a_run_with_a_schedule(tmp_path):
    first = await recorded(tmp_path / "first")
    second = Harness(
        tmp_path / "second",
        schedule=read_schedule(first.directory),
        loop_fail=lambda prompt: RuntimeError("no tool") if prompt.index == 7 else None,
        **OPTIONS,
    )
    with pytest.raises(ExceptionGroup) as failed:
        await second.run()
    assert any("schedule" in line and "no tool" in line for line in causes(failed.value))


async def test_schedule_allows_fewer_steps(tmp_path):
    first = await recorded(tmp_path / "first")
    second = await kept_to(tmp_path / "second", first, steps=3)
    assert len(second.trainer.batches) == 3
    whole = min(3, batches_before_a_gap(first))
    assert trained_of(second)[:whole] == trained_of(first)[:whole]


async def test_schedule_keeps_the_mini_batches_of_every_batch(tmp_path):
    options = {"updates_per_batch": 2, "publish_every": 2, "max_staleness": 5, "steps": 12}
    first = await recorded(tmp_path / "first", **options)
    second = await kept_to(tmp_path / "second", first, **options)
    assert read_schedule(first.directory).updates_per_batch == 2
    steps = [line["train_step"] for line in second.lines("metrics.jsonl")]
    assert steps == [2, 4, 6, 8, 10, 12]
    split = [[sorted(set(b.mini_batch.tolist())) for b in run.trainer.batches] for run in (first, second)]
    assert split[0] == split[1] == [[0, 1]] * 6
    assert all(s["staleness/max"] <= 5 for s in second.lines("metrics.jsonl"))
