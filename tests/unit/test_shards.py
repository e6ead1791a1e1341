"""A queue whose content lies in shards: the same calls give the same answers, and nothing is lost between processes."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.client import QueueUnavailable
from message_queue.contract import QueueError
from message_queue.journal import JournalError, JournalRunError
from message_queue.journal.disk import OsDisk
from message_queue.restart import JournalPlace
from message_queue.shards.inventory import Books, check_journal, shard_name
from tests.e2e.runs import read_shards
from tests.unit import test_restart as single
from tests.unit.journal_disk import FakeDisk
from tests.unit.shards import Disks, Fuse, group_of, opened
from tests.unit.test_restart import Run, records

NAMES, WEIGHTS = ("admit", "append", "put", "drop", "take", "train", "save"), (4, 8, 6, 1, 3, 3, 1)


async def drive(run, rng, calls):
    """Make calls; the name of the one that found the queue dead."""
    for _ in range(calls):
        name = rng.choices(NAMES, WEIGHTS)[0]
        call = getattr(run, name)
        try:
            await (call(rng) if name in ("append", "put", "drop") else call())
        except QueueUnavailable:
            return name
    return None


class Seen(Run):
    """A Run that keeps what it was given."""

    def __init__(self, *of, **more):
        super().__init__(*of, **more)
        self.batches = []
        take = self.client.take

        async def seen():
            batch = await take()
            groups = [(g.group, g.prompt, g.admitted_update, told(g)) for g in batch.groups]
            self.batches.append((groups, batch.update, batch.version_updates))
            return batch

        self.client.take = seen


def told(group):
    """What a group holds, to compare."""
    return [
        (t.token_ids().tolist(), t.behaviour_logprobs().tolist(), t.param_versions().tolist(), t.closed)
        for t in group.trajectories
    ]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 100), shards=st.integers(2, 3))
def test_the_same_calls_give_the_same_admissions_batches_and_ledger(seed, calls, shards):
    async def run():
        service, client, _ = await single.opened(FakeDisk(), s=2)
        one = Seen(service, client, make=group_of)
        many = await opened(Disks.of(shards))
        several = Seen(many.service, many.client, make=group_of)
        for driven in (one, several):
            assert await drive(driven, random.Random(seed), calls) is None
        assert one.groups == several.groups
        assert one.batches == several.batches
        assert await client.snapshot() == await many.client.snapshot()
        assert await client.drain_records() == await many.client.drain_records()
        await asyncio.gather(service.close_journal(), many.close())

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), messages=st.integers(8, 400), shards=st.integers(1, 3), power=st.booleans())
def test_processes_that_die_between_any_two_messages_lose_nothing_that_was_answered(seed, messages, shards, power):
    """What no sync has brought to the disk may be lost with the power, of each disk another part; whatever is
    there then is the group's own, and only once."""

    async def run():
        rng = random.Random(seed)
        first = await opened(Disks.of(shards))
        first.fuse.left = messages
        driven = Run(first.service, first.client, make=group_of)
        cut_short = await drive(driven, rng, 200)
        disks = Disks(first.service._place.disk, [holder._place.disk for holder in first.holders])
        lost = partial(FakeDisk.after_power_loss, kept=lambda fresh: rng.randrange(fresh + 1))
        left = disks.after(lost if power else FakeDisk.after_kill)
        again = await opened(left, step=driven.saved, checkpoint=driven.checkpoint)
        await first.close()
        await check(again, driven, cut_short, power)
        await again.close()
        # and what it has then, it has again
        left = Disks(again.service._place.disk, [holder._place.disk for holder in again.holders])
        last = await opened(left.after(FakeDisk.after_kill), step=driven.saved, checkpoint=driven.checkpoint)
        assert last.restored.live == again.restored.live
        await last.close()

    asyncio.run(run())


async def check(again, driven, cut_short, power):
    restored, counts = again.restored, (await again.client.snapshot()).ledger
    assert (counts.error, counts.token_error) == (0, 0)
    trained = {g for g, state in driven.groups.items() if isinstance(state, int)}
    later = {g for g in trained if driven.groups[g] > driven.saved}
    live = driven.of("open", "ready", "taken") | later
    assert not any("lost" in note for note in restored.notes), "content is durable before its group is ready"
    if power:
        assert not restored.live & (trained - later), "what a checkpoint holds has ended"
    else:
        surplus = {"admit": 1, "put": 1, "drop": 1}.get(cut_short, 0)
        assert len(restored.live ^ live) <= surplus
        assert restored.replay >= driven.step - driven.saved - (cut_short == "train")
        assert {g.group for g in restored.open} - driven.of("open") <= {len(driven.groups)}
    for group in restored.open:
        expected = group_of(again.service._queue._held.open[group.group])
        assert group.prompt == expected.prompt
        have, whole = group.trajectories[0].token_ids(), expected.trajectories[0].token_ids()
        assert np.array_equal(have, whole[: len(have)])
        _, done = driven.written.get(group.group, (expected, 0))
        if not power:
            assert len(have) >= (0, 2, 5, 5)[done]
            assert group.closed >= (done == 3)
    batch = 0
    while again.service._queue._schedule.batch_ready():
        got = await again.client.take()
        for group in got.groups:
            assert told(group) == told(group_of(group))
        assert batch >= restored.replay or got.update == driven.saved + batch
        await again.client.trained([g.group for g in got.groups], train_step=got.update + 1)
        batch += 1


async def filled(disks, groups, **options):
    made = await opened(disks, **options)
    for prompt in range(groups):
        group = group_of(await made.client.admit(prompt))
        await made.client.append(records(group))
        await made.client.put(group)
    return made


async def test_a_ready_group_whose_holder_lost_a_part_is_open_and_goes_on_from_what_is_left():
    disks = Disks.of(2)
    made = await filled(disks, 3)
    file = disks.holders[1].files[max(disks.holders[1].files)]
    await made.close()
    left = disks.after(FakeDisk.after_kill)
    torn = left.holders[1].files[max(left.holders[1].files)]
    torn.data = torn.data[:-8]  # of the record that closes the trajectory of group 1
    assert len(torn.data) < len(file.data)
    again = await opened(left)
    (group,) = again.restored.open
    assert (group.group, group.prompt, len(group.trajectories[0]), group.closed) == (1, 1, 5, False)
    assert "group 1 lost its records 2 to 2; it is open" in again.restored.notes
    assert any(note.startswith("shard-01: cut off") for note in again.restored.notes)
    whole = group_of(group)
    await again.client.append(records(whole)[2:])
    assert (await again.client.put(whole)).accepted
    assert sorted(g.group for g in (await again.client.take()).groups) == [0, 1]


async def test_a_group_of_which_nothing_was_appended_is_open_and_empty_and_content_of_no_group_is_dropped():
    disks = Disks.of(2)
    made = await opened(disks)
    admitted = [await made.client.admit(prompt) for prompt in range(3)]
    await made.client.append([r for a in admitted[1:] for r in records(group_of(a))[:2]])
    await made.close()
    left = disks.after(FakeDisk.after_kill)
    left.books.files.popitem()
    left.books = FakeDisk()
    again = await opened(left)
    assert (again.restored.began, again.restored.open) == (True, ())
    assert [(await holder._journal.stats()).live_groups for holder in again.holders] == [0, 0]
    await again.close()
    again = await opened(disks.after(FakeDisk.after_kill))
    assert [(g.group, len(g.trajectories[0])) for g in again.restored.open] == [(0, 0), (1, 5), (2, 5)]
    await again.client.append(records(group_of(admitted[0])))
    assert (await again.client.put(group_of(admitted[0]))).accepted


async def test_a_holder_without_its_journal_is_told():
    disks = Disks.of(2)
    made = await filled(disks, 2)
    await made.close()
    left = disks.after(FakeDisk.after_kill)
    left.holders[1] = FakeDisk()
    again = await opened(left)
    assert [(g.group, g.num_tokens) for g in again.restored.open] == [(1, 0)]
    assert "there was no journal of shard 1: what its groups had is lost" in again.restored.notes


async def test_holders_give_back_the_room_of_what_has_ended():
    made = await opened(Disks.of(2))
    run = Run(made.service, made.client, make=group_of)
    await drive(run, random.Random(3), 300)
    assert run.step > 4, "the seed trains a few steps"
    await run.train()
    await run.save()
    held = set().union(*(holder._numbers for holder in made.holders))
    assert held <= run.of("open", "ready", "taken")
    assert set().union(*(holder._whole for holder in made.holders)) <= run.of("ready", "taken")


async def test_what_is_appended_to_a_group_that_has_ended_is_left_out():
    made = await opened(Disks.of(2), s=0, b=1)
    first, second = [group_of(await made.client.admit(0))], None
    parts = records(first[0])
    await made.client.append(parts[:1])
    await made.client.drop(0, reason="expired: too slow", expired=True)
    second = group_of(await made.client.admit(1))
    await made.client.append([parts[1], *records(second)])
    await made.client.put(second)
    await made.client.trained([g.group for g in (await made.client.take()).groups], train_step=1)
    await made.client.append(parts)
    assert [sorted(holder._numbers) for holder in made.holders] == [[], [1]]


def test_books_that_come_late_bring_nothing_back():
    old, new = Books(3, frozenset({0, 2}), frozenset({2})), Books(5, frozenset({2, 4}), frozenset({4}))
    for books in (new.after(old), old.after(new)):
        assert [group for group in range(7) if books.ended(group)] == [0, 1, 3]


async def test_the_journal_of_another_number_of_shards_is_refused_with_the_way_out(tmp_path):
    made = await filled(Disks.of(2), 1, directory=tmp_path)
    await made.close()
    (tmp_path / "000000000001.journal").write_bytes(made.service._place.disk.files["000000000001.journal"].data)
    check_journal(tmp_path, run="run", shards=2)
    for shards in (1, 3):
        with pytest.raises(JournalRunError, match=rf"queue.shards=2, this run has queue.shards={shards}; set"):
            check_journal(tmp_path, run="run", shards=shards)
    with pytest.raises(JournalRunError, match="is of run 'run shards=2', this run is 'run'"):
        await single.opened(made.service._place.disk.after_kill())


async def test_a_dead_holder_is_a_dead_queue():
    made = await opened(Disks.of(2), fuse=Fuse())
    group = group_of(await made.client.admit(0))
    made.fuse.left = 0
    with pytest.raises(QueueUnavailable, match="append"):
        await made.client.append(records(group))


async def test_finished_groups_that_were_never_appended_are_refused():
    made = await opened(Disks.of(2))
    with pytest.raises(JournalError, match="cannot become ready"):
        await made.client.put(group_of(await made.client.admit(0)))


async def test_books_of_a_beginning_that_come_twice_cost_no_group():
    made = await opened(Disks.of(1))
    group = group_of(await made.client.admit(0))
    await made.client.append(records(group))
    with pytest.raises(QueueError, match="were begun before"):
        await made.holders[0].begin(Books(0, frozenset(), frozenset()))
    assert (await made.client.put(group)).accepted


async def test_a_person_reads_all_content_from_the_folders_of_a_run_with_shards(tmp_path):
    disks = Disks(OsDisk(tmp_path), [OsDisk(tmp_path / shard_name(shard)) for shard in range(2)])
    many = await opened(disks)
    run = Run(many.service, many.client, make=group_of)
    await drive(run, random.Random(3), 60)
    await many.close()
    recovered, content = await read_shards(JournalPlace(directory=tmp_path, run="run", trajectories=1), 2)
    live = {g for g, state in run.groups.items() if state != "dropped" and state not in range(run.saved + 1)}
    assert content.keys() == live and len({group % 2 for group in live}) == 2
    for group, (made, written) in ((group, run.written[group]) for group in live):
        whole = told(made)[0][0]
        held = len(made.trajectories[0]) if written > 1 else 2 * written
        assert content[group].prompt == made.prompt
        assert told(content[group])[0][0] == whole[:held]
    assert len(recovered.ready) == sum(run.groups[group] != "open" for group in live)
