"""TrajectoryQueue: waits, refusals and results of each call."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from message_queue.errors import ContractError, QueueClosed, QueueError, StalenessError
from message_queue.heads import head_of
from message_queue.ledger import Drop, DropKind
from message_queue.policies import WaitPolicy
from message_queue.state import QueueSnapshot
from message_queue.tokens import StopReason
from message_queue.trajectory import Admission
from tests.helpers.groups import group_for, head_for, segment, trajectory
from tests.helpers.queue_runs import make_queue

WHY = Drop(DropKind.ROLLOUT_FAILED, "boom")


async def waits(awaitable) -> asyncio.Task:
    """A task that is seen to wait."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def admit_many(queue, count):
    return [await queue.admit(prompt) for prompt in range(count)]


async def put_all(queue, admissions):
    for admission in admissions:
        await queue.put(head_for(admission))


async def fill(queue, count):
    await put_all(queue, await admit_many(queue, count))


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


async def test_a_full_queue_waits_and_never_evicts():
    queue = make_queue(s=2, b=2, max_ready=2)
    admissions = await admit_many(queue, 4)
    await put_all(queue, admissions[:2])
    third = await waits(queue.put(head_for(admissions[2])))
    assert (await queue.snapshot()).ready == 2
    await queue.take()
    assert (await third) is None
    assert (await queue.snapshot()).ready == 1


async def test_a_full_queue_lets_in_the_group_that_the_trainer_waits_for():
    queue = make_queue(s=1, b=2, max_ready=2)
    old = await admit_many(queue, 4)
    await put_all(queue, old[:2])
    await queue.take()
    await publish_next(queue, 1)
    await put_all(queue, await admit_many(queue, 2))
    for admission in old[2:]:  # ready is full of young groups, but no batch can be taken without the old ones
        await asyncio.wait_for(queue.put(head_for(admission)), 1)
    assert [g.group for g in (await queue.take()).groups] == [2, 3]


async def test_put_of_a_group_dropped_meanwhile_is_refused():
    queue = make_queue(s=1, b=2, max_ready=2)
    admissions = await admit_many(queue, 3)
    await put_all(queue, admissions[:2])
    twice = [await waits(queue.put(head_for(admissions[2]))) for _ in range(2)]
    await queue.drop(admissions[2].group, reason=WHY)
    await queue.take()
    for waiting in twice:
        with pytest.raises(QueueError, match="group 2"):
            await waiting
    assert (await queue.snapshot()).ledger.error == 0


async def test_queue_refuses_unknown_groups_and_heads_that_do_not_match():
    queue = make_queue(s=4)
    await fill(queue, 2)
    await queue.take()
    await publish_next(queue, 1)
    admission = await queue.admit(0)
    for error, wrong in (
        (QueueError, queue.put(head_for(replace(admission, group=5)))),
        (QueueError, queue.drop(5, reason=WHY)),
        (ContractError, queue.put(head_for(replace(admission, admitted_update=3)))),
        (ContractError, queue.put(head_for(admission, versions=(4,)))),
        (ContractError, queue.put(head_for(admission, versions=(1, 0)))),  # older than its admission
    ):
        with pytest.raises(error):
            await wrong
    assert await queue.put(head_for(admission)) is None
    with pytest.raises(QueueError, match="group 2"):
        await queue.put(head_for(admission))
    assert (await queue.snapshot()).ledger.error == 0


async def test_take_checks_the_staleness_of_each_token(monkeypatch):
    monkeypatch.setattr(WaitPolicy, "is_feasible", lambda self, outstanding, *, next_update: True)
    queue = make_queue(s=0, b=1)
    await fill(queue, 2)
    await queue.take()
    with pytest.raises(StalenessError, match="group 1"):
        await queue.take()
    assert (await queue.snapshot()).ready == 1


async def test_drop_ends_an_open_group_and_makes_room():
    queue = make_queue(s=0, b=1)
    admission = await queue.admit(0)
    waiting = await waits(queue.admit(1))
    assert await queue.drop(admission.group, reason=WHY, segments=1, tokens=4)
    assert (await waiting).group == 1
    assert not await queue.drop(admission.group, reason=WHY)
    snapshot = await queue.snapshot()
    assert (snapshot.open, snapshot.ledger.dropped_tokens, snapshot.ledger.error) == (1, 4, 0)
    assert snapshot.ledger.reasons == {DropKind.ROLLOUT_FAILED: 1}


async def test_policy_drop_gives_up_groups_that_expired_while_open_or_put():
    queue = make_queue(s=1, b=2, policy="drop", max_ready=2)
    admissions = await admit_many(queue, 4)
    await put_all(queue, admissions[:2])
    await queue.take()
    await publish_next(queue, 1)
    expired = await waits(queue.wait_expired())
    await put_all(queue, await admit_many(queue, 2))
    held_up = await waits(queue.put(head_for(admissions[2])))  # full, and a batch can be taken
    await queue.take()
    assert await expired == [2, 3]
    assert "expired" in str(await held_up)
    assert await queue.wait_expired() == [3]
    await waits(queue.wait_expired(known={3}))
    assert (await queue.put(head_for(admissions[3]))) is not None
    snapshot = await queue.snapshot()
    assert (snapshot.ledger.dropped, snapshot.ledger.reasons, snapshot.ledger.error) == (2, {DropKind.EXPIRED: 2}, 0)


async def test_close_wakes_every_waiter_and_counts_the_groups_left():
    queue = make_queue(s=1, b=2, max_ready=2)
    await fill(queue, 2)
    third, fourth = await queue.admit(2), await queue.admit(3)
    admitting = await waits(queue.admit(4))
    putting = await waits(queue.put(head_for(third)))
    expiring = await waits(queue.wait_expired())
    empty = make_queue()
    taking = await waits(empty.take())
    for closed in (queue, queue, empty):
        await closed.close()
    for waiting in (admitting, putting, expiring, taking):
        with pytest.raises(QueueClosed):
            await waiting
    assert len((await queue.take()).groups) == 2  # a complete batch is still handed out
    with pytest.raises(QueueClosed, match="2 groups stay open"):
        await queue.take()
    await queue.trained([0, 1], train_step=1)
    assert await queue.drop(fourth.group, reason=WHY)
    total = (await queue.closing_records(0))[-1]
    assert (total["open"], total["error"]) == (1, 0)


async def test_queue_continues_from_a_snapshot():
    queue = make_queue(s=1, b=2)
    await fill(queue, 4)
    await queue.take()
    await queue.trained([0, 1], train_step=1)
    await publish_next(queue, 1)
    await admit_many(queue, 2)
    await queue.take()  # groups 2 and 3 are taken, but their step is not done
    saved = msgspec.json.decode(msgspec.json.encode(await queue.snapshot()), type=QueueSnapshot)
    assert saved == await queue.snapshot()
    assert saved.prompts == (2, 3, 0, 1)
    assert (saved.next_group, saved.next_update, saved.version, saved.update) == (6, 1, 1, 1)
    restored = make_queue(s=1, b=2, restored=saved)
    ledger = (await restored.snapshot()).ledger
    assert (ledger.admitted, ledger.trained, ledger.dropped, ledger.error) == (6, 2, 4, 0)
    assert await restored.admit(2) == Admission(group=6, prompt=2, admitted_version=1, admitted_update=1)


async def test_a_segment_without_tokens_does_not_age_a_group():
    queue = make_queue(s=0, b=1)
    group = group_for(await queue.admit(0), versions=(0,))
    aborted = segment(0, version=9, stop_reason=StopReason.ABORT)
    group.trajectories.append(trajectory(aborted, segment(2)))
    assert (await queue.put(head_of(group))) is None
    assert (await queue.take()).update == 0


async def test_records_are_repeated_until_the_caller_confirms_them():
    queue = make_queue(s=3, b=1)
    for prompt in range(3):
        admission = await queue.admit(prompt)
        await queue.drop(admission.group, reason=WHY)
    assert [record["group"] for record in await queue.records_after(0)] == [0, 1, 2]
    assert [record["group"] for record in await queue.records_after(0)] == [0, 1, 2]
    assert [record["group"] for record in await queue.records_after(2)] == [2]
    *closing, total = await queue.closing_records(2)
    assert ([record["group"] for record in closing], total["dropped"]) == ([2], 3)


@pytest.mark.parametrize("yields", range(6))
@pytest.mark.parametrize("call", ["admit", "put", "take", "wait_expired"])
@pytest.mark.parametrize("contended", [False, True])
async def test_a_call_cancelled_at_any_await_changes_nothing(call, yields, contended):
    queue = make_queue(s=1, b=2, max_ready=2, policy="drop" if call == "wait_expired" else "wait")
    admissions = await admit_many(queue, 4)
    await put_all(queue, admissions[:2])
    calls = {
        "admit": (queue.admit, 9),
        "put": (queue.put, head_for(admissions[2])),
        "take": (queue.take,),
        "wait_expired": (queue.wait_expired,),
    }
    unblocked_by = {
        "admit": lambda: queue.drop(admissions[3].group, reason=WHY),
        "put": queue.take,
        "take": lambda: queue.put(head_for(admissions[2])),
    }
    if call == "take":
        await queue.take()  # nothing is ready: take waits
    if contended:
        await queue._changed.acquire()
    function, *args = calls[call]
    task = asyncio.ensure_future(function(*args))
    for _ in range(yields):
        await asyncio.sleep(0)
    assert not task.done()
    if contended:
        queue._changed.release()
    elif call in unblocked_by:  # the change that the call waits for and the cancellation come together
        await unblocked_by[call]()
    before = await queue.snapshot()
    task.cancel()
    results = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert await queue.snapshot() == before
    assert before.ledger.error == 0
    assert not queue._changed.locked()
