"""The queue in a process of its own, with a rollout worker in another."""

import asyncio
import os
import signal

import numpy as np
import pytest
import ray

from async_rl.cluster.actors import start_ray
from async_rl.cluster.queue_client import start_queue
from async_rl.cluster.queue_host import QueueUnavailable
from async_rl.config import ClusterConfig
from async_rl.rollout.group_contents import ContentPlace, read_content
from message_queue.disk_errors import JournalMismatch
from message_queue.heads import head_of
from message_queue.recovery import JournalPlace
from message_queue.staleness import StalenessConfig
from tests.e2e.queue_rollouter import RUN, Rollouter, made
from tests.helpers.groups import SPEC


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


async def opened(directory, *, run=RUN):
    """(the queue, what its journal restored)"""
    queue = start_queue(
        batch_groups=2,
        staleness=StalenessConfig(max_staleness=3),
        max_ready=None,
        updates_per_batch=1,
        timeout_s=60.0,
        options={"num_cpus": 0},
    )
    try:
        return queue, await queue.open(JournalPlace(directory=directory, run=run), timeout_s=60.0)
    except BaseException:
        queue.kill()
        raise


def content_place(directory):
    return ContentPlace(
        directory=directory / "content", run=RUN, fsync=False, trajectories=1, routing=SPEC, resume_routing="append"
    )


async def test_groups_outlive_their_rollout_worker_and_their_queue(tmp_path):
    queue, _ = await opened(tmp_path)
    place = content_place(tmp_path)
    rollouter = ray.remote(Rollouter).options(num_cpus=0).remote(queue._actor, place.directory)
    await rollouter.open.remote()
    await asyncio.gather(*(rollouter.roll.remote(prompt) for prompt in range(2)))
    os.kill(await rollouter.pid.remote(), signal.SIGKILL)
    heads = (await queue.take()).groups
    os.kill(await queue.pid(timeout_s=60.0), signal.SIGKILL)

    again, restored = await opened(tmp_path)
    batch = await again.take()
    assert batch.groups == heads and sorted(head.prompt for head in heads) == [0, 1]
    stored = await read_content(place, restored)
    assert not (stored.incomplete or stored.notes)
    expected = made()
    for head in heads:
        assert head_of(stored.groups[head.group]) == head
        (found,) = stored.groups[head.group].trajectories
        assert np.array_equal(found.token_ids(), expected.token_ids())
        assert np.array_equal(found.sequences()[-1].routed_experts, expected.sequences()[-1].routed_experts)
    again.kill()


async def test_calls_that_wait_for_a_killed_queue_fail(tmp_path):
    queue, _ = await opened(tmp_path)
    waiting = [asyncio.create_task(queue.take()), asyncio.create_task(queue.wait_expired())]
    await queue.admit(0)
    os.kill(await queue.pid(timeout_s=60.0), signal.SIGKILL)
    for call in waiting:
        with pytest.raises(QueueUnavailable, match="take"):
            await call
    with pytest.raises(QueueUnavailable, match="admit"):
        await queue.admit(1)


async def test_refusals_of_the_queue_keep_their_type(tmp_path):
    queue, _ = await opened(tmp_path)
    await queue.close_journal()
    with pytest.raises(JournalMismatch, match="'other'"):
        await opened(tmp_path, run="other")
    queue.kill()
