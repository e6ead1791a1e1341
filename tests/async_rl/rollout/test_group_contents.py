"""Content of the groups of a run: what a restart reads, what the trainer gets, and when it is removed."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agent_loop.tools import PauseGate
from async_rl.cluster.queue_client import QueueClient
from async_rl.cluster.queue_host import QueueHost
from async_rl.config import load_config
from async_rl.controller.recovery import RecoveryLoop
from async_rl.controller.resume import Resume
from async_rl.inference.pool import ReplicaPool
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import ContentPlace, GroupContents, fetched, read_content
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.worker import RolloutWorker
from message_queue.content import ContentWriter
from message_queue.contract import Admission
from message_queue.heads import head_of
from message_queue.recovery import Restored
from message_queue.training_sequence import content_of
from tests.flow.harness import DirectHandle
from tests.helpers.fakes import FakeEngine, SeededScript
from tests.helpers.groups import group_for
from tests.helpers.stored import records_of

PLACE = ContentPlace(directory=None, run="run", fsync=False, trajectories=1, routing=None, resume_routing="append")  # pyright: ignore[reportArgumentType]


def admission(group):
    return Admission(group=group, prompt=group, admitted_version=0, admitted_update=0)


def restored(*, open=(), ready=()):
    return Restored(
        began=False,
        open=tuple(map(admission, open)),
        ready=tuple(map(admission, ready)),
        replay=0,
        prompt_cursor=9,
        waiting=(),
        version=0,
        diverged=False,
        version_updates={0: 0},
        given_up=frozenset(),
        next_group=9,
        notes=(),
    )


async def write(directory, *groups, run="run", records=None, name="rollout-0000"):
    """Content of closed groups of one trajectory; records: how many of each are written, None for all."""
    writer = await ContentWriter.open(directory, name=name, run=run, fsync=False)
    for group in groups:
        (trajectory,) = group_for(admission(group)).trajectories
        await writer.append(records_of(trajectory, group=group)[:records])
    await writer.close()


async def test_content_that_is_missing_makes_a_ready_group_incomplete(tmp_path):
    place = replace(PLACE, directory=tmp_path)
    await write(tmp_path, 1)
    await write(tmp_path, 2, records=2, name="rollout-0001")
    stored = await read_content(place, restored(open=[2], ready=[1, 3]))
    assert stored.incomplete == {3} and not stored.notes
    assert (await read_content(place, restored(ready=[1, 2]))).incomplete == {2}
    assert (await read_content(replace(place, directory=tmp_path / "no"), restored(ready=[1]))).incomplete == {1}


async def test_contents_give_ready_groups_to_the_trainer_and_open_ones_to_rollouts(tmp_path):
    place = replace(PLACE, directory=tmp_path)
    await write(tmp_path, 1)
    await write(tmp_path, 2, records=2, name="rollout-0001")
    found = restored(open=[2], ready=[1])
    contents = GroupContents.of_restart(found, await read_content(place, found), forget=nothing)
    expected = content_of(group_for(admission(1)))
    assert contents.of([1])[0][0][0].token_ids.tolist() == expected[0][0].token_ids.tolist()
    (held,) = contents.unfinished[2].trajectories
    assert held.num_sampled == 3 and not held.closed


async def nothing(_groups):
    return


async def test_contents_are_removed_once_a_checkpoint_holds_their_step(tmp_path):
    place = replace(PLACE, directory=tmp_path)
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


async def test_contents_of_a_restart_get_a_new_writer_and_lose_settled_files(tmp_path):
    place = replace(PLACE, directory=tmp_path)
    await write(tmp_path, 1)
    await write(tmp_path, 2, name="rollout-0007")
    found = restored(ready=[2])
    pool = ReplicaPool([FakeEngine(SeededScript(0, vocab_size=40, stop_token=1, mean_length=8))])
    worker = worker_of(pool)
    rollouts = Dispatcher([worker], pool=pool)
    await rollouts.open(place, live=found.live)
    await rollouts.end()
    assert {path.stem for path in tmp_path.glob("*.sqlite")} == {"rollout-0007", "rollout-0008"}


async def test_a_flush_does_not_wait_for_a_replica_that_is_silent():
    replica = FakeEngine(SeededScript(0, vocab_size=40, stop_token=1, mean_length=8))
    pool = ReplicaPool([replica])
    asked = []

    async def stats():
        asked.append(True)
        await asyncio.Event().wait()

    replica.stats = stats
    async with asyncio.timeout(30):
        await worker_of(pool, replies_s=0.01).flush()
    assert asked and pool.live, "the silence of one read is no loss"


def worker_of(pool, *, replies_s=10.0):
    gate = PauseGate()
    return RolloutWorker(
        "worker-0", rollouter=idle_rollouter, validator=None, gate=gate, pool=pool, replies_s=replies_s
    )


def idle_rollouter(log):
    return Rollouter(loop=None, routing=None, trajectories_per_group=1, log=log)


class DirectQueue(QueueClient):
    """A queue of this process, as `Processes` starts one."""

    def __init__(self, config):
        host = QueueHost(batch_groups=config.rollout.groups_per_batch, staleness=config.staleness)
        super().__init__(DirectHandle(host), timeout_s=5.0)
        self.killed = False

    def kill(self):
        self.killed = True


async def test_lives_open_a_ready_group_again_that_misses_its_content(tmp_path):
    config = load_config([f"output_dir={tmp_path}", "rollout.trajectories_per_group=2"])
    started = []

    async def start_queue():
        started.append(DirectQueue(config))
        return started[-1]

    run_parts = SimpleNamespace(processes=SimpleNamespace(start_queue=start_queue))
    resume = Resume(config)
    first = await start_queue()
    await first.open(resume.journal(), timeout_s=5.0)
    for prompt in range(2):
        await first.put(head_of(group_for(await first.admit(prompt))))
    await first.close_journal()
    recovery = RecoveryLoop(config, run_parts, order=None, held_out=(), resume=resume)
    place = replace(resume.content(None), trajectories=1)
    await write(place.directory, 0, run=place.run)

    queue, found, stored = await recovery._open_queue(place)
    assert [a.group for a in found.ready] == [0] and [a.group for a in found.open] == [1]
    assert stored.groups[0].closed and any("group 1 is open again" in note for note in found.notes)
    assert [one.killed for one in started] == [False, True, False]
    await queue.close_journal()
