"""A queue that was killed after any call: all that it had answered is there, and nothing else."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.client import QueueClient, QueueClientConfig
from message_queue.contract import QueueError, QueueSnapshot
from message_queue.journal import JournalConfig, JournalFull, JournalRunError, check_owner
from message_queue.progress import CallBegun, RolloutRecord, Sampled, TrajectoryClosed
from message_queue.restart import JournalPlace
from message_queue.service import QueueService
from message_queue.shards.bookkeeper import Bookkeeper
from message_queue.shards.holder import ContentHolder
from message_queue.staleness import StalenessConfig
from message_queue.start import HOPELESS
from message_queue.tokens import StopReason
from message_queue.wire import encode_segment
from tests.unit.groups import group_for
from tests.unit.journal_disk import FakeDisk
from tests.unit.test_queue_client import Handle

BATCH = 2


def place(disk, *, step=0, checkpoint=None, **changes):
    options = {
        "directory": Path("journal"), "run": "run", "config": JournalConfig(fsync="never", max_file_bytes=4096),
        "checkpoint": checkpoint, "train_step": step, "trajectories": 1, "busy_s": 0.0, "disk": disk,
    }  # fmt: skip
    return JournalPlace(**options | changes)


async def opened(disk, *, s=1, b=BATCH, policy="wait", **options):
    service = QueueService(
        batch_groups=b, staleness=StalenessConfig(max_staleness=s, policy=policy), journal=place(disk, **options)
    )
    client = QueueClient(Handle(service), name="driver", routing=None, config=QueueClientConfig(slice_s=0.01))
    return service, client, await client.open(timeout_s=5)


def records(group):
    """Of the trajectory of `group_for`: its prompt, its segment, its end."""
    (trajectory,) = group.trajectories
    (turn,) = trajectory.turns
    (sampled,) = turn.segments
    end = TrajectoryClosed(stop_reason=StopReason.STOP, reward=1.0)
    steps = (turn.observation, Sampled(encode_segment(sampled)), end)
    places = (0, len(turn.observation), len(trajectory))
    return [
        RolloutRecord(group=group.group, trajectory=0, at=at, what=what) for at, what in zip(places, steps, strict=True)
    ]


class Run:
    """Drives a queue, and knows in which state each group is."""

    def __init__(self, service, client, *, make=group_for):
        self.queue, self.client, self.groups, self.written = service._queue, client, {}, {}
        self.make = make
        self.step = self.version = self.prompt = self.saved = 0
        self.batch, self.checkpoint = None, None

    async def admit(self):
        if not self.queue._schedule.can_admit(self.queue._versions.served_update):
            return
        admission = await self.client.admit(self.prompt)
        self.prompt += 1
        self.groups[admission.group], self.written[admission.group] = "open", (self.make(admission), 0)

    async def append(self, rng):
        group = self.pick(rng, lambda g: self.groups[g] == "open" and self.written[g][1] < 3)
        if group is not None:
            made, done = self.written[group]
            more = rng.randrange(1, 4 - done)
            await self.client.append(records(made)[done : done + more])
            self.written[group] = (made, done + more)

    async def put(self, rng):
        group = self.pick(rng, lambda g: self.groups[g] == "open" and self.written[g][1] == 3)
        if group is not None:
            await self.client.put(self.written[group][0])
            self.groups[group] = "ready"

    async def drop(self, rng):
        group = self.pick(rng, lambda g: self.groups[g] == "open")
        if group is not None:
            await self.client.drop(group, reason="rollout failed: why")
            self.groups[group] = "dropped"

    async def take(self):
        if self.batch is None and self.queue._schedule.batch_ready():
            self.batch = [group.group for group in (await self.client.take()).groups]
            self.groups |= dict.fromkeys(self.batch, "taken")

    async def train(self):
        if self.batch is not None:
            self.step += 1
            await self.client.trained(self.batch, train_step=self.step)
            self.groups |= dict.fromkeys(self.batch, self.step)
            self.batch = None
            self.version += 1
            await self.client.publish(self.version, update=self.step)
            await self.client.loaded(self.version)

    async def save(self):
        if self.batch is None:
            await self.client.sync()
            self.checkpoint, self.saved = await self.client.snapshot(), self.step
            await self.client.checkpointed(self.step)

    def pick(self, rng, wanted):
        found = [g for g in self.groups if wanted(g)]
        return rng.choice(found) if found else None

    def of(self, *states):
        return {g for g, state in self.groups.items() if state in states}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), calls=st.integers(1, 120))
def test_a_queue_killed_after_any_call_has_all_that_it_answered(seed, calls):
    async def run():
        rng, disk = random.Random(seed), FakeDisk()
        service, client, _ = await opened(disk, s=2)
        drive = Run(service, client)
        for _ in range(calls):
            name = rng.choices(("admit", "append", "put", "drop", "take", "train", "save"), (4, 8, 6, 1, 3, 3, 1))[0]
            call = getattr(drive, name)
            await (call(rng) if name in ("append", "put", "drop") else call())
        later = {g for g, state in drive.groups.items() if isinstance(state, int) and state > drive.saved}
        live = drive.of("open", "ready", "taken") | later
        assert (await service._journal.stats()).live_groups == len(live), "a checkpoint gives room back"
        left = disk.after_kill()
        _, again, restored = await opened(left, s=2, step=drive.saved, checkpoint=drive.checkpoint)
        await service.close_journal()
        assert restored.live == live
        assert {g.group for g in restored.open} == drive.of("open")
        assert (restored.prompt_cursor, restored.next_group, restored.version) == (
            drive.prompt, len(drive.groups), drive.version,
        )  # fmt: skip
        for group in restored.open:
            made, done = drive.written[group.group]
            assert len(group.trajectories[0].segments) == (done >= 2)
            assert group.closed == (done == 3)
            if done:
                tokens = group.trajectories[0].token_ids()
                assert np.array_equal(tokens, made.trajectories[0].token_ids()[: len(tokens)])
        counts = (await again.snapshot()).ledger
        assert (counts.error, counts.dropped) == (0, len(drive.of("dropped")))
        assert counts.trained == len(drive.groups) - len(restored.live) - counts.dropped
        assert restored.replay == drive.step - drive.saved
        for _ in range(restored.replay):
            batch = await again.take()
            assert {drive.groups[g.group] for g in batch.groups} == {batch.update + 1}

    asyncio.run(run())


async def filled(disk, groups, **options):
    service, client, _ = await opened(disk, **options)
    for prompt in range(groups):
        group = group_for(await client.admit(prompt))
        await client.append(records(group))
        await client.put(group)
    return service, client


async def test_batches_of_another_size_are_not_trained_again_as_they_were_but_as_ready_groups():
    disk = FakeDisk()
    service, client = await filled(disk, 4, s=1)
    await client.trained([g.group for g in (await client.take()).groups], train_step=1)
    await service.close_journal()
    _, client, restored = await opened(disk.after_kill(), s=3, b=1)
    assert restored.replay == 0
    assert [(await client.take()).groups[0].group for _ in range(4)] == [0, 1, 2, 3]


async def test_prompts_of_groups_that_no_batch_within_a_smaller_bound_is_left_for_are_admitted_again():
    disk = FakeDisk()
    service, _ = await filled(disk, 6, s=2)
    await service.close_journal()
    left = disk.after_kill()
    service, client, restored = await opened(left, s=0)
    assert (restored.live, restored.waiting) == ({0, 1}, (2, 3, 4, 5))
    counts = (await client.snapshot()).ledger
    assert (counts.error, counts.dropped, counts.reasons) == (0, 4, {"recycled": 4})
    assert {r["reason"] for r in await client.drain_records()} == {HOPELESS}
    assert {g.group for g in (await client.take()).groups} == {0, 1}
    await service.close_journal()
    _, client, restored = await opened(left.after_kill(), s=0)
    assert (restored.live, restored.waiting) == ({0, 1}, (2, 3, 4, 5))
    await client.take()
    await client.trained([0, 1], train_step=1)
    await client.publish(1, update=1)
    await client.loaded(1)
    assert [(await client.admit(prompt)).group for prompt in restored.waiting[:2]] == [6, 7]


async def test_a_queue_without_a_journal_left_goes_on_from_the_snapshot():
    service, client = await filled(FakeDisk(), 3)
    await client.trained([g.group for g in (await client.take()).groups], train_step=1)
    snapshot = await client.snapshot()
    await service.close_journal()
    _, client, restored = await opened(FakeDisk(), step=1, checkpoint=snapshot)
    assert (restored.began, restored.live, restored.next_group) == (True, frozenset(), 3)
    counts = (await client.snapshot()).ledger
    assert (counts.error, counts.admitted, counts.trained, counts.dropped) == (0, 3, 2, 1)


async def test_a_full_disk_is_named_and_a_restart_with_room_has_all_that_was_answered():
    disk = FakeDisk()
    service, client = await filled(disk, 2)
    disk.capacity = sum(len(file.data) for file in disk.files.values())
    with pytest.raises(JournalFull, match="make room"):
        await client.admit(2)
    await service.close_journal()
    left = disk.after_kill()
    _, client, restored = await opened(left)
    assert (restored.live, restored.next_group) == ({0, 1}, 2)
    assert (await client.admit(2)).group == 2


async def test_the_journal_of_another_run_is_refused_before_anything_starts(tmp_path):
    await (await opened(None, directory=tmp_path))[0].close_journal()
    check_owner(tmp_path, run="run")
    with pytest.raises(JournalRunError, match="is of run 'run', this run is 'other'"):
        check_owner(tmp_path, run="other")
    with pytest.raises(JournalRunError, match="is of run 'run', this run is 'other'"):
        await opened(None, directory=tmp_path, run="other")


async def test_an_empty_snapshot_is_a_start_from_nothing():
    _, _, restored = await opened(FakeDisk(), checkpoint=QueueSnapshot())
    assert (restored.began, restored.version, restored.prompt_cursor) == (True, 0, 0)


async def test_a_call_that_was_begun_and_not_answered_is_given_back():
    disk = FakeDisk()
    _, client, _ = await opened(disk)
    group = group_for(await client.admit(0))
    before = records(group)[:2]
    at = len(group.trajectories[0])
    begun = RolloutRecord(group=0, trajectory=0, at=at, what=CallBegun("search"))
    await client.append([*before, begun])
    _, _, restored = await opened(disk.after_kill())
    assert restored.open[0].trajectories[0].unsure_call == "search"
    reply = RolloutRecord(group=0, trajectory=0, at=at, what=np.array([5], np.int32))
    await client.append([reply])
    _, _, restored = await opened(disk.after_kill())
    assert restored.open[0].trajectories[0].unsure_call is None


async def test_a_prompt_that_waits_to_be_admitted_again_survives_kills_and_counts_go_on_without_a_journal():
    disk = FakeDisk()
    service, client, _ = await opened(disk, s=0, b=1, policy="recycle")
    expired = await client.admit(0)
    assert await client.drop(expired.group, reason="expired: too slow", tokens=5, expired=True)
    snapshot = await client.snapshot()
    await service.close_journal()
    service, client, restored = await opened(disk.after_kill(), s=0, b=1, policy="recycle")
    left = service._place.disk
    again = await client.snapshot()
    assert (restored.waiting, again.recycles, restored.prompt_cursor) == ((0,), {0: 1}, 1)
    assert again.waiting == (), "who restores asks for it"
    assert (again.ledger.admitted, again.ledger.reasons, again.ledger.error) == (1, {"recycled": 1}, 0)
    assert (await client.admit(0)).prompt == 0
    await service.close_journal()
    _, client, restored = await opened(left.after_kill(), s=0, b=1, policy="recycle")
    assert [(group.prompt, group.group) for group in restored.open] == [(0, 1)]
    assert ((await client.snapshot()).waiting, (await client.snapshot()).recycles) == ((), {0: 1})

    assert snapshot.prompts == (0,), "a checkpoint names it among the unfinished"
    _, client, restored = await opened(FakeDisk(), s=0, b=1, policy="recycle", checkpoint=snapshot)
    gone = await client.snapshot()
    assert (restored.began, gone.waiting, gone.recycles) == (True, (), {0: 1})


async def test_masked_tokens_are_told_apart_after_a_restart():
    disk = FakeDisk()
    service, client, _ = await opened(disk, s=0, b=1, policy="mask")
    group = group_for(await client.admit(0), versions=(0, 1))
    service._queue._schedule.advance()
    await client.publish(1, update=1)
    await client.append([*records_of_two(group)])
    await client.put(group)
    assert (await client.take()).min_update == 1
    await client.trained([group.group], train_step=1, tokens=[3])
    await client.checkpointed(1)
    await service.close_journal()
    start = QueueSnapshot(next_group=1, next_update=2, version=1, update=1)
    _, client, _ = await opened(disk.after_kill(), s=0, b=1, policy="mask", step=1, checkpoint=start)
    ledger = (await client.snapshot()).ledger
    assert (ledger.trained_tokens, ledger.masked_tokens, ledger.token_error) == (3, 3, 0)


def records_of_two(group):
    """Of a trajectory of one turn with two segments."""
    (trajectory,) = group.trajectories
    first, second = trajectory.segments
    start = len(trajectory.turns[0].observation)
    steps = [
        (0, trajectory.turns[0].observation),
        (start, Sampled(encode_segment(first))),
        (start + len(first), Sampled(encode_segment(second))),
        (len(trajectory), TrajectoryClosed(stop_reason=StopReason.STOP, reward=1.0)),
    ]
    return [RolloutRecord(group=group.group, trajectory=0, at=at, what=what) for at, what in steps]


@pytest.mark.parametrize("kind", [QueueService, Bookkeeper, ContentHolder])
async def test_a_journal_that_is_being_opened_is_not_opened_again_when_the_message_comes_twice(kind):
    at = place(FakeDisk())
    if kind is ContentHolder:
        part = ContentHolder(at)
    else:
        part = kind(batch_groups=BATCH, staleness=StalenessConfig(max_staleness=1), journal=at)
    first, second = await asyncio.gather(part.open(), part.open(), return_exceptions=True)
    assert first.began
    assert isinstance(second, QueueError) and "opened" in str(second)
    await part.close_journal()
