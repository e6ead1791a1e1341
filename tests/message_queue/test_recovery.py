"""open_queue after a kill: every answered call is there, and nothing else."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.errors import JournalMismatch
from message_queue.ledger import Drop, DropKind
from message_queue.recovery import TOO_MANY
from message_queue.state import QueueSnapshot
from tests.helpers.groups import head_for
from tests.helpers.queue_runs import CALLS, Drive, copied, opened, reopened

POLICIES = st.sampled_from(["wait", "drop", "recycle", "mask"])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 120), policy=POLICIES, p=st.integers(1, 2))
async def test_a_killed_queue_has_everything_that_it_answered(tmp_path_factory, seed, calls, policy, p):
    directory = tmp_path_factory.mktemp("journal")
    options = {"s": 3, "policy": policy, "p": p}
    queue, journal, _ = await opened(directory / "a", **options)
    drive = Drive(queue, rng=random.Random(seed), s=3, p=p)
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


async def filled(directory, groups, *, steps=0, **options):
    """A journal with ready groups after `steps` train steps."""
    queue, journal, _ = await opened(directory, **options)
    for prompt in range(groups):
        await queue.put(head_for(await queue.admit(prompt)))
    for step in range(1, steps + 1):
        await queue.trained([g.group for g in (await queue.take()).groups], train_step=step)
    return queue, journal


async def test_groups_without_a_batch_within_the_bound_are_requeued(tmp_path):
    queue, journal = await filled(tmp_path, 6, s=2)
    queue._state.next_update = 0
    await journal.close()
    queue, journal, restored = await opened(tmp_path, s=0)
    assert (restored.live, restored.waiting) == ({0, 1}, (2, 3, 4, 5))
    counts = (await queue.snapshot()).ledger
    assert (counts.error, counts.dropped, counts.reasons) == (0, 4, {DropKind.REQUEUED: 4})
    assert {r["reason"] for r in await queue.records_after(0)} == {str(TOO_MANY)}
    await journal.close()
    restored, _ = await reopened(tmp_path, s=0)
    assert (restored.live, restored.waiting) == ({0, 1}, (2, 3, 4, 5)), "until they are admitted"


@pytest.mark.parametrize("policy", ["drop", "recycle"])
async def test_a_ready_group_too_old_at_a_restart_is_given_up(tmp_path, policy):
    options = {"s": 3, "b": 1, "policy": policy}
    _, journal = await filled(tmp_path / "3", 1, **options)
    await journal.close()
    copied(tmp_path / "3", tmp_path / "4")
    for next_update, given_up in ((3, set()), (4, {0})):
        checkpoint = QueueSnapshot(next_group=1, next_update=next_update)
        restored, _ = await reopened(tmp_path / str(next_update), checkpoint=checkpoint, **options)
        assert restored.given_up == given_up and len(restored.ready) == 1 - len(given_up)
        assert restored.waiting == ((0,) if given_up and policy == "recycle" else ())


async def test_a_new_journal_continues_from_the_snapshot(tmp_path):
    queue, journal = await filled(tmp_path / "a", 3, steps=1)
    saved = await queue.snapshot()
    await journal.close()
    options = {"step": 1, "checkpoint": saved, "prompt_cursor": 3, "waiting": saved.prompts}
    restored, snapshot = await reopened(tmp_path / "b", **options)
    assert (restored.began, restored.live, restored.next_group) == (True, frozenset(), 3)
    assert (restored.prompt_cursor, restored.waiting) == (3, (2,))
    counts = snapshot.ledger
    assert (counts.error, counts.admitted, counts.trained, counts.dropped) == (0, 3, 2, 1)


@pytest.mark.parametrize("checkpoint", [None, QueueSnapshot()])
async def test_a_new_journal_starts_from_nothing(tmp_path, checkpoint):
    first, _ = await reopened(tmp_path, checkpoint=checkpoint)
    again, _ = await reopened(tmp_path, checkpoint=checkpoint)
    assert (first.began, again.began, first.notes, again.notes) == (True, False, (), ())
    assert (first.version, first.prompt_cursor) == (0, 0)


async def test_a_requeued_prompt_survives_kills(tmp_path):
    options = {"s": 0, "b": 1, "policy": "recycle"}
    queue, journal, _ = await opened(tmp_path, **options)
    assert await queue.drop((await queue.admit(0)).group, reason=Drop(DropKind.EXPIRED, "too slow"), tokens=5)
    await journal.close()
    restored, snapshot = await reopened(tmp_path, **options)
    assert (restored.waiting, snapshot.requeues, restored.prompt_cursor) == ((0,), {0: 1}, 1)
    assert snapshot.waiting == (), "the driver asks for it"
    queue, journal, restored = await opened(tmp_path, **options)
    assert restored.waiting == (0,)
    assert (await queue.admit(0)).prompt == 0
    await journal.close()
    restored, _ = await reopened(tmp_path, **options)
    assert ([(a.prompt, a.group) for a in restored.open], restored.waiting) == ([(0, 1)], ())


async def test_a_trained_prompt_keeps_its_requeues_until_a_checkpoint(tmp_path):
    options = {"s": 0, "b": 1, "policy": "recycle"}
    queue, journal, _ = await opened(tmp_path / "a", **options)
    await queue.drop((await queue.admit(0)).group, reason=Drop(DropKind.EXPIRED, "too slow"), tokens=5)
    await queue.put(head_for(await queue.admit(0)))
    await queue.trained([g.group for g in (await queue.take()).groups], train_step=1)
    assert (await queue.snapshot()).requeues == {}, "a checkpoint of this step never admits the prompt again"
    left = copied(tmp_path / "a", tmp_path / "b")
    await queue.checkpointed(1)
    assert queue._state.requeues == {}
    await journal.close()
    _, snapshot = await reopened(left, incomplete=frozenset({1}), **options)
    assert snapshot.requeues == {0: 1}


async def test_groups_without_their_content_are_reopened(tmp_path):
    _, journal = await filled(tmp_path, 4, steps=1)
    await journal.close()
    restored, snapshot = await reopened(tmp_path, incomplete=frozenset({1, 3}))
    assert ([a.group for a in restored.open], [a.group for a in restored.ready]) == ([1, 3], [0, 2])
    assert restored.replay == 0
    assert {1, 3} == {n for n in range(4) if any(f"group {n} " in note for note in restored.notes)}
    assert snapshot.ledger.token_error == 0


async def test_versions_after_the_repeated_steps_count_as_of_their_end_until_the_next_publish(tmp_path):
    queue, journal = await filled(tmp_path, 4, steps=2)
    await queue.publish(1, update=2)
    await queue.loaded(1)
    young = await queue.admit(4)
    await journal.close()
    restored, _ = await reopened(tmp_path, incomplete=frozenset({2}))
    assert (restored.replay, restored.version_updates, restored.diverged) == (1, {0: 0, 1: 1}, True)
    assert replace(young, admitted_update=1) in restored.open
    queue, journal, restored = await opened(tmp_path)
    assert restored.diverged
    await queue.trained([g.group for g in (await queue.take()).groups], train_step=1)
    await queue.publish(2, update=1)
    await journal.close()
    restored, _ = await reopened(tmp_path)
    assert not restored.diverged


async def test_a_journal_of_another_checkpoint_is_refused(tmp_path):
    queue, journal = await filled(tmp_path, 4, steps=1)
    saved = await queue.snapshot()
    await queue.checkpointed(1)
    await journal.close()
    for step, checkpoint in ((0, None), (2, saved)):
        with pytest.raises(JournalMismatch):
            await opened(tmp_path, step=step, checkpoint=checkpoint)
    restored, _ = await reopened(tmp_path, step=1, checkpoint=saved)
    assert restored.live == {2, 3}


async def test_a_changed_setting_is_refused_while_groups_are_in_flight(tmp_path):
    queue, journal, _ = await opened(tmp_path, settings={"staleness.max_staleness": 1, "staleness.policy": "wait"})
    group = (await queue.admit(0)).group
    await journal.close()
    new = {"staleness.max_staleness": 3, "staleness.policy": "wait"}
    with pytest.raises(JournalMismatch, match=r"staleness\.max_staleness"):
        await opened(tmp_path, settings=new)
    queue, journal, _ = await opened(tmp_path, settings={"staleness.max_staleness": 1})
    await queue.drop(group, reason=Drop(DropKind.ROLLOUT_FAILED, "why"))
    await journal.close()
    restored, _ = await reopened(tmp_path, settings=new)
    assert not restored.began
