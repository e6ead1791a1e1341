"""Places of a run's processes."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from async_rl.cluster import placement
from async_rl.cluster.placement import Placement
from async_rl.config import ClusterConfig


def bundle_of(options):
    return options["scheduling_strategy"].placement_group_bundle_index


def test_placement_has_adjacent_bundles_for_the_nodes_of_a_replica(monkeypatch):
    made = []
    monkeypatch.setattr(placement, "placement_group", lambda bundles, strategy: made.append(bundles))
    monkeypatch.setattr(placement, "_require_node", lambda bundle, fields: None)
    config = ClusterConfig(cpus_per_rank=3.0, cpus_per_replica=5.0)
    place = Placement(config, ranks=2, replicas=2, workers=1, gpus_per_replica=8.0, nodes_per_replica=2)
    node, alone = {"CPU": 2.5, "GPU": 4.0}, {"CPU": 1.0}
    assert made == [[{"CPU": 3.0}, {"CPU": 3.0}, node, node, node, node, alone, alone]]

    placed = [place.rank(1), *place.replica(0), *place.replica(1), place.worker(0), place.queue()]
    assert [bundle_of(each) for each in placed] == [*range(1, 8)]
    assert all((each["num_cpus"], each["num_gpus"]) == (2.5, 4.0) for each in place.replica(1))
    ranks = [f"trainer rank {number}" for number in range(2)]
    nodes = [f"replica slot {slot} node {number}" for slot in range(2) for number in range(2)]
    assert [place._name(i) for i in range(8)] == [*ranks, *nodes, "rollout worker slot 0", "the queue"]
    single = Placement(config, ranks=0, replicas=2, workers=1, gpus_per_replica=0.5)
    assert made[1] == [{"CPU": 5.0, "GPU": 0.5}] * 2 + [alone] * 2
    assert single._name(1) == "replica slot 1" and [bundle_of(each) for each in single.replica(1)] == [1]


async def test_trainer_ranks_of_a_node_are_consecutive(monkeypatch):
    group = SimpleNamespace(ready=lambda: asyncio.sleep(0))
    nodes = {0: "a", 1: "b", 2: "a", 3: "b", 4: "c"}
    monkeypatch.setattr(placement, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(placement, "_require_node", lambda bundle, fields: None)
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    place = Placement(ClusterConfig(), ranks=4, replicas=0, workers=0, gpus_per_replica=0.0)
    assert place.split_groups(2) == 2
    await place.ready()
    placed = [bundle_of(place.rank(i)) for i in range(4)]
    assert placed == [0, 2, 1, 3]
    assert [place._name(bundle) for bundle in placed] == [f"trainer rank {i}" for i in range(4)]
    assert [place.split_groups(size) for size in (1, 2, 4)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("failures", "starts"),
    [
        (["The current node timed out during startup."], 2),
        (["no such address"], 1),
        (["timed out during startup"] * 2, 2),
    ],
)
def test_a_start_of_ray_that_runs_out_of_its_time_is_repeated_once(monkeypatch, failures, starts):
    left, started = list(failures), []

    def init(**options):
        started.append(options["address"])
        if left:
            raise Exception(left.pop(0))

    monkeypatch.setattr(placement.ray, "init", init)
    monkeypatch.setattr(placement.ray, "shutdown", lambda: started.append("shutdown"))
    with contextlib.nullcontext() if len(failures) < starts else pytest.raises(Exception, match=failures[-1]):
        placement.start_ray(ClusterConfig())
    assert started == ["local", "shutdown", "local"][: 2 * starts - 1]
