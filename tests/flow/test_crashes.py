"""A run that is killed at any write of its journal or content continues as if it had not stopped."""

import asyncio
import itertools
import random
import shutil

import numpy as np
import pytest

from async_rl.run import causes
from message_queue.content import ContentWriter
from message_queue.disk_errors import JournalFull, JournalMismatch
from message_queue.journal import EventJournal
from message_queue.progress import TrajectoryClosed
from tests.flow.crashes import STEPS, Kill, Life
from tests.flow.test_pipeline import check_ledger
from tests.helpers.dense import behaviour_logprobs, param_versions
from tests.helpers.fakes import fake_logprob, true_rows

BATCH = 4


async def lives_of(tmp_path, kills, **options):
    """A life for each number of writes in `kills`, after which it dies, and one that gets to the end."""
    lives, directory = [], tmp_path / "life-0"
    directory.mkdir()
    for number, writes in enumerate(kills, start=1):
        left = tmp_path / f"life-{number}"
        life = Life(directory, **options)
        died = await life.run_until_dead(Kill(directory, left, writes=writes))
        assert died, f"it does not write {writes} times; take fewer"
        lives.append(life)
        directory = left
    lives.append(Life(directory, **options))
    assert await lives[-1].harness.run()
    return lives


def check_records(second):
    """Each step and each group is there once, and nothing was lost."""
    steps, per_batch = second.harness.lines("metrics.jsonl"), second.per_batch
    assert [s["train_step"] for s in steps] == list(range(per_batch, STEPS * per_batch + 1, per_batch))
    assert all(s["ledger/error"] == 0 for s in steps)
    total = check_ledger(second.harness)
    assert total["trained"] == STEPS * BATCH
    return total


def check_prompts(lives):
    """No prompt is skipped, and none is in two groups."""
    prompts = {}
    for life in lives:
        for group, (prompt, _, _) in life.rolled.items():
            assert prompts.setdefault(prompt, group) == group
    assert sorted(prompts) == list(range(len(prompts)))


def check_tokens(lives):
    """Every token is one that an engine sampled, with its logprob and row; none that was held is sampled again."""
    groups = {group: found for life in lives for group, found in life.delivered.items()}
    trained = [g["group"] for g in lives[-1].harness.lines("ledger.jsonl") if g["outcome"] == "trained"]
    for trajectory in (t for group in trained for t in groups[group].trajectories):
        tokens, versions = trajectory.token_ids(), param_versions(trajectory)
        logprobs = [
            fake_logprob(int(token), at, int(version)) if version >= 0 else 0.0
            for at, (token, version) in enumerate(zip(tokens, versions, strict=True))
        ]
        np.testing.assert_allclose(behaviour_logprobs(trajectory), logprobs, rtol=1e-6)
        assert trajectory.sequences()[-1].routed_experts.tolist() == true_rows(trajectory).tolist()
    for life in lives:
        for request in (request for replica in life.harness.replicas for request in replica.requests):
            group, number = (int(part[1:]) for part in request.session.split("-"))
            held = life.rolled[group][1][number : number + 1]
            assert all(len(request.token_ids) >= length for length in held)


def check_batches(before, after):
    """What was trained after the checkpoint is, in the same batches; what was ready is not rolled again."""
    if after.harness.restored is None:
        return  # it died before it had read the journal
    again, offset = after.harness.restored.replay, after.start.train_step - before.start.train_step
    offset //= after.per_batch
    expected = before.batches[offset : offset + again]
    assert after.batches[:again] == expected[: len(after.batches)]
    known, found = before.harness.trainer.batches[offset:], after.harness.trainer.batches[:again]
    for first, second in zip(known, found, strict=False):
        assert first.index.tolist() == second.index.tolist()
        assert first.mini_batch.tolist() == second.mini_batch.tolist()
        for number in range(len(first)):
            assert first.loss_tokens(number).lag.tolist() == second.loss_tokens(number).lag.tolist()
    ready = set(before.delivered) - set(after.rolled)
    assert ready.isdisjoint(after.delivered)


def check_versions(before, after):
    """Versions never go back, and a number stands for one set of weights."""
    if after.harness.restored is None:
        return
    assert after.harness.restored.version >= max(before.harness.trainer.exported, default=0) - 1
    assert all(version > after.harness.restored.version for version in after.harness.trainer.exported[1:])


def check(lives, *, max_staleness=1):
    total = check_records(lives[-1])
    check_prompts(lives)
    check_tokens(lives)
    for before, after in itertools.pairwise(lives):
        check_batches(before, after)
        check_versions(before, after)
    steps = lives[-1].harness.lines("metrics.jsonl")
    assert all(s["staleness/max"] <= max_staleness for s in steps)
    params = [s["param_version"] for s in steps]
    assert params == sorted(params)
    return total


@pytest.mark.parametrize("writes", [0, 2, 5, 9, 15, 23, 34, 48, 65, 85, 105])
async def test_run_killed_at_any_write_repeats_and_loses_nothing(tmp_path, writes):
    assert check(await lives_of(tmp_path, [writes]))["dropped"] == 0


async def test_trajectory_info_survives_the_journal_and_a_kill(tmp_path):
    lives = await lives_of(tmp_path, [30])
    groups = {group: found for life in lives for group, found in life.delivered.items()}
    records = [g for g in lives[-1].harness.lines("ledger.jsonl") if g["outcome"] == "trained"]
    for step in lives[-1].harness.lines("metrics.jsonl"):
        batch = [groups[g["group"]] for g in records if g["train_step"] == step["train_step"]]
        assert step["info/length"] == pytest.approx(np.mean([len(t) for group in batch for t in group.trajectories]))


@pytest.mark.parametrize("seed", range(6))
async def test_a_run_that_is_killed_again_and_again_gets_to_its_end(tmp_path, seed):
    rng = random.Random(seed)
    kills = [rng.randrange(4, 40) for _ in range(4)]
    assert check(await lives_of(tmp_path, kills, checkpoint_every=rng.choice([0, 2, 3])))["dropped"] == 0


@pytest.mark.parametrize(
    ("options", "max_staleness"),
    [
        ({"max_staleness": 0}, 0),
        ({"max_staleness": 3, "mean_length": 40}, 3),
        ({"max_staleness": 2, "publish_every": 2}, 2),
        ({"max_staleness": 3, "publish_every": 2, "updates_per_batch": 2, "checkpoint_every": 4}, 3),
        ({"max_staleness": 1, "policy": "drop", "mean_length": 30}, 1),
        ({"max_staleness": 1, "resume_routing": "force"}, 1),
        ({"max_staleness": 2, "resume_routing": "replace", "mean_length": 30}, 2),
        ({"max_staleness": 2, "resume_routing": "split", "mean_length": 30}, 2),
        ({"max_staleness": 1, "turns": 3}, 1),
    ],
    ids=[
        "synchronous",
        "stale",
        "publish-every-2",
        "two-updates-per-batch",
        "drop",
        "force",
        "replace",
        "split",
        "turns",
    ],
)
async def test_every_setting_survives_a_kill(tmp_path, options, max_staleness):
    lives = await lives_of(tmp_path, [50], **options)
    check_records(lives[-1])
    check_prompts(lives)
    check_batches(*lives)
    assert all(s["staleness/max"] <= max_staleness for s in lives[-1].harness.lines("metrics.jsonl"))


async def test_what_was_in_flight_goes_on_where_it_stopped(tmp_path):
    first, second = await lives_of(tmp_path, [34], mean_length=40)
    went_on = [g for g, (_, _, tokens) in second.rolled.items() if tokens and g in second.delivered]
    assert went_on, "nothing was in flight"
    assert set(first.delivered) - set(second.delivered), "nothing was ready"
    check([first, second])


async def test_a_stop_on_request_loses_nothing_and_generates_nothing_again(tmp_path):
    for attempt in range(8):  # what is in flight at a stop is up to the machine
        if await stop_and_go_on(tmp_path / str(attempt)):
            return
    pytest.fail("nothing was in flight at any stop")


async def stop_and_go_on(directory):
    """Tokens that were in flight at the stop."""
    directory.mkdir()
    first = Life(directory, mean_length=40)
    run = asyncio.create_task(first.harness.run())
    await first.harness.trainer.three_done.wait()
    first.harness.pipeline.request_stop()
    assert await run is False
    second = Life(directory, mean_length=40)
    assert await second.harness.run()
    assert second.harness.restored.replay == 0
    held = sum(tokens for _, _, tokens in second.rolled.values())
    assert first.num_sampled == sum(group.num_tokens for group in first.delivered.values()) + held, "tokens were lost"
    assert second.harness.restored.version == first.harness.trainer.exported[-1]
    assert check([first, second])["dropped"] == 0
    return held


async def test_changed_setting_with_groups_in_flight_is_refused(tmp_path):
    (tmp_path / "first").mkdir()
    first = Life(tmp_path / "first", max_staleness=3)
    assert await first.run_until_dead(Kill(tmp_path / "first", tmp_path / "second", writes=30))
    second = Life(tmp_path / "second", max_staleness=3, updates_per_batch=2, publish_every=2)
    with pytest.raises(JournalMismatch, match=r"trainer\.updates_per_batch was 1 and is 2"):
        await second.harness.open()
    second.harness.recorder.close()


async def test_prompts_of_a_removed_journal_are_admitted_again(tmp_path):
    (tmp_path / "first").mkdir()
    options = {"max_staleness": 3, "checkpoint_every": 2}
    first = Life(tmp_path / "first", **options)
    checkpoints = tmp_path / "first" / "checkpoints"
    kill = Kill(
        tmp_path / "first", tmp_path / "second", writes=10, counts=lambda: any(checkpoints.glob("step-??????/run.json"))
    )
    assert await first.run_until_dead(kill)
    shutil.rmtree(tmp_path / "second" / "journal")
    second = Life(tmp_path / "second", **options, updates_per_batch=2, publish_every=2)
    assert second.start.train_step, "no checkpoint was made"
    assert await second.harness.run()
    unfinished = second.start.unfinished_prompts
    again = [prompt for _, (prompt, _, _) in sorted(second.rolled.items())]
    assert again[: len(unfinished)] == list(unfinished)
    assert again[len(unfinished)] == second.start.prompt_cursor
    assert all(line["ledger/error"] == 0 for line in second.harness.lines("metrics.jsonl"))


@pytest.mark.parametrize(("owner", "write"), [(EventJournal, "_write"), (ContentWriter, "_append")])
async def test_full_disk_ends_the_run_and_costs_no_group(tmp_path, monkeypatch, owner, write):
    whole, left = getattr(owner, write), iter(range(30))

    def until_full(*args):
        if next(left, None) is None:
            raise JournalFull("the disk is full")
        return whole(*args)

    first = Life(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, write, until_full)
        with pytest.raises(ExceptionGroup) as caught:
            await first.harness.run()
    assert all("the disk is full" in line for line in causes(caught.value))
    second = Life(tmp_path)
    assert await second.harness.run()
    assert check_records(second)["dropped"] == 0
    check_prompts([first, second])
    check_tokens([first, second])


async def test_group_is_put_once_its_content_is_stored(tmp_path, monkeypatch):
    life, closed = Life(tmp_path), set()
    put = life.harness.queue.put

    append = ContentWriter.append

    async def slow_append(writer, records):
        await append(writer, records)
        await asyncio.sleep(0.001)  # a slow disk
        closed.update((r.group, r.trajectory) for r in records if isinstance(r.what, TrajectoryClosed))

    async def checked(head):
        assert closed.issuperset((head.group, number) for number in range(len(head.trajectories)))
        return await put(head)

    life.harness.queue.put = checked
    monkeypatch.setattr(ContentWriter, "append", slow_append)
    assert await life.harness.run()
