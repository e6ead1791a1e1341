"""TrajectoryQueue: what each call waits for, refuses and leaves behind."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from message_queue.contract import (
    Admission,
    QueueClosed,
    QueueError,
    QueueSnapshot,
)
from message_queue.heads import head_of
from message_queue.policies import WaitPolicy, build_policy
from message_queue.queue import TrajectoryQueue
from message_queue.recovery import state_of_checkpoint
from message_queue.staleness import StalenessConfig, StalenessError
from message_queue.tokens import ContractError, StopReason
from message_queue.trajectory import Trajectory
from tests.helpers.groups import group_for, head_for, segment
from tests.helpers.queue_runs import place


def make_queue(*, s=1, b=2, policy="wait", max_ready=None, p=1, restored=None) -> TrajectoryQueue:
    return TrajectoryQueue(
        build_policy(StalenessConfig(max_staleness=s, policy=policy), batch_groups=b, updates_per_batch=p),
        max_ready=max_ready,
        state=restored and state_of_checkpoint(place(Path(), checkpoint=restored)),
    )


async def waits(awaitable) -> asyncio.Task:
    """A task that is seen to wait."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def admit_many(queue, count):
    return [await queue.admit(prompt) for prompt in range(count)]


async def fill(queue, count):
    for admission in await admit_many(queue, count):
        await queue.put(head_for(admission))


async def publish_next(queue, update):
    version = (await queue.snapshot()).version + 1
    await queue.publish(version, update=update)
    await queue.loaded(version)


async def test_groups_go_from_admission_to_the_ledger():
    queue = make_queue()
    first, second = await admit_many(queue, 2)
    assert first == Admission(group=0, prompt=0, admitted_version=0, admitted_update=0)
    assert (await queue.put(head_for(second))) is None
    assert (await queue.put(head_for(first))) is None
    batch = await queue.take()
    assert ([g.group for g in batch.groups], batch.update, batch.version_updates) == ([0, 1], 0, {0: 0})
    await queue.trained([0, 1], train_step=1)
    assert [(r["group"], r["outcome"], r["tokens"]) for r in await queue.records_after(0)] == [
        (0, "trained", 3),
        (1, "trained", 3),
    ]
    snapshot = await queue.snapshot()
    assert (snapshot.ledger.trained, snapshot.ledger.error) == (2, 0)
    assert (snapshot.ready, snapshot.open, snapshot.taken) == (0, 0, 0)


async def test_admission_waits_for_the_budget_and_starts_on_the_loaded_version():
    queue = make_queue(s=0, b=2)
    await fill(queue, 2)
    waiting = await waits(queue.admit(7))
    await queue.take()
    await queue.publish(1, update=1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()  # published is not loaded
    await queue.loaded(1)
    assert await waiting == Admission(group=2, prompt=7, admitted_version=1, admitted_update=1)


async def test_the_trainer_waits_for_the_old_group_and_takes_the_oldest_first():
    queue = make_queue(s=1, b=2)
    old = await admit_many(queue, 4)
    for admission in old[1:3]:
        await queue.put(head_for(admission))
    await queue.take()
    await publish_next(queue, 1)
    young = await admit_many(queue, 2)
    for admission in young:
        await queue.put(head_for(admission))
    waiting = await waits(queue.take())  # two are ready, but groups 0 and 3 must be in this batch
    await queue.put(head_for(old[3]))
    assert not waiting.done()
    await queue.put(head_for(old[0]))
    assert [g.group for g in (await waiting).groups] == [0, 3]


async def test_a_full_queue_waits_and_never_evicts():
    queue = make_queue(s=2, b=2, max_ready=2)
    admissions = await admit_many(queue, 4)
    for admission in admissions[:2]:
        await queue.put(head_for(admission))
    third = await waits(queue.put(head_for(admissions[2])))
    assert (await queue.snapshot()).ready == 2
    await queue.take()
    assert (await third) is None
    assert (await queue.snapshot()).ready == 1


async def test_a_full_queue_lets_in_the_group_that_the_trainer_waits_for():
    queue = make_queue(s=1, b=2, max_ready=2)
    old = await admit_many(queue, 4)
    for admission in old[:2]:
        await queue.put(head_for(admission))
    await queue.take()
    await publish_next(queue, 1)
    for admission in await admit_many(queue, 2):
        await queue.put(head_for(admission))
    for admission in old[2:]:  # ready is full of young groups, but no batch can be taken without the old ones
        await asyncio.wait_for(queue.put(head_for(admission)), 1)
    assert [g.group for g in (await queue.take()).groups] == [2, 3]


async def test_a_group_given_up_while_its_put_waits_is_refused():
    queue = make_queue(s=1, b=2, max_ready=2)
    admissions = await admit_many(queue, 3)
    for admission in admissions[:2]:
        await queue.put(head_for(admission))
    twice = [await waits(queue.put(head_for(admissions[2]))) for _ in range(2)]
    await queue.drop(admissions[2].group, reason="cancelled")
    await queue.take()
    for waiting in twice:
        with pytest.raises(QueueError, match="group 2 is not open"):
            await waiting
    assert (await queue.snapshot()).ledger.error == 0


async def test_max_ready_holds_at_least_a_batch():
    with pytest.raises(ValueError, match="max_ready is 1; one batch is 2 groups"):
        make_queue(max_ready=1)


async def test_unknown_and_duplicate_groups_are_refused():
    queue = make_queue()
    admission = await queue.admit(0)
    with pytest.raises(QueueError, match="group 5 was never admitted"):
        await queue.put(head_for(replace(admission, group=5)))
    with pytest.raises(QueueError, match="group 5 was never admitted"):
        await queue.drop(5, reason="x")
    await queue.put(head_for(admission))
    with pytest.raises(QueueError, match="group 0 is not open"):
        await queue.put(head_for(admission))
    assert (await queue.snapshot()).ledger.error == 0


async def test_put_refuses_a_group_that_does_not_match_its_admission():
    queue = make_queue()
    admission = await queue.admit(0)
    with pytest.raises(ContractError, match="it was Admission"):
        await queue.put(head_for(replace(admission, admitted_update=1)))
    with pytest.raises(ContractError, match="param_version 4, which was never published"):
        await queue.put(head_for(admission, versions=(4,)))
    assert (await queue.put(head_for(admission))) is None


async def test_tokens_older_than_the_admission_are_refused():
    queue = make_queue(s=4)
    await fill(queue, 2)
    await queue.take()
    await publish_next(queue, 1)
    admission = await queue.admit(0)
    with pytest.raises(ContractError, match="admitted at update 1, but weights of update 0"):
        await queue.put(head_for(admission, versions=(1, 0)))


async def test_the_bound_is_checked_by_fact_when_a_batch_is_taken(monkeypatch):
    monkeypatch.setattr(WaitPolicy, "is_feasible", lambda self, outstanding, *, next_update: True)
    queue = make_queue(s=0, b=1)
    await fill(queue, 2)
    await queue.take()
    with pytest.raises(StalenessError, match="group 1 has tokens of staleness 1 at update 1"):
        await queue.take()
    assert (await queue.snapshot()).ready == 1


async def test_several_updates_per_batch_are_charged_with_the_last():
    queue = make_queue(s=3, b=2, p=2)
    await fill(queue, 4)
    waiting = await waits(queue.admit(0))
    assert [(await queue.take()).update for _ in range(2)] == [0, 2]
    assert not waiting.done()
    await publish_next(queue, 4)
    assert (await waiting).admitted_update == 4


async def test_drop_ends_an_open_group_and_makes_room():
    queue = make_queue(s=0, b=1)
    admission = await queue.admit(0)
    waiting = await waits(queue.admit(1))
    assert await queue.drop(admission.group, reason="rollout failed: boom", segments=1, tokens=4)
    assert (await waiting).group == 1
    assert not await queue.drop(admission.group, reason="again")
    with pytest.raises(QueueError, match="without a reason"):
        await queue.drop(1, reason="")
    snapshot = await queue.snapshot()
    assert (snapshot.open, snapshot.ledger.dropped_tokens, snapshot.ledger.error) == (1, 4, 0)
    assert snapshot.ledger.reasons == {"rollout failed": 1}


async def test_policy_drop_gives_up_what_is_too_old_wherever_it_is():
    queue = make_queue(s=0, b=1, policy="drop")
    ready, late = await queue.admit(0), None
    await queue.put(head_for(ready))
    late = await waits(queue.admit(1))
    await queue.take()
    await publish_next(queue, 1)
    late = await late
    assert late.admitted_update == 1

    queue = make_queue(s=1, b=2, policy="drop", max_ready=2)
    admissions = await admit_many(queue, 4)
    for admission in admissions[:2]:
        await queue.put(head_for(admission))
    await queue.take()
    assert queue._expired_open() == []
    await publish_next(queue, 1)
    expired = await waits(queue.wait_expired())
    for admission in await admit_many(queue, 2):
        await queue.put(head_for(admission))
    held_up = await waits(queue.put(head_for(admissions[2])))  # full, and a batch can be taken
    await queue.take()
    assert await expired == [2, 3]
    assert "expired: staleness 2 exceeds 1" in str(await held_up)
    assert await queue.wait_expired() == [3]
    await waits(queue.wait_expired(known={3}))
    assert (await queue.put(head_for(admissions[3]))) is not None
    snapshot = await queue.snapshot()
    assert (snapshot.ledger.dropped, snapshot.ledger.reasons, snapshot.ledger.error) == (2, {"expired": 2}, 0)


async def test_policy_drop_gives_up_ready_groups_and_keeps_first_come_order():
    queue = make_queue(s=1, b=1, policy="drop")
    first, second = await admit_many(queue, 2)
    await queue.put(head_for(second))
    await queue.put(head_for(first))
    assert [g.group for g in (await queue.take()).groups] == [1]
    await publish_next(queue, 1)
    newer = await queue.admit(2)
    await queue.put(head_for(newer))
    assert [g.group for g in (await queue.take()).groups] == [0]
    queue_state = await queue.snapshot()
    assert (queue_state.ready, queue_state.ledger.dropped) == (1, 0)

    queue = make_queue(s=0, b=1, policy="drop", restored=QueueSnapshot(next_group=10))
    assert (await queue.admit(0)).group == 10


async def test_versions_only_go_up():
    queue = make_queue()
    await fill(queue, 2)
    with pytest.raises(QueueError, match="published version 1 with 1 updates; batches up to update 0 were taken"):
        await queue.publish(1, update=1)
    await queue.take()
    with pytest.raises(QueueError, match="loaded version 1 after version 0"):
        await queue.loaded(1)
    await queue.publish(1, update=1)
    with pytest.raises(QueueError, match="versions go up"):
        await queue.publish(1, update=1)
    with pytest.raises(QueueError, match="updates do not go back"):
        await queue.publish(2, update=0)
    await queue.loaded(1)
    with pytest.raises(QueueError, match="loaded version 0 after version 1"):
        await queue.loaded(0)


async def test_only_taken_groups_are_trained_and_only_once():
    queue = make_queue()
    await fill(queue, 3)
    await queue.take()
    before = await queue.snapshot()
    for wrong in ([0, 2], [0, 0, 1], [9]):
        with pytest.raises(QueueError):
            await queue.trained(wrong, train_step=1)
    assert await queue.snapshot() == before
    await queue.trained([1, 0], train_step=1)
    with pytest.raises(QueueError, match="group 0 is not taken"):
        await queue.trained([0], train_step=2)


async def test_close_wakes_every_waiter_and_says_what_is_left():
    queue = make_queue(s=1, b=2, max_ready=2)
    await fill(queue, 2)
    third, fourth = await queue.admit(2), await queue.admit(3)
    admitting = await waits(queue.admit(4))
    putting = await waits(queue.put(head_for(third)))
    expiring = await waits(queue.wait_expired())
    await queue.close()
    await queue.close()
    for waiting in (admitting, putting, expiring):
        with pytest.raises(QueueClosed):
            await waiting
    assert len((await queue.take()).groups) == 2  # a complete batch is still handed out
    with pytest.raises(QueueClosed, match="0 ready groups make no batch of 2; 2 groups stay open, 2 were taken"):
        await queue.take()
    await queue.trained([0, 1], train_step=1)
    assert await queue.drop(fourth.group, reason="stopped")
    total = (await queue.closing_records(0))[-1]
    assert (total["open"], total["error"]) == (1, 0)


async def test_a_waiting_take_is_woken_by_close():
    queue = make_queue()
    taking = await waits(queue.take())
    await queue.close()
    with pytest.raises(QueueClosed):
        await taking


async def test_a_queue_continues_from_a_snapshot():
    queue = make_queue(s=1, b=2)
    await fill(queue, 4)
    await queue.take()
    await queue.trained([0, 1], train_step=1)
    await publish_next(queue, 1)
    await admit_many(queue, 2)
    await queue.take()  # groups 2 and 3 are taken, but their step is not done
    saved = msgspec.json.encode(await queue.snapshot())

    restored = make_queue(s=1, b=2, restored=msgspec.json.decode(saved, type=QueueSnapshot))
    before = msgspec.json.decode(saved, type=QueueSnapshot)
    assert before == await queue.snapshot()
    assert before.prompts == (2, 3, 0, 1)
    assert (before.next_group, before.next_update, before.version, before.update) == (6, 1, 1, 1)
    snapshot = await restored.snapshot()
    assert (snapshot.ledger.admitted, snapshot.ledger.trained, snapshot.ledger.dropped) == (6, 2, 4)
    assert (snapshot.ledger.error, snapshot.ledger.reasons) == (0, {"stopped before it was trained": 4})
    assert await restored.admit(2) == Admission(group=6, prompt=2, admitted_version=1, admitted_update=1)


async def test_an_aborted_segment_without_tokens_does_not_age_a_group():
    queue = make_queue(s=0, b=1)
    admission = await queue.admit(0)
    group = group_for(admission)
    open_one = Trajectory(routing=None)
    open_one.observe(group.trajectories[0].turns[0].observation)
    open_one.extend(segment(0, version=0, stop_reason=StopReason.ABORT))
    open_one.extend(segment(2, version=0))
    open_one.close(stop_reason=StopReason.STOP, reward=0.0)
    group.trajectories.append(open_one)
    assert (await queue.put(head_of(group))) is None
    assert (await queue.take()).update == 0


async def test_records_come_again_until_the_caller_says_that_it_has_them():
    queue = make_queue(s=3, b=1)
    for prompt in range(3):
        admission = await queue.admit(prompt)
        await queue.drop(admission.group, reason="rollout failed")
    assert [record["group"] for record in await queue.records_after(0)] == [0, 1, 2]
    assert [record["group"] for record in await queue.records_after(0)] == [0, 1, 2], "the first reply was lost"
    assert [record["group"] for record in await queue.records_after(2)] == [2]
    *closing, total = await queue.closing_records(2)
    assert ([record["group"] for record in closing], total["dropped"]) == ([2], 3)
