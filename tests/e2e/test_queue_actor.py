"""The queue in a process of its own, with a rollouter in another that is killed: what it handed in is still there."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats

from async_rl.actors import ClusterConfig, QueueActor, start_ray
from async_rl.object_store import ObjectStore
from async_rl.queue_handle import QueueHandle, start_queue
from message_queue.client import QueueUnavailable
from message_queue.progress import RolloutRecord
from message_queue.restart import JournalPlace
from message_queue.staleness import StalenessConfig
from tests.e2e.queue_rollouter import CONFIG, Rollouter, made
from tests.unit.groups import SPEC


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


def queue_of(directory: Path | None, *, shards=0):
    """A queue, with a journal where there is a directory."""
    if directory is None:
        actor = QueueActor.options(num_cpus=0).remote(
            batch_groups=2, staleness=StalenessConfig(max_staleness=3), memory=ObjectStore()
        )
        return QueueHandle(actor, name="driver", routing=SPEC, config=CONFIG)
    return start_queue(
        batch_groups=2,
        staleness=StalenessConfig(max_staleness=3),
        max_ready=None,
        updates_per_batch=1,
        journal=JournalPlace(directory=directory, run="run", trajectories=1, routing=SPEC),
        routing=SPEC,
        config=CONFIG,
        options={"num_cpus": 0},
        shard_options=[{"num_cpus": 0}] * shards,
    )


@pytest.mark.parametrize(("journaled", "shards"), [(True, 0), (False, 0), (True, 2)])
async def test_groups_outlive_their_rollouter_and_with_a_journal_their_queue(tmp_path, journaled, shards):
    queue = queue_of(tmp_path if journaled else None, shards=shards)
    if journaled:
        await queue.open(timeout_s=60)
    rollouter = ray.remote(Rollouter).options(num_cpus=0).remote(*queue._actors[:1], queue._actors[1:])
    await asyncio.gather(*(rollouter.roll.remote(prompt, appended=journaled) for prompt in range(2)))
    os.kill(await rollouter.pid.remote(), signal.SIGKILL)
    expected, batch = made(), await queue.take()
    for group in batch.groups:
        (got,) = group.trajectories
        assert np.array_equal(got.token_ids(), expected.token_ids())
        assert np.array_equal(got.routed_experts(), expected.routed_experts())
    queue.kill()
    if journaled:
        assert len(list(tmp_path.glob("shard-*/*.journal"))) == shards
        again = queue_of(tmp_path, shards=shards)
        await again.open(timeout_s=60)
        batch = await again.take()
        assert sorted(group.prompt for group in batch.groups) == [0, 1]
        for group in batch.groups:
            assert np.array_equal(group.trajectories[0].routed_experts(), expected.routed_experts())
        if shards:
            await a_killed_holder_is_a_lost_queue(again)
        again.kill()


def stored():
    """Bytes in the object store: (now, made since Ray was started)."""
    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    return stats.object_store_bytes_used, stats.cumulative_created_bytes


@pytest.mark.parametrize("journaled", [True, False])
async def test_what_was_trained_leaves_the_object_store(tmp_path, journaled):
    queue, (there, before) = queue_of(tmp_path if journaled else None), stored()
    if journaled:
        await queue.open(timeout_s=60)
    rollouter = ray.remote(Rollouter).options(num_cpus=0).remote(*queue._actors)
    for step in range(1, 5):
        await asyncio.gather(*(rollouter.roll.remote(2 * step + i, appended=journaled) for i in range(2)))
        await queue.trained([group.group for group in (await queue.take()).groups], train_step=step)
        if journaled:
            await queue.checkpointed(step)
    went_through = stored()[1] - before
    assert went_through > 8 * made().routed_experts().nbytes
    async with asyncio.timeout(30):
        # the answer to the last take, a quarter of it, is kept until the next call
        while stored()[0] - there > went_through / 2:  # noqa: ASYNC110 - Ray tells nobody
            await asyncio.sleep(0.1)
    queue.kill()
    ray.kill(rollouter)


async def a_killed_holder_is_a_lost_queue(queue):
    pids = await queue.pids(timeout_s=60)
    assert list(pids) == ["queue", "queue-shard-0", "queue-shard-1"]
    group = (await queue.admit(2)).group
    os.kill(pids[f"queue-shard-{group % 2}"], signal.SIGKILL)
    prompt = RolloutRecord(group=group, trajectory=0, at=0, what=np.arange(2, dtype=np.int32))
    with pytest.raises(QueueUnavailable, match=r"append\(1 records\): ActorDiedError"):
        await queue.append([prompt])


async def test_what_is_put_in_one_turn_is_one_object_up_to_its_size():
    store = ObjectStore(object_bytes=10_000)
    with pytest.raises(RuntimeError, match=r"before ObjectStore.store\(\)"):
        pickle.dumps(store.put((np.zeros(10, np.uint8),)))
    store.store()
    sent = [tuple(np.full(size, i, np.uint8) for size in (4000, 10)) for i in range(3)]
    first, second, third = (store.put(buffers) for buffers in sent)
    assert first.reference == second.reference
    assert third.reference != first.reference
    got = await store.get([third, first, second])
    assert [[int(b[0]) for b in buffers] for buffers in got] == [[2, 2], [0, 0], [1, 1]]
    assert [len(b) for b in got[0]] == [4000, 10]
    assert not got[0][0].flags.writeable
