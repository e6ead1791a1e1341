"""Content of the groups of a run: read by a restart, given to the trainer, and removed after a checkpoint."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from agent_loop.tools.tool import PauseGate
from async_rl.inference.pool import ReplicaPool
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import ContentPlace, GroupContents, fetched, read_content
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.worker import RolloutWorker
from message_queue.training_sequence import content_of
from message_queue.trajectory import Admission
from tests.helpers.fakes import FakeEngine, SeededScript
from tests.helpers.groups import group_for
from tests.helpers.stored import records_of

SCRIPT = SeededScript(0, vocab_size=40, stop_token=1, mean_length=8)


@pytest.fixture
def place(tmp_path):
    return ContentPlace(
        directory=tmp_path, run="run", fsync=False, trajectories=1, routing=None, resume_routing="append"
    )


def admission(group):
    return Admission(group=group, prompt=group, admitted_version=0, admitted_update=0)


def restored(*, open=(), ready=(), trajectories=1):
    """Groups of a restart, as far as their content needs it; trajectories: of each ready group."""
    return SimpleNamespace(
        open=[*map(admission, open)],
        ready=[*map(admission, ready)],
        trajectories=dict.fromkeys(ready, trajectories),
    )


async def write(directory, group, *, records=None, name="rollout-0000"):
    """Content of a closed group of one trajectory; records: number to write, None for all."""
    writer = await ContentWriter.open(directory, name=name, run="run", fsync=False)
    (trajectory,) = group_for(admission(group)).trajectories
    await writer.append(records_of(trajectory, group=group)[:records])
    await writer.close()


async def test_content_that_is_missing_makes_a_ready_group_incomplete(place, tmp_path):
    await write(tmp_path, 1)
    await write(tmp_path, 2, records=2, name="rollout-0001")
    stored = await read_content(place, restored(open=[2], ready=[1, 3]))
    assert stored.incomplete == {3} and not stored.notes
    assert (await read_content(place, restored(ready=[1, 2]))).incomplete == {2}
    assert (await read_content(replace(place, directory=tmp_path / "no"), restored(ready=[1]))).incomplete == {1}
    replaced = await read_content(place, restored(ready=[1], trajectories=2))
    assert replaced.incomplete == {1}, "one replaced a failed one"


async def test_contents_are_removed_once_a_checkpoint_holds_their_step(place, tmp_path):
    writer = await ContentWriter.open(tmp_path, name="rollout-0000", run="run", fsync=False)
    contents = GroupContents(forget=writer.forget)
    groups = [group_for(admission(number)) for number in range(3)]
    for group in groups:
        await writer.append(records_of(group.trajectories[0], group=group.group))
        contents.add(group.group, content_of(group))
    contents.trained([0], train_step=1)
    contents.trained([1], train_step=2)
    with pytest.raises(KeyError):
        contents.of([0])
    await contents.checkpointed(1)
    await contents.drop([2])
    stored = await read_content(place, restored(ready=[0, 1, 2]))
    assert stored.incomplete == {0, 2}, "group 1 may be trained again"
    await writer.close()


async def test_a_reference_to_content_is_fetched_if_it_is_needed_here():
    content = content_of(group_for(admission(1)))
    reference = asyncio.get_running_loop().create_future()
    reference.set_result(content)
    assert await fetched([content, reference]) == [content, content]


async def test_contents_of_a_restart_get_a_new_writer_and_lose_settled_files(place, tmp_path):
    await write(tmp_path, 1)
    await write(tmp_path, 2, name="rollout-0007")
    pool = ReplicaPool([FakeEngine(SCRIPT)])
    rollouts = Dispatcher([worker_of(pool)], pool=pool)
    await rollouts.open(place, live=[2])
    await rollouts.end()
    assert {path.stem for path in tmp_path.glob("*.sqlite")} == {"rollout-0007", "rollout-0008"}


async def test_a_flush_does_not_wait_for_a_replica_that_is_silent():
    pool, asked = ReplicaPool([replica := FakeEngine(SCRIPT)]), []

    async def stats():
        asked.append(True)
        await asyncio.Event().wait()

    replica.stats = stats
    async with asyncio.timeout(30):
        await worker_of(pool, replies_s=0.01).flush()
    assert asked and pool.live, "the silence of one read is no loss"


def worker_of(pool, *, replies_s=10.0):
    rollouter = partial(Rollouter, loop=None, routing=None, trajectories_per_group=1)
    parts = {"rollouter": lambda log: rollouter(log=log), "validator": None, "gate": PauseGate()}
    return RolloutWorker("worker-0", pool=pool, replies_s=replies_s, **parts)
