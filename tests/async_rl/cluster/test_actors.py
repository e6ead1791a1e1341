"""Places of a run's processes, and requests of a client that died."""

import asyncio

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from async_rl.cluster import actors
from async_rl.cluster.actors import Placement, ReplicaHost
from async_rl.cluster.rpc import Call
from async_rl.config import ClusterConfig
from message_queue.errors import EngineError
from tests.helpers.fakes import FakeEngine, SeededScript


def test_placement_has_adjacent_bundles_for_the_nodes_of_a_replica(monkeypatch):
    made = []
    monkeypatch.setattr(actors, "placement_group", lambda bundles, strategy: made.append(bundles))
    monkeypatch.setattr(actors, "_require_node", lambda bundle, fields: None)
    config = ClusterConfig(cpus_per_rank=3.0, cpus_per_replica=5.0)
    place = Placement(config, ranks=2, replicas=2, workers=1, gpus_per_replica=8.0, nodes_per_replica=2)
    node, alone = {"CPU": 2.5, "GPU": 4.0}, {"CPU": 1.0}
    assert made == [[{"CPU": 3.0}, {"CPU": 3.0}, node, node, node, node, alone, alone]]

    def bundles(*options):
        return [each["scheduling_strategy"].placement_group_bundle_index for each in options]

    assert bundles(place.rank(1), *place.replica(0), *place.replica(1), place.worker(0), place.queue()) == [
        *range(1, 8)
    ]
    assert all((each["num_cpus"], each["num_gpus"]) == (2.5, 4.0) for each in place.replica(1))
    names = ("replica slot 0 node 0", "replica slot 0 node 1", "replica slot 1 node 0", "replica slot 1 node 1")
    assert [place._name(i) for i in range(8)] == [
        *("trainer rank 0", "trainer rank 1", *names, "rollout worker slot 0", "the queue")
    ]
    single = Placement(config, ranks=0, replicas=2, workers=1, gpus_per_replica=0.5)
    assert made[1] == [{"CPU": 5.0, "GPU": 0.5}] * 2 + [alone] * 2
    assert single._name(1) == "replica slot 1" and bundles(*single.replica(1)) == [1]


async def test_trainer_ranks_of_a_node_are_consecutive(monkeypatch):
    class Group:
        async def ready(self):
            return None

    nodes = {0: "a", 1: "b", 2: "a", 3: "b", 4: "c"}
    monkeypatch.setattr(actors, "placement_group", lambda bundles, strategy: Group())
    monkeypatch.setattr(actors, "_require_node", lambda bundle, fields: None)
    monkeypatch.setattr(actors, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    place = Placement(ClusterConfig(), ranks=4, replicas=0, workers=0, gpus_per_replica=0.0)
    assert place.split_groups(2) == 2
    await place.ready()
    placed = [place.rank(i)["scheduling_strategy"].placement_group_bundle_index for i in range(4)]
    assert placed == [0, 2, 1, 3] and [place._name(bundle) for bundle in placed] == [
        f"trainer rank {i}" for i in range(4)
    ]
    assert [place.split_groups(size) for size in (1, 2, 4)] == [0, 0, 1]


async def test_start_of_a_replica_ends_when_another_of_its_nodes_does():
    async def start():
        await started.wait()
        return "replica"

    started, loop = asyncio.Event(), asyncio.get_running_loop()
    ends = [loop.create_future(), loop.create_future()]
    ends[1].set_result("node 2: engine process 7 died")
    with pytest.raises(EngineError, match="node 2: engine process 7 died"):
        await actors._unless_ended(start(), ends)
    started.set()
    assert await actors._unless_ended(start(), [loop.create_future()]) == "replica"


async def test_replica_host_drops_the_requests_of_a_dead_client_alone():
    engine = FakeEngine(SeededScript(0, vocab_size=40, stop_token=1, mean_length=8), token_s=60.0)
    host = ReplicaHost()
    host._serve(engine)
    exchanges = []
    for number, client in enumerate(("worker-0", "worker-1")):
        request = GenerateRequest(request_id=f"{client}#0.", token_ids=np.array([2, 3], np.int32), max_new_tokens=9)
        call = Call(number, "generate", (request,), {})
        exchanges.append(asyncio.create_task(host.exchange(client, [call], [])))
    async with asyncio.timeout(10):
        while engine.in_flight < 2:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0)
    await host.forget_client("worker-0")
    assert engine.in_flight == 1
    for exchange in exchanges:
        exchange.cancel()
    await host.forget_client("worker-1")
