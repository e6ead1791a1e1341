"""Effects of each staleness policy on groups and tokens that become too old, in a queue without a journal."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.heads import GroupHead, head_of
from message_queue.ledger import Drop, DropKind
from message_queue.state import GroupState, QueueSnapshot
from message_queue.tokens import StopReason
from tests.helpers.groups import group_for, head_for, segment, trajectory
from tests.helpers.queue_runs import CALLS, Drive, make_queue


def closes(snapshot):
    return (snapshot.ledger.error, snapshot.ledger.token_error) == (0, 0)


async def test_recycle_drops_a_prompt_after_max_requeues_or_a_failed_rollout():
    queue = make_queue(s=0, b=1, policy="recycle", max_requeues=2)
    for _ in range(3):
        admission = await queue.admit(5)
        assert admission.prompt == 5
        await queue.drop(admission.group, reason=Drop(DropKind.EXPIRED, "too slow"))
    snapshot = await queue.snapshot()
    assert snapshot.ledger.reasons == {DropKind.REQUEUED: 2, DropKind.EXPIRED: 1}
    assert (snapshot.waiting, snapshot.requeues) == ((), {})
    assert "staleness.max_requeues" in (await queue.records_after(0))[-1]["reason"]
    await queue.drop((await queue.admit(6)).group, reason=Drop(DropKind.ROLLOUT_FAILED, "no judge"))
    assert (await queue.snapshot()).waiting == ()


@pytest.mark.parametrize(
    ("policy", "taken"), [("drop", [2, 0]), ("wait", [0, 1]), ("recycle", [0, 1]), ("mask", [0, 1])]
)
async def test_drop_takes_groups_in_the_order_of_put_and_the_others_the_oldest(policy, taken):
    queue = make_queue(s=1, b=2, policy=policy)
    admissions = [await queue.admit(prompt) for prompt in range(3)]
    for group in (2, 0, 1):
        await queue.put(head_for(admissions[group]))
    assert [head.group for head in (await queue.take()).groups] == taken


@pytest.mark.parametrize(
    ("policy", "expired"),
    [("wait", 0), ("drop", 0), ("drop", 2), ("recycle", 0), ("recycle", 2), ("mask", 0), ("mask", 2)],
)
async def test_take_looks_at_the_groups_of_its_batch_and_at_those_that_expire(policy, expired, monkeypatch):
    looked_at = set()

    def watch(kind, name, group_of):
        read = getattr(kind, name)
        read = read.fget if isinstance(read, property) else read
        watched = lambda self: looked_at.add(group_of(self)) or read(self)  # noqa: E731
        monkeypatch.setattr(kind, name, property(watched) if read.__name__ == "admitted_update" else watched)

    watch(GroupState, "admitted_update", lambda state: state.group)
    watch(GroupHead, "tokens_per_version", lambda head: head.group)
    counts = []
    for ready in (20, 400):
        queue = make_queue(s=ready, b=2, policy=policy)
        queue._state.next_update = queue._state.versions[1] = ready if expired else 0
        for prompt in range(ready):
            if prompt == 2 + expired:
                await queue.loaded(1)
            await queue.put(head_for(await queue.admit(prompt)))
        looked_at.clear()
        await queue.take()
        counts.append(len(looked_at))
        assert len(queue._state.ready) == ready - 2 - expired
    assert counts[0] == counts[1] <= 2 + expired + 1


async def test_snapshot_has_requeued_prompts_and_their_counts():
    queue = make_queue(s=0, b=1, policy="recycle", max_requeues=1)
    await queue.drop((await queue.admit(4)).group, reason=Drop(DropKind.EXPIRED, "x"))
    saved = msgspec.json.decode(msgspec.json.encode(await queue.snapshot()), type=QueueSnapshot)
    assert saved == (await queue.snapshot()) and saved.prompts == (4,)
    restored = make_queue(s=0, b=1, policy="recycle", max_requeues=1, restored=saved)
    assert (await restored.snapshot()).waiting == (), "the driver asks for all of its prompts"
    await restored.drop((await restored.admit(4)).group, reason=Drop(DropKind.EXPIRED, "x"))
    assert (await restored.snapshot()).ledger.reasons == {DropKind.REQUEUED: 1, DropKind.EXPIRED: 1}


async def test_tokens_of_a_failed_rollout_are_masked():
    queue = make_queue(s=1, b=1)
    group = group_for(await queue.admit(0))
    failed = trajectory(segment(4))
    failed.stop_reason = StopReason.ERROR
    group.trajectories.append(failed)
    await queue.put(head_of(group))
    await queue.take()
    await queue.trained([0], train_step=1, tokens=[3])
    counts = (await queue.snapshot()).ledger
    assert (counts.tokens, counts.trained_tokens, counts.masked_tokens, counts.token_error) == (7, 3, 4, 0)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["wait", "drop", "recycle", "mask"]),
    s=st.integers(0, 3),
    b=st.integers(1, 3),
    p=st.integers(1, 2),
    max_requeues=st.integers(1, 3),
)
async def test_every_policy_keeps_the_bound_closes_the_ledger_and_trains(seed, policy, s, b, p, max_requeues):
    s = max(s, p - 1)
    queue = make_queue(s=s, b=b, p=p, policy=policy, max_requeues=max_requeues)
    drive = Drive(queue, rng=random.Random(seed), s=s, p=p)
    for _ in range(80):
        await drive.call(*CALLS)
        await check(drive, max_requeues=max_requeues if policy == "recycle" else 0)
    await drive.train()
    await drive.publish()
    trained = drive.step
    for _ in range(200):  # training continues once rollouts finish and weights arrive
        await drive.call("admit", "put", "expire", "take", "train")
        if drive.step > trained:
            return
    raise AssertionError("no batch is trained any more")


async def check(drive, *, max_requeues):
    snapshot = await drive.queue.snapshot()
    assert closes(snapshot)
    assert snapshot.ready + snapshot.open <= drive.queue._policy.max_outstanding
    starts = Counter(admission.prompt for admission in drive.admissions.values())
    requeued = snapshot.ledger.reasons.get(DropKind.REQUEUED, 0)
    assert requeued == starts.total() - len(starts) + len(snapshot.waiting)
    assert max(starts.values(), default=0) <= 1 + max_requeues
    live = [admission.prompt for admission in snapshot.unfinished]
    assert len(live) == len(set(live)) and set(live).isdisjoint(snapshot.waiting)
