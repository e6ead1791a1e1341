"""QueueClient over a handle that behaves as an actor's: calls run on whether the caller listens, answers get lost."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.client import QueueClient, QueueClientConfig, QueueUnavailable
from message_queue.queue import Admission, DuplicateGroup, QueueClosed, QueueError, UnknownGroup
from message_queue.service import QueueService
from message_queue.staleness import StalenessConfig
from message_queue.tokens import ContractError, RoutingSpec
from message_queue.wire import EncodedGroup, WireError, encode_group, encoded_size, unpack_group
from tests.unit.groups import SPEC, group_for, routed, segment, trajectory
from tests.unit.test_queue import waits

PATIENT = QueueClientConfig(timeout_s=10, slice_s=0.01)
HASTY = QueueClientConfig(timeout_s=0.3, slice_s=0.01)


class Handle:
    """`handle.method.remote(...)` on a service in the same loop.

    deaf: methods whose answers never arrive. dead: what every call raises. jitter: loop turns before each call starts.
    """

    def __init__(self, service, *, jitter=lambda: 0):
        self.service, self.jitter = service, jitter
        self.deaf, self.dead, self.calls = set(), None, []

    def __getattr__(self, name):
        return Method(self, name)


class Method:
    def __init__(self, handle, name):
        self.handle, self.name = handle, name

    def remote(self, *args, **kwargs):
        self.handle.calls.append(self.name)
        task = asyncio.ensure_future(self.run(args, kwargs))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # an actor logs nothing here either
        return self.answer(task)

    async def run(self, args, kwargs):
        for _ in range(self.handle.jitter()):
            await asyncio.sleep(0)
        if self.handle.dead is not None:
            raise self.handle.dead
        return await getattr(self.handle.service, self.name)(*args, **kwargs)

    def answer(self, task):
        if self.name in self.handle.deaf:
            return asyncio.get_running_loop().create_future()
        return asyncio.shield(task)


def make(*, s=1, b=2, policy="wait", max_ready=None, config=PATIENT, routing=None, jitter=lambda: 0):
    staleness = StalenessConfig(max_staleness=s, policy=policy)
    handle = Handle(QueueService(batch_groups=b, staleness=staleness, max_ready=max_ready), jitter=jitter)
    return QueueClient(handle, name="driver", routing=routing, config=config), handle


async def test_groups_cross_whole_and_the_calls_are_those_of_the_queue():
    client, _ = make(b=1, routing=SPEC)
    admission = await client.admit(7)
    assert admission == Admission(group=0, prompt=7, admitted_version=0, admitted_update=0)
    sent = group_for(admission)
    sent.trajectories[:] = [trajectory(segment(3, rows=(0, 4)), routing=SPEC)]
    assert (await client.put(sent)).accepted
    batch = await client.take()
    (got,) = batch.groups
    assert (got.group, got.prompt, batch.update, batch.version_updates) == (0, 7, 0, {0: 0})
    assert got.trajectories[0].routed_experts().tolist()[:4] == routed(0, 4).experts.tolist()
    await client.trained([0], train_step=1)
    await client.publish(1, update=1)
    await client.loaded(1)
    assert (await client.admit(8)).admitted_version == 1
    assert await client.drop(1, reason="why", segments=1, tokens=2)
    assert await client.expired() == []
    assert (await client.snapshot()).ledger.trained == 1
    assert [r["outcome"] for r in await client.drain_records()] == ["trained", "dropped"]
    await client.close()
    assert (await client.closing_records())[-1]["error"] == 0


async def test_refusals_arrive_as_they_were_raised():
    client, _ = make()
    admission = await client.admit(0)
    group = group_for(admission)
    await client.put(group)
    with pytest.raises(DuplicateGroup, match="group 0 is not open"):
        await client.put(group)
    with pytest.raises(UnknownGroup):
        await client.drop(5, reason="x")
    with pytest.raises(ContractError, match="never published"):
        await client.put(group_for(await client.admit(1), versions=(3,)))
    with pytest.raises(QueueError, match="loaded version 4"):
        await client.loaded(4)
    waiting = await waits(client.take())
    await client.close()
    with pytest.raises(QueueClosed, match="1 ready groups make no batch of 2"):
        await waiting


async def test_a_wrapped_refusal_is_unwrapped():
    class Wrapped(QueueClosed):
        cause = QueueClosed("the queue is closed")

    client, handle = make()
    handle.dead = Wrapped("remote traceback ... the queue is closed")
    with pytest.raises(QueueClosed) as caught:
        await client.admit(0)
    assert caught.value is Wrapped.cause


async def test_a_long_wait_is_asked_for_in_slices_and_keeps_its_turn():
    client, handle = make(s=0, b=1)
    await client.admit(0)
    waiting = asyncio.ensure_future(client.admit(1))
    while handle.calls.count("resume") < 2:  # noqa: ASYNC110 - a fake has no event for it
        await asyncio.sleep(0.005)
    assert handle.calls.count("admit") == 2
    await client.drop(0, reason="room")
    assert (await waiting).group == 1
    assert (await client.snapshot()).open == 1


async def test_a_dead_queue_is_named_at_once_and_a_silent_one_in_time():
    client, handle = make(config=HASTY)
    handle.dead = RuntimeError("the actor died")
    with pytest.raises(QueueUnavailable, match=r"driver got no answer from the queue to take\(\): .*the actor died"):
        await client.take()
    handle.dead = None
    handle.deaf = {"resume", "withdraw"}
    with pytest.raises(QueueUnavailable, match=r"within 0\.31 s to take\(\), waited for \d\.\d s so far") as caught:
        await client.take()
    assert "withdraw of take()" in caught.value.__notes__[0]
    handle.deaf = {"snapshot"}
    with pytest.raises(QueueUnavailable, match=r"within 0\.3 s to snapshot\(\); queue\.timeout_s is 0\.3"):
        await client.snapshot()


async def test_a_wait_can_be_bounded_as_a_whole():
    client, _ = make(config=QueueClientConfig(timeout_s=1, slice_s=0.01, max_wait_s=0.03))
    with pytest.raises(QueueUnavailable, match=r"waited \d\.\d s for take\(\), and the queue has no result yet"):
        await client.take()


async def test_an_admission_whose_answer_was_lost_is_what_the_next_admit_of_its_prompt_gets():
    client, handle = make(s=0, b=2)
    handle.deaf = {"admit"}
    lost = await waits(client.admit(0))
    assert (await client.snapshot()).open == 1
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    handle.deaf = set()
    await client.admit(1)
    waiting = await waits(client.admit(3))
    assert (await client.admit(0)).group == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await client.drop(1, reason="room")
    snapshot = await client.snapshot()
    assert (snapshot.open, snapshot.next_group, snapshot.ledger.error) == (1, 2, 0)


async def test_an_admission_that_arrives_after_its_withdrawal_is_refused():
    service = QueueService(batch_groups=1, staleness=StalenessConfig())
    await service.withdraw("driver/0")
    with pytest.raises(QueueError, match="admission driver/0 was withdrawn"):
        await service.admit(0, ticket="driver/0", settled=(), wait_s=1)
    with pytest.raises(QueueError, match="call driver/0 is not under way"):
        await service.resume(ticket="driver/0", wait_s=1)
    assert (await service.snapshot()).next_group == 0


async def test_an_admission_that_arrives_twice_is_one_group():
    service = QueueService(batch_groups=1, staleness=StalenessConfig())
    twice = [await service.admit(0, ticket="driver/0", settled=(), wait_s=1) for _ in range(2)]
    assert twice[0] == twice[1]
    assert (await service.snapshot()).next_group == 1


async def test_a_batch_whose_answer_was_lost_is_the_next_one_taken():
    client, handle = make(b=1, s=2)
    for prompt in range(2):
        await client.put(group_for(await client.admit(prompt)))
    handle.deaf = {"take_bytes"}
    lost = await waits(client.take())
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    handle.deaf = set()
    assert [(await client.take()).groups[0].group for _ in range(2)] == [0, 1]


async def test_a_take_cancelled_while_it_waits_takes_nothing():
    client, _ = make(b=1)
    waiting = await waits(client.take())
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await client.put(group_for(await client.admit(0)))
    snapshot = await client.snapshot()
    assert (snapshot.ready, snapshot.taken) == (1, 0)
    assert (await client.take()).update == 0


async def test_results_are_forgotten_once_they_arrived():
    client, handle = make(s=7, b=1)
    for prompt in range(5):
        await client.put(group_for(await client.admit(prompt)))
    await client.take()
    assert len(handle.service._calls) == 1


async def test_damaged_groups_are_refused():
    _, handle = make()
    admission = await handle.service.admit(0, ticket="t/0", settled=(), wait_s=1)
    data = encode_group(group_for(admission))
    assert EncodedGroup(data).group == 0
    with pytest.raises(WireError, match="is damaged"):
        await handle.service.put_bytes(data[:-1] + b"\x7f", ticket="t/1", settled=(), wait_s=1)
    assert (await handle.service.snapshot()).open == 1


async def test_groups_to_cancel_are_waited_for():
    client, _ = make(s=1, b=1, policy="drop")
    hopeless = await client.admit(0)
    waiting = await waits(client.wait_expired())
    for update in (1, 2):
        await client.put(group_for(await client.admit(update)))
        await client.take()
        await client.publish(update, update=update)
        await client.loaded(update)
    assert await waiting == await client.expired() == [hopeless.group]
    again = await waits(client.wait_expired(known=[hopeless.group]))
    await client.close()
    with pytest.raises(QueueClosed):
        await again


async def test_rows_cross_by_their_rank_where_the_config_says_so():
    sizes = {}
    for ranked in (False, True):
        client, handle = make(
            b=1, routing=SPEC, config=QueueClientConfig(timeout_s=10, slice_s=0.01, rank_code_rows=ranked)
        )
        sent = group_for(await client.admit(7))
        sent.trajectories[:] = [trajectory(segment(200, rows=(0, 201)), routing=SPEC)]
        assert (await client.put(sent)).accepted
        (data,) = (await handle.service.take_bytes(ticket="peek", settled=[], wait_s=1)).groups
        sizes[ranked] = encoded_size(data)
        (got,) = unpack_group(data.head, data.buffers, routing=SPEC).trajectories
        assert np.array_equal(np.sort(got.routed_experts()), np.sort(sent.trajectories[0].routed_experts()))
    assert (sizes[True].rank_coded, sizes[False].rank_coded) == (True, False)
    assert sizes[True].rows < 0.4 * sizes[False].rows


def test_rank_coding_of_a_model_that_it_cannot_code_is_refused_at_the_start():
    spec = RoutingSpec(layers=(0,), num_experts=512, top_k=24)
    with pytest.raises(ContractError, match=r"more than 128; set queue\.rank_code_rows=false"):
        make(routing=spec, config=QueueClientConfig(rank_code_rows=True))
    make(routing=spec)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"timeout_s": 0}, r"queue\.timeout_s is 0; must be > 0"),
        ({"slice_s": -1}, r"queue\.slice_s is -1; must be > 0"),
        ({"max_wait_s": 0}, r"queue\.max_wait_s is 0; must be > 0"),
    ],
)
def test_config_names_what_is_wrong(values, message):
    with pytest.raises(ValueError, match=message):
        QueueClientConfig(**values)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), s=st.integers(0, 2), b=st.integers(1, 2))
def test_cancelled_calls_in_any_order_lose_nothing(seed, s, b):
    """Callers that give up at any moment, messages that overtake each other: every group ends in one place."""
    rng, steps = random.Random(seed), 4

    async def impatient(make_call):
        """The result of a call that is cancelled at random moments and made again."""
        while True:
            task = asyncio.ensure_future(make_call())
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                continue

    async def run():
        client, _ = make(
            s=s, b=b, jitter=lambda: rng.randrange(4), config=QueueClientConfig(timeout_s=9, slice_s=0.001)
        )

        async def roll():
            try:
                for prompt in range(1000):
                    await client.put(group_for(await impatient(lambda prompt=prompt: client.admit(prompt))))
            except QueueClosed:
                return

        async def train():
            for step in range(1, steps + 1):
                batch = await impatient(client.take)
                assert batch.update == step - 1
                await client.trained([g.group for g in batch.groups], train_step=step)
                await client.publish(step, update=step)
                await client.loaded(step)
            await client.close()

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(roll())
            tasks.create_task(train())
        snapshot = await client.snapshot()
        assert (snapshot.ledger.error, snapshot.ledger.trained, snapshot.taken) == (0, steps * b, 0)
        assert snapshot.open <= 1  # the group whose put met the closed queue

    asyncio.run(run())
