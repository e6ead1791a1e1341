"""Content that is appended, shared or sent: the trainer reads the same groups, whatever way they came."""

import asyncio
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.client import QueueClient, QueueClientConfig
from message_queue.content import Recorded
from message_queue.contract import DuplicateGroup, QueueError
from message_queue.progress import CallBegun, RolloutRecord, Sampled, TrajectoryClosed
from message_queue.service import QueueService
from message_queue.staleness import StalenessConfig
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup, Trajectory
from message_queue.wire import WireError, encode_group, pack_group, unpack_group
from message_queue.wire.packed import Packed, Shared, SharedMemoryLost
from tests.unit.groups import SPEC, segment, support_of
from tests.unit.test_queue_client import Handle

CONFIG = QueueClientConfig(timeout_s=10, slice_s=0.01)


class Reference:
    """Of buffers that live in the memory, or with it alone."""

    def __init__(self, buffers):
        self.buffers = buffers


class FakeMemory:
    """Shared memory in one process; references `lost` are of nothing any more."""

    def __init__(self, *, min_bytes=1):
        self.min_bytes, self.lost, self.puts = min_bytes, False, 0
        self.references = weakref.WeakSet()

    def put(self, buffers):
        buffers = tuple(buffer.copy() for buffer in buffers)
        self.puts += 1
        reference = Reference(buffers)
        self.references.add(reference)
        return reference

    async def get(self, references):
        await asyncio.sleep(0)
        if self.lost:
            raise SharedMemoryLost("gone")
        return [reference.buffers for reference in references]


def make(memory=None, *, b=1, service_memory=None):
    service = QueueService(batch_groups=b, staleness=StalenessConfig(max_staleness=8), memory=service_memory or memory)
    handle = Handle(service)
    return QueueClient(handle, name="driver", routing=SPEC, config=CONFIG, memory=memory), service


def rollout(cuts, *, resume_routing="append", reward=0.5):
    """A trajectory of a prompt, then of each turn its segments and a tool's reply; what happened to it in order."""
    made, steps = Trajectory(routing=SPEC, resume_routing=resume_routing), []
    for number, turn in enumerate(cuts):
        observation = np.arange(2 + number, dtype=np.int32)
        steps.append((len(made), observation))
        made.observe(observation)
        for version, tokens in enumerate(turn):
            part = segment(tokens, version=0, rows=(max(0, made.num_rows - version), len(made) + tokens - 1))
            if version % 2 == 0:  # a trajectory with and without kept tokens
                part = replace(part, support=support_of([range(i, 3 * i + 2) for i in range(tokens)]))
            steps.append((len(made), Sampled(part)))
            made.extend(part)
        steps.append((len(made), CallBegun("search")))
    steps.append((len(made), TrajectoryClosed(stop_reason=StopReason.STOP, reward=reward, info={"turns": len(cuts)})))
    made.close(stop_reason=StopReason.STOP, reward=reward, info={"turns": len(cuts)})
    return made, steps


def group_of(admission, trajectories):
    return PromptGroup(
        group=admission.group,
        prompt=admission.prompt,
        admitted_version=admission.admitted_version,
        admitted_update=admission.admitted_update,
        trajectories=trajectories,
    )


def records(group, number, steps):
    return [RolloutRecord(group=group, trajectory=number, at=at, what=what) for at, what in steps]


def content(group):
    """All that the trainer reads of a group."""
    return [
        (
            t.token_ids().tolist(),
            t.loss_mask().tolist(),
            t.behaviour_logprobs().tolist(),
            t.routed_experts().tolist(),
            t.param_versions().tolist(),
            t.reward,
            t.stop_reason,
            t.info,
            [len(turn.segments) for turn in t.turns],
        )
        for t in group.trajectories
    ]


CUTS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(
    group=st.lists(CUTS, min_size=1, max_size=3),
    min_bytes=st.sampled_from([1, 200, 1 << 30]),
    appended=st.booleans(),
    resume_routing=st.sampled_from(["append", "replace", "force"]),
)
def test_a_group_is_read_as_it_was_put(group, min_bytes, appended, resume_routing):
    async def run():
        memory = FakeMemory(min_bytes=min_bytes)
        client, service = make(memory)
        rollouts = [rollout(cuts, resume_routing=resume_routing) for cuts in group]
        admission = await client.admit(0)
        if appended:
            for number, (_, steps) in enumerate(rollouts):
                for record in records(admission.group, number, steps):
                    await client.append([record])
        sent = group_of(admission, [made for made, _ in rollouts])
        await client.put(sent)
        batch = await client.take()
        assert content(batch.groups[0]) == content(sent)
        assert memory.puts == 0 or min_bytes < 1 << 30
        (message,) = service._handed["driver/2"]
        assert isinstance(message.message, Recorded) == appended
        assert not service._contents._appended

    asyncio.run(run())


async def delivered(memory, *, appended, service_memory=None):
    """A client and its service, which has one group; and what was put."""
    client, service = make(memory, service_memory=service_memory)
    made, steps = rollout([[3, 2], [4]])
    admission = await client.admit(0)
    if appended:
        await client.append(records(admission.group, 0, steps))
    sent = group_of(admission, [made])
    await client.put(sent)
    return client, service, sent


@pytest.mark.parametrize("appended", [False, True])
async def test_arrays_outlive_who_put_them(appended):
    memory, of_the_queue = FakeMemory(), FakeMemory()
    client, _, sent = await delivered(memory, appended=appended, service_memory=of_the_queue)
    memory.lost = True
    assert content((await client.take()).groups[0]) == content(sent)


async def test_arrays_that_are_gone_before_the_queue_has_them_are_refused():
    memory = FakeMemory()
    memory.lost = True
    with pytest.raises(Exception, match="gone"):
        await delivered(memory, appended=False)


@pytest.mark.parametrize("appended", [False, True])
async def test_nothing_is_held_once_a_batch_has_arrived(appended):
    memory = FakeMemory()
    client, service, _ = await delivered(memory, appended=appended)
    await client.take()
    assert memory.references
    await client.admit(1)  # the next call says that the batch is there
    assert not memory.references
    assert not service._handed


async def test_a_group_crosses_once():
    memory = FakeMemory()
    _, service, _ = await delivered(memory, appended=True)
    assert memory.puts == 3, "three segments"
    (group,) = service._queue._held.ready.values()
    assert isinstance(group.content.message, Recorded)
    assert len(group.data) < 400


async def test_a_dropped_group_is_not_held():
    memory = FakeMemory()
    client, service = make(memory)
    _, steps = rollout([[3, 2]])
    admission = await client.admit(0)
    await client.append(records(admission.group, 0, steps))
    assert memory.references
    await client.drop(admission.group, reason="why")
    await client.append(records(admission.group, 0, steps))  # it comes late
    assert not memory.references
    assert not service._contents._appended


@pytest.mark.parametrize("missing", [0, 1, -1])
async def test_a_group_that_was_appended_in_part_is_put_whole(missing):
    client, service = make(FakeMemory(min_bytes=1 << 30))
    made, steps = rollout([[3, 2], [4]])
    admission = await client.admit(0)
    del steps[missing]
    await client.append(records(admission.group, 0, steps))
    sent = group_of(admission, [made])
    await client.put(sent)
    assert content((await client.take()).groups[0]) == content(sent)
    ((held,),) = service._handed.values()
    assert isinstance(held.message, Packed)


async def test_a_group_is_not_read_from_other_content_than_was_put():
    client, service = make(FakeMemory())
    made, steps = rollout([[3, 2], [4]])
    admission = await client.admit(0)
    await client.append(records(admission.group, 0, steps[:-2]))
    head = pack_group(group_of(admission, [made])).head
    with pytest.raises(QueueError, match=r"group 0 was put as \(segments, trajectories\) \(3, 1\); .* has \(3, 0\)"):
        await service.put_bytes(Recorded(head), ticket="t/0", settled=(), wait_s=1)
    await client.put(group_of(admission, [made]))
    with pytest.raises(DuplicateGroup):
        await service.put_bytes(Recorded(head), ticket="t/1", settled=(), wait_s=1)


async def test_small_arrays_travel_with_their_message():
    memory = FakeMemory(min_bytes=1000)
    small, large = (pack_group(group) for group in (await a_group(tokens=3), await a_group(tokens=300)))
    assert small.num_bytes < 1000 <= large.num_bytes
    for tokens, kind in ((3, Packed), (300, Shared)):
        client, service = make(memory)
        admission = await client.admit(0)
        await client.put(group_of(admission, [rollout([[tokens]])[0]]))
        (held,) = service._queue._held.ready.values()
        assert isinstance(held.content.message, kind)


async def a_group(*, tokens):
    client, _ = make()
    return group_of(await client.admit(0), [rollout([[tokens]])[0]])


async def test_packed_arrays_are_views_and_as_many_bytes_as_the_message():
    group = await a_group(tokens=50)
    packed = pack_group(group)
    (rows,) = (s.routed_experts.experts for t in group.trajectories for s in t.segments)
    assert np.shares_memory(packed.buffers[3], rows)
    assert packed.num_bytes + len(packed.head) == len(encode_group(group))


async def test_a_group_that_is_not_what_was_appended_is_put_whole():
    client, service = make(FakeMemory(min_bytes=1 << 30))
    _, steps = rollout([[3, 2], [4]])
    admission = await client.admit(0)
    await client.append(records(admission.group, 0, steps))
    sent = group_of(admission, [rollout([[3, 2], [5]])[0]])
    await client.put(sent)
    assert content((await client.take()).groups[0]) == content(sent)
    ((held,),) = service._handed.values()
    assert isinstance(held.message, Packed)


async def test_buffers_that_do_not_fit_their_head_are_refused():
    packed = pack_group(await a_group(tokens=5))
    tokens, logprobs, ends, rows, kept = packed.buffers
    with pytest.raises(WireError, match=r"has 24 bytes of tokens, .* its head says 7 tokens"):
        unpack_group(packed.head, (tokens[4:], logprobs, ends, rows, kept), routing=SPEC)
    with pytest.raises(WireError, match=r"bytes of rows; its head says \(6, 2, 2\)"):
        unpack_group(packed.head, (tokens, logprobs, ends, rows[4:], kept), routing=SPEC)
    with pytest.raises(WireError, match="rows in 2 pieces; its head says 1"):
        unpack_group(packed.head, (tokens, logprobs, ends, rows, rows, kept), routing=SPEC)
    with pytest.raises(WireError, match="1 of kept ids"):
        unpack_group(packed.head, (tokens, logprobs, ends, rows, np.ones(1, np.uint8)), routing=SPEC)
