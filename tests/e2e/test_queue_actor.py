"""The queue in a process of its own, with a rollouter in another that is killed: what it handed in is still there."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import ray

from async_rl.actors import ClusterConfig, QueueActor, start_ray
from async_rl.handles import QueueHandle
from async_rl.object_store import ObjectStore
from message_queue.restart import JournalPlace
from message_queue.staleness import StalenessConfig
from tests.e2e.queue_rollouter import CONFIG, Rollouter, made
from tests.unit.groups import SPEC


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


def queue_of(directory: Path | None):
    """An actor, with a journal where there is a directory."""
    place = None if directory is None else JournalPlace(directory=directory, run="run", trajectories=1, routing=SPEC)
    return QueueActor.options(num_cpus=0).remote(
        batch_groups=2, staleness=StalenessConfig(max_staleness=3), journal=place, memory=ObjectStore()
    )


def handle_of(actor):
    return QueueHandle(actor, name="driver", routing=SPEC, config=CONFIG)


@pytest.mark.parametrize("journaled", [True, False])
async def test_groups_outlive_their_rollouter_and_with_a_journal_their_queue(tmp_path, journaled):
    actor = queue_of(tmp_path if journaled else None)
    queue = handle_of(actor)
    if journaled:
        await queue.open(timeout_s=60)
    rollouter = ray.remote(Rollouter).options(num_cpus=0).remote(actor)
    await asyncio.gather(*(rollouter.roll.remote(prompt, appended=journaled) for prompt in range(2)))
    os.kill(await rollouter.pid.remote(), signal.SIGKILL)
    expected, batch = made(), await queue.take()
    for group in batch.groups:
        (got,) = group.trajectories
        assert np.array_equal(got.token_ids(), expected.token_ids())
        assert np.array_equal(got.routed_experts(), expected.routed_experts())
    queue.kill()
    if journaled:
        again = handle_of(queue_of(tmp_path))
        await again.open(timeout_s=60)
        assert sorted(group.prompt for group in (await again.take()).groups) == [0, 1]
        again.kill()


async def test_what_is_put_in_one_turn_is_one_object_up_to_its_size():
    store = ObjectStore(object_bytes=10_000)
    sent = [tuple(np.full(size, i, np.uint8) for size in (4000, 10)) for i in range(3)]
    first, second, third = (store.put(buffers) for buffers in sent)
    assert first.reference == second.reference
    assert third.reference != first.reference
    got = await store.get([third, first, second])
    assert [[int(b[0]) for b in buffers] for buffers in got] == [[2, 2], [0, 0], [1, 1]]
    assert [len(b) for b in got[0]] == [4000, 10]
    assert not got[0][0].flags.writeable
