"""Who receives a version by broadcast, and what follows if it does not come."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from async_rl.inference.delivery import Deliveries
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.replica import DeliveryError
from async_rl.inference.stub import InProcess
from async_rl.weights.broadcast import VersionServer
from async_rl.weights.transport import Source, WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError
from message_queue.tokens import WeightVersion

TRAINER = (Source("trainer:1", (0, 1)),)
UPDATE = WeightUpdate(Path("weights-4"), WeightVersion(4, "d"), buckets=("a", "b"), sources=TRAINER)


class Replica(InProcess):
    """Receives if all seats of a delivery are taken, after the outcomes in `outcomes`: fail, die, hang or wait.

    One that waits fails as soon as the delivery is ended in the store of its server.
    """

    def __init__(self, name, node, *outcomes, has=True):
        self.name, self.node, self.outcomes, self.seats, self.has = name, node, list(outcomes), [], has

    async def fetch(self, update, seat=None):
        assert update.weights is UPDATE.weights
        self.seats.append(seat)
        outcome = self.outcomes.pop(0) if self.outcomes else "receive"
        if outcome == "die":
            raise ReplicaLostError(f"{self.name}: process died during fetch")
        if outcome == "hang":
            await asyncio.Event().wait()
        if outcome == "wait":
            address, _, port = seat.sources[0].address.partition(":")
            store = PrefixStore(seat.delivery, TCPStore(address, int(port), wait_for_workers=False))
            reason = await asyncio.to_thread(store.get, "failure")
            raise DeliveryError(f"{self.name}: {reason.decode()}")
        if outcome == "fail":
            raise DeliveryError(f"{self.name}: bucket 1 did not come from trainer:1")

    async def offer(self, update):
        if not self.has:
            raise EngineError(f"{self.name} cannot serve version 4")
        return Source(f"{self.name}:1", (0, 1))


async def deliver(*replicas):
    """Pool after a delivery to all."""
    pool = ReplicaPool(replicas)
    await Deliveries(pool, timeout_s=0.2).deliver(UPDATE, list(pool.live))
    return pool


def names(pool):
    return [member.name for member in pool.live_or_none]


async def test_one_replica_of_each_node_takes_a_seat():
    replicas = [Replica("r0", "a"), Replica("r1", "a"), Replica("r2", "b")]
    pool = await deliver(*replicas)
    seats = [seat for replica in replicas for seat in replica.seats]
    assert sorted(seat.index for seat in seats) == [0, 1]
    assert {replace(seat, index=0) for seat in seats} == {replace(seats[0], index=0)}
    assert (seats[0].size, seats[0].sources) == (2, TRAINER)
    assert len(replicas[2].seats) == 1 and len(pool.live) == 3


@pytest.mark.parametrize(
    ("replicas", "left", "seats"),
    [
        ([("lost", "a", "die"), ("other", "b", "fail")], ["other"], [1, 2]),
        ([("lost", "a", "hang"), ("other", "b", "fail")], ["other"], [1, 2]),
        ([("r0", "a"), ("r1", "a", "die")], ["r0"], [1, 1]),
        ([("broken", "a", "fail", "fail", "fail"), ("good", "b")], ["good"], [3, 1]),
        ([("r0", "a", "die")], [], [1]),
    ],
    ids=["a node dies", "a node hangs", "another one of the node", "a node that cannot receive", "no node is left"],
)
async def test_nodes_that_failed_form_a_new_group_without_lost_replicas(replicas, left, seats):
    replicas = [Replica(*each) for each in replicas]
    pool = await deliver(*replicas)
    assert names(pool) == left and [len(replica.seats) for replica in replicas] == seats
    for replica in replicas:
        assert len({seat.delivery for seat in replica.seats}) == len(replica.seats)
        assert [seat.size for seat in replica.seats[1:]] == [1] * (len(replica.seats) - 1)
    assert pool.lost.get("broken", "") in ("", "broken: bucket 1 did not come from trainer:1")


async def test_a_lost_replica_ends_the_delivery_for_the_nodes_that_wait_for_it(tmp_path):
    server = VersionServer("127.0.0.1", tmp_path)
    lost, other = Replica("lost", "a", "die"), Replica("other", "b", "wait")
    pool = ReplicaPool([lost, other])
    update = replace(UPDATE, sources=(Source(server.address, (0, 1)),))
    await Deliveries(pool, timeout_s=60.0).deliver(update, list(pool.live))
    server.close()
    assert names(pool) == ["other"] and [seat.size for seat in other.seats] == [2, 1]


async def test_a_version_that_reaches_no_node_is_an_error_of_the_trainer_and_no_replica_is_lost():
    replicas = [Replica(f"r{i}", f"node-{i}", "fail", "fail") for i in range(2)]
    pool = ReplicaPool(replicas)
    with pytest.raises(DeliveryError, match="bucket 1 did not come from trainer:1"):
        await Deliveries(pool, timeout_s=0.2).deliver(UPDATE, list(pool.live))
    assert names(pool) == ["r0", "r1"]


@pytest.mark.parametrize(
    ("others", "outcomes", "sources"),
    [
        ([("r0", "a", False), ("r1", "b", True)], [], (Source("r1:1", (0, 1)),)),
        ([("r0", "a", True)], ["fail"], TRAINER),
        ([("r0", "a", False)], [], TRAINER),
    ],
    ids=["from another one", "after another one failed", "if no other one can send"],
)
async def test_a_late_replica_receives_from_another_one_or_else_from_the_trainer(others, outcomes, sources):
    late = Replica("late", "c", *outcomes)
    pool = ReplicaPool([Replica(name, node, has=has) for name, node, has in others])
    await Deliveries(pool, timeout_s=0.2).bring_to(late, UPDATE)
    assert len(late.seats) == 1 + len(outcomes)
    assert (late.seats[-1].index, late.seats[-1].size, late.seats[-1].sources) == (0, 1, sources)


async def test_a_late_replica_that_nobody_can_send_to_gets_the_error():
    pool = ReplicaPool([Replica("r0", "a", has=False)])
    with pytest.raises(DeliveryError):
        await Deliveries(pool, timeout_s=0.2).bring_to(Replica("late", "c", "fail"), UPDATE)
