"""The life cycle of a replica over a backend without an engine."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_loop.engine import GenerateRequest
from async_rl.inference import gate
from async_rl.inference.checks import weight_label
from async_rl.inference.gate import until_finished
from async_rl.inference.loads import RankLoad
from async_rl.inference.replica import UNKNOWN_LABEL, DeliveryError, EngineReplica
from async_rl.inference.vllm.config import VllmConfig
from async_rl.weights.group import UNDELIVERED
from async_rl.weights.live import LiveWeights
from async_rl.weights.transport import Direct, Seat, Source, UpdateError, WeightUpdate
from message_queue.errors import AnswerError, ContractError, EngineError, ReplicaLostError
from message_queue.tokens import StopReason, WeightVersion
from tests.helpers.groups import segment

CONFIG = VllmConfig(device="cpu", load_timeout_s=5)
FIRST, SECOND = WeightVersion(0, "a"), WeightVersion(1, "b")
UPDATE = WeightUpdate(Path("none"), SECOND, buckets=(SECOND.digest,))


class ScriptedBackend:
    """An engine that decodes one token when `go` is set, and loads weights with the digest `loads`."""

    def __init__(self):
        self.calls, self.loads, self.fault, self.refused, self.hangs = [], SECOND.digest, None, None, False
        self.decoding, self.go = asyncio.Event(), asyncio.Event()

    def watch(self, on_death):
        self.die = on_death

    def check_request(self, request):
        if self.refused:
            raise self.refused

    async def decode(self, request, inflight, *, loaded):
        self.decoding.set()
        await self.go.wait()
        if self.fault:
            raise self.fault
        reason = StopReason.ABORT if inflight.abort_requested else StopReason.LENGTH
        return [replace(segment(1, stop_reason=reason), weights=loaded.current)]

    async def abort(self, requests):
        self.go.set()
        await until_finished(requests)

    async def freeze(self):
        self.calls.append("freeze")

    async def check_update(self, update, *, kv, in_flight):
        if self.refused:
            raise self.refused

    async def load(self, update, *, kv, requests):
        if self.hangs:
            await asyncio.Event().wait()
        if self.fault:
            raise self.fault
        return [RankLoad({0: self.loads}, "names", {}, {"w": (self.loads, [])})]

    async def stage(self, update):
        return [RankLoad({0: self.loads}, "names", {}, {"w": (self.loads, [])})]

    async def label(self, label):
        self.calls.append(label)

    async def resume(self):
        self.calls.append("resume")

    async def close(self):
        self.calls.append("close")

    async def engine_error(self, error, what):
        return EngineError(f"{what}: converted")


def started(**changes):
    live = LiveWeights(published={}, ranks=[{"w": (FIRST.digest, [])}])
    config = replace(CONFIG, **changes)
    return EngineReplica(ScriptedBackend(), config=config, name="r", weights=FIRST, live=live)


def ask(name="a"):
    return GenerateRequest(request_id=name, token_ids=np.zeros(3, np.int32), max_new_tokens=1)


async def in_flight(replica):
    task = asyncio.create_task(replica.generate(ask()))
    await replica.backend.decoding.wait()
    return task


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        ({"loads": "other"}, "other"),
        ({"fault": EngineError("no memory")}, "no memory"),
        ({"fault": OSError("no connection")}, "converted"),
        ({"hangs": True}, r"engine\.load_timeout_s"),
    ],
    ids=["digest", "engine", "client", "time"],
)
async def test_failed_load_labels_tokens_as_unknown_and_keeps_the_gate_closed(failure, named):
    replica = started(load_timeout_s=0.01 if "hangs" in failure else 5)
    before = await replica.checksum()
    await replica.pause()
    vars(replica.backend).update(failure)
    with pytest.raises(EngineError, match=named):
        await replica.load(UPDATE)
    assert replica.backend.calls == [UNKNOWN_LABEL]
    with pytest.raises(EngineError):
        await replica.resume()
    assert replica.weights == FIRST and await replica.checksum() == before
    vars(replica.backend).update(loads=SECOND.digest, fault=None, hangs=False)
    assert await replica.load(UPDATE) == replica.weights == SECOND
    await replica.resume()
    assert replica.backend.calls == [UNKNOWN_LABEL, weight_label(SECOND), "resume"]


async def test_a_version_that_is_not_staged_whole_leaves_the_replica_serving():
    replica = started()
    replica.backend.loads = "other"
    with pytest.raises(EngineError, match=r"r: version 1 .*bucket-00000.*other.*b was published"):
        await replica.stage(UPDATE)
    replica.backend.go.set()
    assert (await replica.generate(ask()))[0].weights == FIRST
    replica.backend.loads = SECOND.digest
    await replica.stage(UPDATE)


SOURCE = Source("node-0:7", (0, 1))


class OtherNode:
    """Another node of the engine. error: raised when it is to bring a version."""

    def __init__(self, error=None):
        self.error, self.seats, self.closed = error, [], False

    async def fetch(self, update, seat):
        self.seats.append(seat)
        if self.error is not None:
            raise self.error

    async def close(self):
        self.closed = True


def over_nodes(*others, **changes):
    """A replica with other nodes, whose own one brings versions."""
    replica = started(**changes)
    replica.store, replica.followers = Store(), others
    replica.store.let_go.set()
    return replica


class Store:
    """Brings no version: it waits, or raises `error`. Serves every version from `SOURCE`."""

    def __init__(self, error=None):
        self.error, self.waiting_for, self.let_go = error, "bucket 3 of weights-2", threading.Event()
        self.brought = []

    def bring(self, update, seat):
        self.brought.append(seat)
        if self.error is not None:
            raise self.error
        self.let_go.wait()

    def offer(self, update):
        return SOURCE

    def local(self, folder):
        return Path("here") / folder.name


DAMAGED = UpdateError("bucket-00003 is damaged")


@pytest.mark.parametrize(
    ("here", "there", "sources", "said"),
    [
        ("hangs", None, (), r"r: version 1: bucket 3 of weights-2 did not come within engine\.load_timeout_s=0\.01"),
        (DAMAGED, None, (), "r: version 1 did not come: bucket-00003 is damaged"),
        (OSError("no space left"), None, (), "r: version 1 did not come: no space left"),
        (None, DAMAGED, (), "r: version 1 did not come: bucket-00003 is damaged"),
        (None, DAMAGED, (SOURCE,), "r: version 1 did not come: bucket-00003 is damaged"),
    ],
)
async def test_version_that_does_not_come_loses_the_replica_and_names_the_bucket(here, there, sources, said):
    replica = over_nodes(OtherNode(), OtherNode(there), load_timeout_s=0.01 if here == "hangs" else 60)
    if here == "hangs":
        replica.store.let_go.clear()
    else:
        replica.store.error = here
    try:
        with pytest.raises(ReplicaLostError, match=said):
            await replica.fetch(replace(UPDATE, sources=sources))
    finally:
        replica.store.let_go.set()
    assert replica.weights == FIRST


async def test_nodes_of_a_replica_read_a_folder_each_and_get_a_broadcast_version_from_the_first_alone():
    replica = over_nodes(first := OtherNode(), second := OtherNode())
    await replica.fetch(UPDATE)
    assert [replica.store.brought.pop(), first.seats.pop(), second.seats.pop()] == [None] * 3, (
        "a folder is read by each"
    )
    trainer = Source("trainer:5", (0, 1))
    seat = Seat(delivery="d", index=1, size=2, sources=(trainer,), backend="nccl", timeout_s=1.0)
    update = replace(UPDATE, sources=(trainer,))
    await replica.fetch(update, seat)
    assert replica.store.brought == [seat] and not first.seats, "the delivery has a seat for the first one"
    await replica.fetch(update)
    assert replica.store.brought == [seat], "it is there"
    (one,), (other,) = first.seats, second.seats
    assert one.sources == other.sources == (SOURCE,)
    assert one.delivery != other.delivery and (one.size, one.index) == (other.size, other.index) == (1, 0)


async def test_replica_fails_with_a_node_and_closes_all():
    replica = over_nodes(first := OtherNode(), second := OtherNode())
    task = await in_flight(replica)
    replica.fail("node 1: engine process 7 died")
    with pytest.raises(ReplicaLostError, match="r: node 1: engine process 7 died"):
        await task
    replica.store = None
    await replica.close()
    assert first.closed and second.closed and replica.backend.calls == ["close"]


@pytest.mark.parametrize("sign", ["process", "request", "control"])
async def test_death_of_another_node_is_the_reason_when_the_own_engine_dies_with_it(sign):
    replica = over_nodes(OtherNode())
    task = await in_flight(replica)
    await replica.pause()
    if sign == "process":
        replica.backend.die("engine process 5 died")
        replica.backend.fault = EngineError("no connection")
    else:
        replica.backend.fault = ReplicaLostError("request a failed: EngineDeadError")
    if sign == "control":
        await replica.freeze()
        replica.backend.fault = OSError("no connection")
        replica.backend.engine_error = lambda error, what: asyncio.sleep(0, ReplicaLostError("dead"))
        task.cancel()
        task = asyncio.create_task(replica.load(UPDATE))
    replica.backend.go.set()
    await asyncio.sleep(0.05)
    assert not task.done()
    replica.fail("node 1: engine process 7 died")
    with pytest.raises(ReplicaLostError, match="r: node 1: engine process 7 died"):
        await task


@pytest.mark.parametrize(
    ("error", "death", "notice_s"),
    [
        (EngineError("refused"), "", 0.0),
        (ReplicaLostError("dead"), "", 0.1),
        (EngineError("no connection"), "engine process 5 died", 0.1),
    ],
)
async def test_only_a_death_waits_for_reports_of_other_nodes(monkeypatch, error, death, notice_s):
    monkeypatch.setattr(gate, "NODE_NOTICE_S", notice_s or 30.0)
    replica = over_nodes(OtherNode())
    task = await in_flight(replica)
    start = asyncio.get_running_loop().time()
    if death:
        replica.backend.die(death)
    replica.backend.fault = error
    replica.backend.go.set()
    with pytest.raises(ReplicaLostError if notice_s else EngineError, match=death or str(error)):
        await task
    assert notice_s <= asyncio.get_running_loop().time() - start < 10


async def test_engine_reads_the_version_that_the_node_has():
    replica = started()
    replica.store, seen = Store(), []
    replica.backend.check_update = lambda update, **_: asyncio.sleep(0, seen.append(update.path))
    await replica.pause()
    await replica.load(UPDATE)
    assert seen == [Path("here") / UPDATE.path.name]


@pytest.mark.parametrize("call", ["check", "load"])
async def test_a_bucket_that_did_not_come_is_no_fault_of_the_engine_and_the_next_load_resumes(call):
    """`test_direct` has the errors of the ranks."""
    replica = started()
    update = replace(UPDATE, direct=Direct((SOURCE,), "gloo"))
    error = ContractError if call == "check" else EngineError
    fault = error(f"rank 0: RuntimeError: bucket 1 of weights-2 {UNDELIVERED} trainer:5: closed")
    await replica.pause()
    setattr(replica.backend, "refused" if call == "check" else "fault", fault)
    with pytest.raises(DeliveryError, match="bucket 1 of weights-2"):
        await replica.load(update)
    replica.backend.fault = error("a rank ended its load") if call == "load" else None
    replica.backend.refused = None if call == "load" else error("lacks tensors")
    with pytest.raises(EngineError) as caught:
        await replica.load(update)
    assert not isinstance(caught.value, DeliveryError)
    replica.backend.fault = replica.backend.refused = None
    await replica.load(update)
    await replica.resume()


async def test_refused_update_leaves_the_weights_verified():
    replica = started()
    await replica.pause()
    replica.backend.refused = ContractError("lacks tensors")
    with pytest.raises(EngineError, match="lacks tensors"):
        await replica.load(UPDATE)
    await replica.resume()
    assert replica.backend.calls == ["resume"]


async def test_abort_after_a_load_ends_a_frozen_request():
    replica = started()
    task = await in_flight(replica)
    await replica.pause()
    assert await replica.freeze() == 1
    await replica.load(UPDATE, kv="keep")
    assert await replica.abort() == 1
    [segment] = await task
    assert segment.stop_reason is StopReason.ABORT


@pytest.mark.parametrize(
    ("where", "error", "kind"),
    [
        ("fault", ContractError("nan"), AnswerError),
        ("fault", EngineError("out of memory"), EngineError),
        ("refused", ContractError("GenerateRequest.existing_rows"), EngineError),
    ],
    ids=["bad answer", "engine error", "bad request"],
)
async def test_generate_raises_answer_error_for_a_bad_answer_alone(where, error, kind):
    replica = started()
    setattr(replica.backend, where, error)
    replica.backend.go.set()
    with pytest.raises(EngineError) as caught:
        await replica.generate(ask())
    assert type(caught.value) is kind
    assert replica.backend.decoding.is_set() == (where == "fault")
    assert (await replica.stats()).in_flight == 0


@pytest.mark.parametrize("error", [None, EngineError("connection")])
async def test_death_of_the_engine_ends_every_call_with_its_reason(error):
    replica = started()
    running = await in_flight(replica)
    await replica.pause()
    waiting = asyncio.create_task(replica.generate(ask("b")))
    draining = asyncio.create_task(replica.drain())
    await asyncio.sleep(0)
    if error is not None:
        replica.backend.fault = error
        replica.backend.go.set()
    replica.backend.die("process 7 died")
    for call in (running, waiting, draining, replica.abort(), replica.load(UPDATE), replica.resume()):
        with pytest.raises(ReplicaLostError, match="process 7"):
            await call


async def test_close_stops_the_engine_once():
    replica = started()
    running = await in_flight(replica)
    for _ in range(2):
        await replica.close()
    assert replica.backend.calls == ["close"]
    with pytest.raises(ReplicaLostError):
        await running
