"""TrajectoryQueue under many at once: calls that are cancelled anywhere, rollouts and training side by side."""

import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.contract import Admission, QueueClosed
from tests.helpers.groups import head_for
from tests.message_queue.test_queue import admit_many, make_queue


@pytest.mark.parametrize("yields", range(6))
@pytest.mark.parametrize("call", ["admit", "put", "take", "wait_expired"])
@pytest.mark.parametrize("contended", [False, True])
async def test_a_call_cancelled_at_any_await_changes_nothing_or_is_whole(call, yields, contended):
    queue = make_queue(s=1, b=2, max_ready=2, policy="drop" if call == "wait_expired" else "wait")
    admissions = await admit_many(queue, 4)
    for admission in admissions[:2]:
        await queue.put(head_for(admission))
    calls = {
        "admit": lambda: queue.admit(9),
        "put": lambda: queue.put(head_for(admissions[2])),
        "take": queue.take,
        "wait_expired": queue.wait_expired,
    }
    if call == "take":
        await queue.take()  # nothing is ready: take waits
    if contended:
        await queue._changed.acquire()
    task = asyncio.ensure_future(calls[call]())
    for _ in range(yields):
        await asyncio.sleep(0)
    before = await queue.snapshot()
    assert not task.done()
    if contended:
        queue._changed.release()
    elif call != "wait_expired":
        # the change that the call waits for and the cancellation come together
        await unblock(queue, call, admissions)
        before = await queue.snapshot()
    task.cancel()
    results = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert await queue.snapshot() == before
    assert before.ledger.error == 0
    assert not queue._changed.locked()


async def unblock(queue, call, admissions):
    if call == "admit":
        await queue.drop(admissions[3].group, reason="room")
    elif call == "put":
        await queue.take()
    elif call == "take":
        await queue.put(head_for(admissions[2]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    s=st.integers(0, 3),
    b=st.integers(1, 3),
    policy=st.sampled_from(["wait", "drop"]),
    max_ready=st.sampled_from([None, 3, 4]),
)
def test_concurrent_rollouts_and_training_close_the_ledger(seed, s, b, policy, max_ready):
    """Rollouts of random length that fail or are cancelled, a feeder whose admissions are cancelled, a trainer."""
    rng, steps, ids = random.Random(seed), 6, set()
    queue = make_queue(s=s, b=b, policy=policy, max_ready=max_ready)
    served = [0]

    async def pause(most):
        for _ in range(rng.randrange(most)):
            await asyncio.sleep(0)

    async def roll(admission):
        versions = [admission.admitted_version]
        for _ in range(rng.randrange(3)):
            await pause(8)
            versions.append(served[0])
        if rng.random() < 0.2:
            await queue.drop(admission.group, reason="rollout failed", segments=1, tokens=1)
        elif rng.random() < 0.2:
            task = asyncio.ensure_future(queue.put(head_for(admission, versions=versions)))
            await pause(4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await queue.drop(admission.group, reason="cancelled")
        else:
            with contextlib.suppress(QueueClosed):
                await queue.put(head_for(admission, versions=versions))

    async def feed(rollouts):
        prompt = 0
        while True:
            task = asyncio.ensure_future(queue.admit(prompt))
            if rng.random() < 0.3:
                await pause(4)
                task.cancel()
            admission = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(admission, QueueClosed):
                return
            if isinstance(admission, Admission):
                assert admission.group not in ids
                ids.add(admission.group)
                prompt += 1
                rollouts.create_task(roll(admission))

    async def train():
        for step in range(1, steps + 1):
            batch = await queue.take()
            assert (len(batch.groups), batch.update) == (b, step - 1)
            for group in batch.groups:
                for version in group.tokens_per_version():
                    assert batch.update - batch.version_updates[version] <= s
            await pause(10)
            await queue.trained([g.group for g in batch.groups], train_step=step)
            await queue.publish(step, update=step)
            await pause(5)
            await queue.loaded(step)
            served[0] = step
            assert (await queue.snapshot()).ledger.error == 0
        await queue.close()

    async def run():
        async with asyncio.timeout(20):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(feed(tasks))
                tasks.create_task(train())
        snapshot = await queue.snapshot()
        assert snapshot.ledger.error == 0
        assert (snapshot.ledger.trained, snapshot.taken) == (steps * b, 0)
        assert snapshot.ledger.admitted == len(ids)

    asyncio.run(run())
