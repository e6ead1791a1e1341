"""What each staleness policy does to groups and tokens that become too old, in the plain queue."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.contract import QueueSnapshot
from message_queue.events import Taken
from message_queue.heads import head_of
from message_queue.ledger import LedgerCounts
from message_queue.policies import build_policy
from message_queue.queue import TrajectoryQueue
from message_queue.recovery import state_of_checkpoint
from message_queue.staleness import StalenessConfig, StalenessError
from message_queue.tokens import StopReason
from tests.helpers.groups import group_for, head_for, segment, trajectory
from tests.helpers.queue_runs import place


def make_queue(*, s=1, b=2, policy="recycle", p=1, restored=None, max_recycles=3):
    return TrajectoryQueue(
        build_policy(
            StalenessConfig(max_staleness=s, policy=policy, max_recycles=max_recycles),
            batch_groups=b,
            updates_per_batch=p,
        ),
        state=restored and state_of_checkpoint(place(Path(), checkpoint=restored)),
    )


def skip_batch(queue):
    """The next batch is taken, without any group."""
    queue._state.apply(
        Taken(groups=(), update=queue._state.next_update, masked=(), updates=queue._policy.updates_per_batch)
    )


async def next_update(queue, *, step):
    """Train what `take` gives and have every replica load the weights."""
    batch = await queue.take()
    await queue.trained([g.group for g in batch.groups], train_step=step)
    await queue.publish(step, update=step)
    await queue.loaded(step)
    return batch


async def reasons(queue):
    return (await queue.snapshot()).ledger.reasons


def closes(snapshot):
    return (snapshot.ledger.error, snapshot.ledger.token_error) == (0, 0)


# ---- recycle


async def test_an_expired_prompt_is_admitted_again_ahead_of_new_ones_whether_open_or_ready():
    queue = make_queue(s=1, b=1)
    slow, quick = await queue.admit(0), await queue.admit(1)
    await queue.put(head_for(quick))
    await next_update(queue, step=1)
    young = await queue.admit(2)
    await queue.put(head_for(young))
    await queue.take()  # group 0 is of update 0, the next batch is trained at 2
    assert await queue.wait_expired() == [slow.group]
    assert await queue.drop(slow.group, reason="expired: no batch is left", tokens=7, expired=True)
    again = await queue.admit(3)
    assert (again.prompt, again.group) == (0, 3), "its own admission, under an id of its own"
    assert (await queue.admit(3)).prompt == 3, "what was asked for is asked for again"
    snapshot = await queue.snapshot()
    assert (snapshot.ledger.admitted, snapshot.ledger.dropped, snapshot.ledger.dropped_tokens) == (5, 1, 7)
    assert await reasons(queue) == {"recycled": 1} and closes(snapshot)


async def test_ready_groups_that_expire_are_recycled_in_their_order():
    queue = make_queue(s=1, b=1)
    for prompt in (0, 1):
        await queue.put(head_for(await queue.admit(prompt)))
    await next_update(queue, step=1)  # group 0; group 1 may still be trained at update 1
    newer = await queue.admit(2)
    await queue.put(head_for(newer))
    queue._policy.by_turn = lambda ready: sorted(ready, key=lambda g: -g.group)  # the newer one is taken
    await next_update(queue, step=2)
    assert (await queue.snapshot()).waiting == (1,)
    assert (await queue.admit(7)).prompt == 1
    assert (await queue.snapshot()).waiting == () and (await queue.snapshot()).recycles == {1: 1}


async def test_a_group_that_is_put_too_late_is_recycled_at_the_door():
    queue = make_queue(s=0, b=1)
    late = await queue.admit(0)
    skip_batch(queue)
    result = await queue.put(head_for(late))
    assert result is not None and (await queue.snapshot()).waiting == (0,) and closes(await queue.snapshot())


async def test_a_prompt_that_is_always_too_slow_is_dropped_after_max_recycles():
    queue = make_queue(s=0, b=1, max_recycles=2)
    for step in (1, 2, 3):
        admission = await queue.admit(5)
        assert admission.prompt == 5
        skip_batch(queue)
        await queue.publish(step, update=step)
        await queue.loaded(step)
        await queue.drop(admission.group, reason="expired: too slow", expired=True)
    assert await reasons(queue) == {"recycled": 2, "expired": 1}
    assert (await queue.records_after(0))[-1]["reason"] == (
        "expired: too slow, after its prompt was admitted 3 times (staleness.max_recycles)"
    )
    assert ((await queue.snapshot()).waiting, (await queue.snapshot()).recycles) == ((), {})


async def test_a_failed_rollout_is_dropped_and_not_recycled():
    queue = make_queue()
    admission = await queue.admit(0)
    await queue.drop(admission.group, reason="rollout failed: no judge")
    assert (await queue.snapshot()).waiting == ()


async def test_a_snapshot_names_prompts_that_wait_and_counts_go_on_after_it():
    queue = make_queue(s=0, b=1, max_recycles=1)
    await queue.drop((await queue.admit(4)).group, reason="expired: x", expired=True)
    saved = msgspec.json.decode(msgspec.json.encode(await queue.snapshot()), type=QueueSnapshot)
    assert saved == (await queue.snapshot()) and saved.prompts == (4,)
    restored = make_queue(s=0, b=1, max_recycles=1, restored=saved)
    assert (await restored.snapshot()).waiting == (), "whoever restores asks for all of its prompts"
    await restored.drop((await restored.admit(4)).group, reason="expired: x", expired=True)
    assert await reasons(restored) == {"recycled": 1, "expired": 1}


# ---- mask


async def test_old_tokens_are_masked_and_counted_and_young_ones_are_trained():
    queue = make_queue(s=1, b=1, policy="mask")
    long = await queue.admit(0)
    for step in (1, 2):
        await queue.put(head_for(await queue.admit(step)))
        await next_update(queue, step=step)
    assert queue._expired_open() == [], "an open group samples young tokens still"
    await queue.put(head_for(long, versions=(0, 1, 2), tokens=3))
    batch = await queue.take()
    assert (batch.update, batch.min_update) == (2, 1)
    await queue.trained([long.group], train_step=3)
    assert (await queue.records_after(0))[-1]["masked_tokens"] == 3
    counts = (await queue.snapshot()).ledger
    assert (counts.tokens, counts.trained_tokens, counts.masked_tokens) == (15, 12, 3) and closes(
        await queue.snapshot()
    )


async def test_a_group_of_which_nothing_is_left_is_dropped_wherever_it_is():
    queue = make_queue(s=0, b=1, policy="mask")
    ready, late = await queue.admit(0), None
    await queue.put(head_for(ready))
    await next_update(queue, step=1)
    first = await queue.admit(1)
    skip_batch(queue)
    assert "expired: staleness 1 exceeds 0 for its newest token" in await queue.put(head_for(first))

    queue = make_queue(s=1, b=1, policy="mask")
    ready, late = await queue.admit(0), await queue.admit(1)
    for group in (ready, late):
        await queue.put(head_for(group))
    queue._policy.by_turn = lambda of: sorted(of, key=lambda g: -g.group)
    await next_update(queue, step=1)
    await queue.put(head_for(await queue.admit(2)))
    await next_update(queue, step=2)
    snapshot = await queue.snapshot()
    assert (snapshot.ready, await reasons(queue)) == (0, {"expired": 1}) and closes(snapshot)


async def test_masked_tokens_are_those_by_the_last_update_of_a_batch():
    queue = make_queue(s=2, b=1, p=2, policy="mask")
    group = await queue.admit(0)
    skip_batch(queue)
    await queue.publish(1, update=2)
    await queue.put(head_for(group, versions=(0, 1)))
    batch = await queue.take()
    assert (batch.update, batch.min_update) == (2, 1), "the second of its updates is 3, and 3 - 0 exceeds 2"


async def test_mask_bounds_the_number_outstanding():
    queue = make_queue(s=1, b=2, policy="mask")
    for prompt in range(4):
        await queue.admit(prompt)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await queue.admit(4)


async def test_a_policy_that_masks_nothing_refuses_what_is_too_old():
    queue = make_queue(s=0, b=1, policy="mask")
    await queue.put(head_for(await queue.admit(0)))
    queue._state.next_update = 1  # the group was not dropped
    with pytest.raises(StalenessError):
        queue._policy.min_update = lambda *, next_update: 0
        await queue.take()


# ---- tokens


async def test_tokens_that_the_trainer_did_not_count_show_as_an_error():
    queue = make_queue(s=1, b=1, policy="wait")
    await queue.put(head_for(await queue.admit(0)))
    assert (await queue.snapshot()).ledger.open_tokens == 3
    batch = await queue.take()
    await queue.trained([g.group for g in batch.groups], train_step=1, tokens=[2])
    assert (await queue.snapshot()).ledger.token_error == 1


async def test_tokens_of_a_rollout_that_failed_are_masked():
    queue = make_queue(s=1, b=1, policy="wait")
    group = group_for(await queue.admit(0))
    failed = trajectory(segment(4))
    failed.stop_reason = StopReason.ERROR
    group.trajectories.append(failed)
    await queue.put(head_of(group))
    await queue.take()
    await queue.trained([0], train_step=1, tokens=[3])
    counts = (await queue.snapshot()).ledger
    assert (counts.tokens, counts.trained_tokens, counts.masked_tokens, counts.token_error) == (7, 3, 4, 0)


# ---- all of them


class Life:
    """Rollouts of random length under a policy: weights are published every so many batches."""

    def __init__(self, seed, *, policy, s, b, p, every, max_recycles):
        self.rng = random.Random(seed)
        self.s, self.b, self.p, self.every, self.max_recycles = s, b, p, every, max_recycles
        self.queue = make_queue(s=s, b=b, p=p, policy=policy, max_recycles=max_recycles)
        self.policy, self.served, self.next_prompt, self.steps = policy, 0, 0, 0
        self.rolling, self.prompts, self.starts = {}, {}, Counter()
        self.masked = self.trained = 0

    async def admit(self):
        before = await self.queue.snapshot()
        try:
            async with asyncio.timeout(0):
                admission = await self.queue.admit(self.next_prompt)
        except TimeoutError:
            return
        assert admission.group == before.next_group
        assert admission.prompt == (before.waiting[0] if before.waiting else self.next_prompt)
        self.next_prompt += admission.prompt == self.next_prompt
        self.prompts[admission.group] = admission.prompt
        self.starts[admission.prompt] += 1
        self.rolling[admission.group] = (admission, [admission.admitted_version])

    async def roll(self):
        if self.rolling:
            admission, versions = self.rng.choice(list(self.rolling.values()))
            versions.append(self.served)
            if self.rng.random() < 0.5:
                del self.rolling[admission.group]
                await self.queue.put(head_for(admission, versions=versions, tokens=1 + self.rng.randrange(2)))

    async def cancel(self):
        for group in self.queue._expired_open():
            _, versions = self.rolling.pop(group)
            await self.queue.drop(group, reason="expired: expired", tokens=len(versions), expired=True)

    async def train(self):
        if not self.queue._batch_ready():
            return
        batch = await self.queue.take()
        last, counted = batch.update + self.p - 1, []
        for group in batch.groups:
            tokens = [batch.version_updates[v] for v, n in group.tokens_per_version().items() for _ in range(n)]
            young = [update for update in tokens if update >= batch.min_update]
            assert young and all(last - update <= self.s for update in young)
            assert all(last - update > self.s for update in tokens if update < batch.min_update)
            counted.append(len(young))
            self.masked += len(tokens) - len(young)
        self.trained += sum(counted)
        self.steps += 1
        await self.queue.trained([g.group for g in batch.groups], train_step=self.steps, tokens=counted)
        if self.steps % self.every == 0:
            version = self.steps // self.every
            await self.queue.publish(version, update=self.steps * self.p)
            if self.rng.random() < 0.7:
                await self.load()

    async def load(self):
        version = self.steps // self.every
        if version > self.served:
            await self.queue.loaded(version)
            self.served = version

    async def check(self):
        snapshot = await self.queue.snapshot()
        assert closes(snapshot)
        counts = snapshot.ledger
        assert (counts.trained_tokens, counts.masked_tokens) == (self.trained, self.masked)
        assert snapshot.ready + snapshot.open <= self.queue._policy.max_outstanding
        assert counts.reasons.get("recycled", 0) == sum(self.starts.values()) - len(self.starts) + len(snapshot.waiting)
        assert max(self.starts.values(), default=0) <= 1 + (self.max_recycles if self.policy == "recycle" else 0)
        live = {admission.prompt for admission in snapshot.unfinished}
        assert live.isdisjoint(snapshot.waiting) and len(live) == len(snapshot.unfinished)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["wait", "drop", "recycle", "mask"]),
    s=st.integers(0, 3),
    b=st.integers(1, 3),
    p=st.integers(1, 2),
    every=st.integers(1, 3),
    max_recycles=st.integers(1, 3),
)
def test_every_policy_keeps_the_bound_counts_everything_and_goes_on(seed, policy, s, b, p, every, max_recycles):
    life = Life(seed, policy=policy, s=max(s, p * every - 1), b=b, p=p, every=every, max_recycles=max_recycles)

    async def run():
        for _ in range(60):
            move = life.rng.choice([life.admit, life.admit, life.roll, life.roll, life.cancel, life.train, life.load])
            await move()
            await life.check()
        for _ in range(3):  # whatever happened, training goes on once rollouts finish and weights arrive
            done = life.steps
            await life.load()
            await life.cancel()
            for _ in range(200):
                await life.admit()
                await life.roll()
                await life.cancel()
                await life.train()
                if life.steps > done:
                    break
            assert life.steps > done
            await life.check()

    asyncio.run(run())


def test_counts_of_an_older_checkpoint_close():
    assert LedgerCounts(admitted=1, trained=1, tokens=5, trained_tokens=5).token_error == 0
