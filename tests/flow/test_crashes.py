"""A run that is killed at any write of its journal or content continues as if it had not stopped."""

import asyncio
import itertools
import random

import pytest

from tests.flow.crashes import STEPS, Kill, Life
from tests.flow.harness import check_trained

BATCH = 4


async def lives_of(tmp_path, kills, **options):
    """A life for each number in `kills`, dying after so many writes, and one that gets to the end."""
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
    """Each step and each group is there once, and nothing is missing."""
    steps, per_batch = second.harness.lines("metrics.jsonl"), second.per_batch
    assert [s["train_step"] for s in steps] == list(range(per_batch, STEPS * per_batch + 1, per_batch))
    total = second.harness.check_ledger()
    assert total["trained"] == STEPS * BATCH
    return total


def check_prompts(lives):
    """No prompt is skipped, and none is in two groups."""
    prompts = {}
    for life in lives:
        for group, (prompt, _, _) in life.rolled.items():
            assert prompts.setdefault(prompt, group) == group
    assert sorted(prompts) == list(range(len(prompts)))


def trained_prompts(lives):
    """Prompt of each group that was trained."""
    prompts = {group: prompt for life in lives for group, (prompt, _, _) in life.rolled.items()}
    return [prompts[line["group"]] for line in lives[-1].harness.groups("trained")]


def check_tokens(lives):
    """Trained tokens are those that engines sampled; no existing token is resampled."""
    groups = {group: found for life in lives for group, found in life.delivered.items()}
    check_trained(t for line in lives[-1].harness.groups("trained") for t in groups[line["group"]].trajectories)
    for life in lives:
        for request in (request for replica in life.harness.replicas for request in replica.requests):
            group, number = (int(part[1:]) for part in request.session.split("-"))
            held = life.rolled[group][1][number : number + 1]
            assert all(len(request.token_ids) >= length for length in held)


def check_batches(lives):
    """Steps after the checkpoint are repeated in the same batches; no ready group is rolled twice.

    A life that is killed while it repeats them leaves the rest to the next one.
    """
    known = {}  # number of a batch -> its groups, as trained last
    for life in lives:
        first = life.start.train_step // life.per_batch
        again = 0 if life.harness.restored is None else life.harness.restored.replay
        for number, groups in enumerate(life.batches, start=first):
            assert number >= first + again or known.get(number) == groups
            known[number] = groups
    for before, after in itertools.pairwise(lives):
        if after.harness.restored is not None:  # else it died before it had read the journal
            check_pair(before, after)


def check_pair(before, after):
    """Batches that both trained have the same content; no group that was ready is rolled twice."""
    again, offset = after.harness.restored.replay, after.start.train_step - before.start.train_step
    offset //= after.per_batch
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
    check_batches(lives)
    for before, after in itertools.pairwise(lives):
        check_versions(before, after)
    params = [s["param_version"] for s in lives[-1].harness.check_staleness(max_staleness)]
    assert params == sorted(params)
    return total


@pytest.mark.parametrize("writes", [0, 2, 5, 9, 15, 23, 34, 48, 65, 85, 105])
async def test_run_killed_at_any_write_repeats_and_loses_nothing(tmp_path, writes):
    assert check(await lives_of(tmp_path, [writes]))["dropped"] == 0


@pytest.mark.parametrize("seed", range(6))
async def test_run_killed_several_times_gets_to_its_end(tmp_path, seed):
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
        ({"policy": "drop", "mean_length": 30}, 1),
        ({"policy": "recycle", "mean_length": 30, "token_s": 0.002}, 1),
        ({"policy": "mask", "mean_length": 30, "token_s": 0.002}, 1),
        ({"resume_routing": "force"}, 1),
        ({"max_staleness": 2, "resume_routing": "replace", "mean_length": 30}, 2),
        ({"max_staleness": 2, "resume_routing": "split", "mean_length": 30}, 2),
        ({"turns": 3}, 1),
        ({"agents": {"solver": True, "critic": False}}, 1),
    ],
    ids=str,
)
async def test_run_of_every_setting_survives_a_kill(tmp_path, options, max_staleness):
    lives = await lives_of(tmp_path, [50 if options.get("token_s") is None else 30], **options)
    check_records(lives[-1])
    if options.get("policy") != "recycle":
        check_prompts(lives)
    check_batches(lives)
    trained = trained_prompts(lives)
    assert len(trained) == len(set(trained))
    lives[-1].harness.check_staleness(max_staleness)


async def test_stop_request_loses_no_token_and_resamples_none(tmp_path):
    for attempt in range(8):  # the number of tokens in flight at a stop depends on the machine
        if await stop_and_continue(tmp_path / str(attempt)):
            return
    pytest.fail("nothing was in flight at any stop")


async def stop_and_continue(directory):
    """Tokens that were in flight at the stop."""
    directory.mkdir()
    first = Life(directory, mean_length=40)
    run = asyncio.create_task(first.harness.run())
    await first.harness.trainer.three_done.wait()
    first.harness.parts.request_stop()
    assert await run is False
    second = Life(directory, mean_length=40)
    assert await second.harness.run()
    assert second.harness.restored.replay == 0
    held = sum(tokens for _, _, tokens in second.rolled.values())
    assert first.num_sampled == sum(group.num_tokens for group in first.delivered.values()) + held, "tokens are missing"
    assert second.harness.restored.version == first.harness.trainer.exported[-1]
    assert check([first, second])["dropped"] == 0
    return held
