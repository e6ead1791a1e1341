"""open_queue after a kill: everything that was answered is there, and nothing else."""

import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.contract import QueueSnapshot
from message_queue.disk_errors import JournalMismatch
from message_queue.recovery import EXPIRED
from message_queue.state import QueueState
from tests.helpers.groups import head_for
from tests.helpers.queue_runs import CALLS, Drive, copied, opened, run

POLICIES = st.sampled_from(["wait", "drop", "recycle", "mask"])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 120), policy=POLICIES, p=st.integers(1, 2))
def test_a_killed_queue_has_everything_that_it_answered(seed, calls, policy, p):
    async def check(directory):
        rng = random.Random(seed)
        options = {"s": 3, "policy": policy, "p": p}
        queue, journal, _ = await opened(directory / "a", **options)
        drive = Drive(queue, rng=rng, p=p)
        for _ in range(calls):
            await drive.call(*CALLS)
        left = copied(directory / "a", directory / "b")
        before = await queue.snapshot()
        await journal.close()
        again, journal, restored = await opened(left, step=drive.saved, checkpoint=drive.checkpoint, **options)
        assert restored.live | restored.given_up == drive.live
        assert {a.group for a in restored.open} <= set(drive.of("open"))
        assert (restored.prompt_cursor, restored.next_group) == (drive.prompt, len(drive.groups))
        assert (restored.version, restored.replay) == (drive.version, (drive.step - drive.saved) // p)
        assert not restored.diverged
        counts = (await again.snapshot()).ledger
        assert (counts.error, counts.token_error, counts.admitted) == (0, 0, before.ledger.admitted)
        assert counts.dropped == len(drive.of("dropped")) + len(restored.given_up)
        waiting = set(restored.waiting) - {a.prompt for a in drive.admissions.values() if a.group in restored.given_up}
        assert waiting == set(before.waiting)
        for _ in range(restored.replay):
            assert not again._can_admit()
            batch = await again.take()
            assert [g.group for g in batch.groups] == drive.batches[batch.update]
        await journal.close()

    with TemporaryDirectory() as directory:
        run(check(Path(directory)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES)
def test_a_queue_that_is_killed_again_and_again_loses_nothing(seed, policy):
    async def check(directory):
        rng, prompts = random.Random(seed), set()
        queue, journal, _ = await opened(directory / "0", s=2, policy=policy)
        step, checkpoint = 0, None
        drive = Drive(queue, rng=rng)
        for life in range(1, 5):
            for _ in range(rng.randrange(1, 60)):
                await drive.call(*CALLS)
            prompts |= {a.prompt for a in drive.admissions.values()}
            if drive.checkpoint is not None:
                step, checkpoint = drive.saved, drive.checkpoint
            left = copied(directory / str(life - 1), directory / str(life))
            await journal.close()
            queue, journal, restored = await opened(left, s=2, policy=policy, step=step, checkpoint=checkpoint)
            drive = await self_driven(queue, restored, rng=rng, step=step)
            snapshot = await queue.snapshot()
            assert (snapshot.ledger.error, snapshot.ledger.token_error) == (0, 0)
            assert len({a.prompt for a in snapshot.unfinished}) == len(snapshot.unfinished)
            ended = {r["group"] for r in await queue.records_after(0)}
            assert ended <= restored.given_up | {g for g, s in drive.groups.items() if isinstance(s, int)}
        await journal.close()

    with TemporaryDirectory() as directory:
        run(check(Path(directory)))


async def self_driven(queue, restored, *, rng, step):
    """A drive that trains what is to be trained again, and publishes the weights."""
    drive = Drive(queue, rng=rng)
    drive.step = drive.saved = step
    drive.prompt, drive.version = restored.prompt_cursor, restored.version
    drive.admissions = {a.group: a for a in restored.open}
    drive.groups = dict.fromkeys(drive.admissions, "open") | dict.fromkeys((a.group for a in restored.ready), "ready")
    for _ in range(restored.replay):
        await drive.take()
        await queue.trained([g.group for g in drive.batch.groups], train_step=drive.step + 1)
        drive.step += 1
        drive.groups |= dict.fromkeys((g.group for g in drive.batch.groups), drive.step)
        drive.batch = None
    if rng.random() < 0.7 or not restored.replay:
        drive.version += 1
        await queue.publish(drive.version, update=drive.step)
        await queue.loaded(drive.version)
    return drive


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES)
def test_following_the_events_gives_the_live_state_at_every_prefix(seed, policy):
    async def check(directory):
        queue, journal, _ = await opened(directory, s=2, policy=policy)
        seen = []
        record, rebase = journal.record, journal.rebase
        journal.record = lambda events: (seen.extend(events), record(events))[1]
        drive, dumps = Drive(queue, rng=random.Random(seed)), {0: queue._state.dump()}
        journal.rebase = lambda state: (seen.clear(), dumps.clear(), rebase(state))[2]
        for _ in range(60):
            await drive.call(*CALLS)
            dumps[len(seen)] = queue._state.dump()
        base, events = journal.read()
        assert list(events) == seen
        state = QueueState(base.state)
        for number, event in enumerate((None, *events)):
            if event is not None:
                state.apply(event)
            if number in dumps:
                assert sorted_dump(state.dump()) == sorted_dump(dumps[number])
        await journal.close()

    with TemporaryDirectory() as directory:
        run(check(Path(directory)))


def sorted_dump(dump):
    return msgspec.structs.replace(dump, groups=tuple(sorted(dump.groups, key=lambda g: g.group)))


async def filled(directory, groups, **options):
    queue, journal, _ = await opened(directory, **options)
    for prompt in range(groups):
        await queue.put(head_for(await queue.admit(prompt)))
    return queue, journal


async def test_the_restart_repeats_batches_of_steps_after_the_checkpoint(tmp_path):
    queue, journal = await filled(tmp_path, 4)
    for step in (1, 2):
        await queue.trained([g.group for g in (await queue.take()).groups], train_step=step)
    await queue.publish(1, update=2)
    await journal.close()
    queue, journal, restored = await opened(tmp_path)
    assert (restored.replay, restored.version, restored.diverged) == (2, 1, False)
    first = await queue.take()
    assert ([g.group for g in first.groups], first.update) == ([0, 1], 0)
    await queue.trained([0, 1], train_step=1)
    await journal.close()
    queue, journal, restored = await opened(tmp_path)
    assert restored.replay == 2, "the checkpoint is the same"
    assert [[g.group for g in (await queue.take()).groups] for _ in range(2)] == [[0, 1], [2, 3]]
    assert queue._can_admit()
    await journal.close()


async def test_groups_that_fit_no_batch_within_the_bound_are_recycled(tmp_path):
    queue, journal = await filled(tmp_path, 6, s=2)
    queue._state.next_update = 0
    await journal.close()
    queue, journal, restored = await opened(tmp_path, s=0)
    assert (restored.live, restored.waiting) == ({0, 1}, (2, 3, 4, 5))
    counts = (await queue.snapshot()).ledger
    assert (counts.error, counts.dropped, counts.reasons) == (0, 4, {"recycled": 4})
    assert {r["reason"] for r in await queue.records_after(0)} == {EXPIRED}
    await journal.close()
    queue, journal, restored = await opened(tmp_path, s=0)
    assert (restored.live, restored.waiting) == ({0, 1}, (2, 3, 4, 5)), "until they are admitted"
    await queue.take()
    await queue.trained([0, 1], train_step=1)
    await queue.publish(1, update=1)
    await queue.loaded(1)
    assert [(await queue.admit(prompt)).group for prompt in restored.waiting[:2]] == [6, 7]
    await journal.close()


async def test_a_new_journal_continues_from_the_snapshot(tmp_path):
    queue, journal = await filled(tmp_path / "a", 3)
    await queue.trained([g.group for g in (await queue.take()).groups], train_step=1)
    snapshot = await queue.snapshot()
    await journal.close()
    queue, journal, restored = await opened(
        tmp_path / "b", step=1, checkpoint=snapshot, prompt_cursor=3, waiting=snapshot.prompts
    )
    assert (restored.began, restored.live, restored.next_group) == (True, frozenset(), 3)
    assert (restored.prompt_cursor, restored.waiting) == (3, (2,))
    counts = (await queue.snapshot()).ledger
    assert (counts.error, counts.admitted, counts.trained, counts.dropped) == (0, 3, 2, 1)
    await journal.close()


async def test_an_empty_snapshot_is_a_start_from_nothing(tmp_path):
    _, journal, restored = await opened(tmp_path, checkpoint=QueueSnapshot())
    assert (restored.began, restored.version, restored.prompt_cursor) == (True, 0, 0)
    await journal.close()


async def test_a_requeued_prompt_survives_kills(tmp_path):
    queue, journal, _ = await opened(tmp_path, s=0, b=1, policy="recycle")
    assert await queue.drop((await queue.admit(0)).group, reason="expired: too slow", tokens=5, expired=True)
    await journal.close()
    queue, journal, restored = await opened(tmp_path, s=0, b=1, policy="recycle")
    again = await queue.snapshot()
    assert (restored.waiting, again.recycles, restored.prompt_cursor) == ((0,), {0: 1}, 1)
    assert again.waiting == (), "the driver asks for it"
    await journal.close()
    queue, journal, restored = await opened(tmp_path, s=0, b=1, policy="recycle")
    assert restored.waiting == (0,)
    assert (await queue.admit(0)).prompt == 0
    await journal.close()
    _, journal, restored = await opened(tmp_path, s=0, b=1, policy="recycle")
    assert ([(a.prompt, a.group) for a in restored.open], restored.waiting) == ([(0, 1)], ())
    await journal.close()


async def test_masked_tokens_survive_a_restart(tmp_path):
    options = {"s": 0, "b": 1, "policy": "mask"}
    queue, journal, _ = await opened(tmp_path, **options)
    first = await queue.admit(0)
    queue._policy.max_staleness = 1
    await queue.put(head_for(await queue.admit(1)))
    await queue.trained([g.group for g in (await queue.take()).groups], train_step=1)
    await queue.publish(1, update=1)
    queue._policy.max_staleness = 0
    await queue.put(head_for(first, versions=(0, 1)))
    assert (await queue.take()).min_update == 1
    await queue.trained([first.group], train_step=2, tokens=[3])
    await journal.close()
    start = QueueSnapshot(next_group=2, next_update=2, version=1, update=1)
    queue, journal, _ = await opened(tmp_path, step=2, checkpoint=start, **options)
    ledger = (await queue.snapshot()).ledger
    assert (ledger.trained_tokens, ledger.masked_tokens, ledger.token_error) == (6, 3, 0)
    await journal.close()


async def test_groups_without_their_content_are_open_again(tmp_path):
    queue, journal = await filled(tmp_path, 4)
    await queue.trained([g.group for g in (await queue.take()).groups], train_step=1)
    await journal.close()
    queue, journal, restored = await opened(tmp_path, incomplete=frozenset({1, 3}))
    assert ([a.group for a in restored.open], [a.group for a in restored.ready]) == ([1, 3], [0, 2])
    assert restored.replay == 0
    assert len([note for note in restored.notes if "open again" in note]) == 2
    assert (await queue.snapshot()).ledger.token_error == 0
    await journal.close()


async def test_versions_after_the_repeated_steps_count_as_of_their_end(tmp_path):
    queue, journal = await filled(tmp_path, 4)
    for step in (1, 2):
        await queue.trained([g.group for g in (await queue.take()).groups], train_step=step)
    await queue.publish(1, update=2)
    await queue.loaded(1)
    young = await queue.admit(4)
    await journal.close()
    _, journal, restored = await opened(tmp_path, incomplete=frozenset({2}))
    assert (restored.replay, restored.version_updates, restored.diverged) == (1, {0: 0, 1: 1}, True)
    assert replace(young, admitted_update=1) in restored.open
    await journal.close()


async def test_a_journal_of_another_checkpoint_is_refused(tmp_path):
    queue, journal = await filled(tmp_path, 4)
    await queue.trained([g.group for g in (await queue.take()).groups], train_step=1)
    saved = await queue.snapshot()
    await queue.checkpointed(1)
    await journal.close()
    for step, checkpoint in ((0, None), (2, saved)):
        with pytest.raises(JournalMismatch):
            await opened(tmp_path, step=step, checkpoint=checkpoint)
    _, journal, restored = await opened(tmp_path, step=1, checkpoint=saved)
    assert restored.live == {2, 3}
    await journal.close()


async def test_a_changed_setting_is_refused_while_groups_are_in_flight(tmp_path):
    queue, journal, _ = await opened(tmp_path, settings={"staleness.max_staleness": 1, "staleness.policy": "wait"})
    group = (await queue.admit(0)).group
    await journal.close()
    new = {"staleness.max_staleness": 3, "staleness.policy": "wait"}
    with pytest.raises(JournalMismatch, match=r"staleness\.max_staleness was 1 and is 3.*1 groups"):
        await opened(tmp_path, settings=new)
    queue, journal, _ = await opened(tmp_path, settings={"staleness.max_staleness": 1})
    await queue.drop(group, reason="stopped")
    await journal.close()
    _, journal, restored = await opened(tmp_path, settings=new)
    assert not restored.began
    await journal.close()


async def test_a_new_journal_starts_without_notes(tmp_path):
    _, journal, restored = await opened(tmp_path)
    await journal.close()
    _, journal, again = await opened(tmp_path)
    await journal.close()
    assert (restored.began, again.began, restored.notes, again.notes) == (True, False, (), ())
