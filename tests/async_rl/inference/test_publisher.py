"""Calls of a publish on replicas, their order, and failures."""

import asyncio
import contextlib
import dataclasses
import functools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.tools.tool import PauseGate
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.replica import DeliveryError
from async_rl.inference.stub import InProcess
from async_rl.simulator.virtual_time import run_in_virtual_time
from async_rl.weights.transport import Source, WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError
from message_queue.tokens import WeightVersion
from tests.helpers.fakes.rollouts import RolloutsHere

pytestmark = pytest.mark.virtual_time

UPDATE = WeightUpdate(path=Path("weights-1.safetensors"), weights=WeightVersion(1, "d1"))


class ScriptedReplica(InProcess):
    """Keeps the names of its calls; `holds` is its checksum after a load.

    fails: an error that the call `at` raises. may_go_on: an event; the call `at` sets `reached` and waits for it.
    """

    hangs_at = dies_at = at = fails = may_go_on = None

    def __init__(self, name="replica-0", *, loads=UPDATE.weights, holds="c1", **script):
        self.name = self.node = name
        self.calls, self.kv, self.reached = [], None, asyncio.Event()
        self.results = {"load": loads, "abort": 3, "freeze": 5, "checksum": holds}
        vars(self).update(script)

    def __getattr__(self, name):
        return functools.partial(self.called, name)

    async def fetch(self, update, seat=None):
        """Not among the calls: it does nothing where the trainer's files are."""
        if "fetch" in (self.hangs_at, self.dies_at):
            await self.called("fetch")

    async def called(self, name, *_args, kv=None):
        self.calls.append(name)
        self.kv = kv or self.kv
        if name == self.dies_at:
            raise ReplicaLostError(f"{self.name}: process died during {name}")
        if name == self.hangs_at:
            await asyncio.Event().wait()
        if name == self.at and self.fails is not None:
            raise self.fails
        if name == self.at and self.may_go_on is not None:
            self.reached.set()
            await self.may_go_on.wait()
        return self.results.get(name)


def make_publisher(replicas, *, on_update="resume", tools=None, timeout_s=1.0, rollouts=None, **options):
    pool = replicas if isinstance(replicas, ReplicaPool) else ReplicaPool(replicas)
    rollouts = rollouts or RolloutsHere(tools)
    return Publisher(pool, on_update=on_update, rollouts=rollouts, timeout_s=timeout_s, **options)


def live(pool):
    return [member.name for member in pool.live]


@pytest.mark.parametrize(
    ("on_update", "kv", "call", "counts", "kv_given"),
    [
        ("resume", "keep", "abort", (6, 0), "recompute"),
        ("drain", "keep", "drain", (0, 0), "recompute"),
        ("keep", "keep", "freeze", (0, 10), "keep"),
        ("keep", "recompute", "freeze", (0, 10), "recompute"),
    ],
)
async def test_publish_interrupts_between_pause_and_load(on_update, kv, call, counts, kv_given):
    replicas = [ScriptedReplica(f"replica-{i}") for i in range(2)]
    report = await make_publisher(replicas, on_update=on_update, kv=kv).publish(UPDATE)
    assert [r.calls for r in replicas] == [["pause", call, "load", "checksum", "resume"]] * 2
    assert (report.aborted, report.frozen) == counts
    assert replicas[0].kv == kv_given, "only a frozen request keeps its cache"


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("at", ["fetch", "stage", "pause", "load", "resume"])
@pytest.mark.parametrize("how", ["dies_at", "hangs_at"])
async def test_replica_that_fails_in_a_publish_leaves_and_the_others_load(on_update, at, how):
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", **{how: at})
    notes = []
    pool = ReplicaPool([bad, good], on_lost=notes.append)
    publisher = make_publisher(pool, on_update=on_update, timeout_s=0.05, staged=at in ("fetch", "stage"))
    report = await publisher.publish(UPDATE)
    assert good.calls[-3:] == ["load", "checksum", "resume"] and bad.calls[-1] == at
    assert live(pool) == ["good"]
    assert report.pause_seconds < report.seconds
    (note,) = notes
    assert "bad" in note and ("died" if how == "dies_at" else "sync.timeout_s") in note
    await make_publisher(pool).publish(UPDATE)
    assert bad.calls.count("pause") == (at not in ("fetch", "stage"))


async def test_failure_that_the_router_sees_first_ends_the_publish_of_that_replica():
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", hangs_at="load")
    pool = ReplicaPool([bad, good])
    publish = asyncio.create_task(make_publisher(pool, timeout_s=60).publish(UPDATE))
    await asyncio.sleep(0.01)
    pool.lose(pool.live[0], reason="died in a decode")
    await asyncio.wait_for(publish, 1)
    assert good.calls[-1] == "resume"


async def test_publish_that_loses_all_replicas_names_each_with_its_reason():
    replicas = [ScriptedReplica("a", hangs_at="load"), ScriptedReplica("b", dies_at="abort")]
    with pytest.raises(ReplicaLostError, match=r"a: a .*sync\.timeout_s") as caught:
        await make_publisher(replicas, timeout_s=0.01).publish(UPDATE)
    assert "b: b: process died during abort" in str(caught.value)


UNDELIVERED = DeliveryError("bucket 1 of weights-1 did not come from trainer:1")


@pytest.mark.parametrize(
    ("at", "wrong", "reason"),
    [
        ("load", {"loads": WeightVersion(1, "other")}, ["other", "d1"]),
        *((at, {"at": at, "fails": EngineError("it was refused")}, ["it was refused"]) for at in ("stage", "load")),
        *((at, {"at": at, "fails": UNDELIVERED}, ["did not come from trainer:1"]) for at in ("stage", "load")),
    ],
)
@pytest.mark.parametrize("rolling", [False, True])
async def test_replica_that_alone_did_not_load_the_version_serves_nothing_and_leaves(rolling, at, wrong, reason):
    bad, good = ScriptedReplica("bad", **wrong), ScriptedReplica("good")
    pool = ReplicaPool([bad, good])
    await make_publisher(pool, staged=at == "stage", max_paused=1 if rolling else None).publish(UPDATE)
    assert bad.calls[-1] == at and good.calls[-1] == "resume"
    assert live(pool) == ["good"]
    assert all(text in pool.lost["bad"] for text in reason)


@pytest.mark.parametrize("at", ["stage", "load"])
async def test_publish_that_all_replicas_refuse_ends_with_the_refusal_of_the_last(at):
    refusals = {name: EngineError(f"{name} refused") for name in "ab"}
    pool = ReplicaPool([ScriptedReplica(name, at=at, fails=error) for name, error in refusals.items()])
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="b refused")):
        await make_publisher(pool, staged=True).publish(UPDATE)
    assert pool.lost == {"a": "a refused"}


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_staged_publish_pauses_no_replica_and_no_tool_before_all_have_staged(on_update):
    tools, go_on = PauseGate(), asyncio.Event()
    replicas = [ScriptedReplica("fast"), slow := ScriptedReplica("slow", at="stage", may_go_on=go_on)]
    publisher = make_publisher(replicas, on_update=on_update, tools=tools, staged=True)
    publish = asyncio.create_task(publisher.publish(UPDATE))
    await slow.reached.wait()
    await asyncio.sleep(0.01)
    assert [r.calls for r in replicas] == [["stage"], ["stage"]]
    await asyncio.wait_for(tools.passed(), 1)  # open
    go_on.set()
    report = await publish
    assert all(r.calls[:2] == ["stage", "pause"] and r.calls[-1] == "resume" for r in replicas)
    assert report.pause_seconds < report.seconds


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("hangs_at", [None, "load"])
async def test_publish_lets_no_tool_start_until_replicas_resumed(hangs_at, on_update):
    tools, passed_at = PauseGate(), []

    class Watching(ScriptedReplica):
        async def called(self, name, *args, **options):
            passed_at.append(tools._open.is_set())
            return await super().called(name, *args, **options)

    publisher = make_publisher([Watching(hangs_at=hangs_at)], on_update=on_update, tools=tools, timeout_s=0.05)
    with pytest.raises(ReplicaLostError) if hangs_at else contextlib.nullcontext():
        await publisher.publish(UPDATE)
    assert passed_at and not any(passed_at)
    await asyncio.wait_for(tools.passed(), 1)


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("at", ["pause", "load", "resume"])
async def test_publish_that_is_cancelled_leaves_no_replica_half_loaded(on_update, at):
    tools, go_on = PauseGate(), asyncio.Event()
    replica = ScriptedReplica(at=at, may_go_on=go_on)
    publisher = make_publisher([replica], on_update=on_update, tools=tools)
    publish = asyncio.create_task(publisher.publish(UPDATE))
    await replica.reached.wait()
    publish.cancel()
    resuming = asyncio.create_task(publisher.resume())
    await asyncio.sleep(0.01)
    assert not publish.done() and not resuming.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publish
    await resuming
    assert replica.calls[-4:] == ["load", "checksum", "resume", "resume"]
    await asyncio.wait_for(tools.passed(), 1)


async def test_publish_that_is_cancelled_waits_no_longer_than_a_publish_may():
    publish = asyncio.create_task(make_publisher([ScriptedReplica(hangs_at="load")], timeout_s=0.05).publish(UPDATE))
    await asyncio.sleep(0.01)
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(publish, 1)


async def test_replicas_that_hold_different_parameters_stop_the_publish():
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", holds="c2")
    with pytest.raises(ExceptionGroup) as caught:
        await make_publisher([good, bad]).publish(UPDATE)
    (error,) = caught.value.exceptions
    assert isinstance(error, EngineError) and "resume" not in bad.calls
    assert all(text in str(error) for text in ("good", "bad", "version 1", "c1", "c2"))


async def test_new_replica_that_holds_other_parameters_is_not_brought_up():
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", holds="c2")
    pool = ReplicaPool([good])
    publisher = make_publisher(pool)
    await publisher.publish(UPDATE)
    with pytest.raises(EngineError):
        await publisher.bring_up(bad, slot=0)
    assert live(pool) == ["good"]
    good.results["checksum"] = "c2"
    await publisher.publish(UPDATE)  # replicas are compared within one version only


async def test_version_that_was_published_with_other_weights_reaches_no_replica():
    replica = ScriptedReplica()
    publisher = make_publisher([replica])
    await publisher.publish(UPDATE)
    calls = list(replica.calls)
    for weights in (WeightVersion(1, "other"), WeightVersion(0, "d1")):
        with pytest.raises(ValueError, match="version"):
            await publisher.publish(dataclasses.replace(UPDATE, weights=weights))
    assert replica.calls == calls


@pytest.mark.parametrize("how", ["dies_at", "hangs_at"])
async def test_new_replica_that_does_not_get_the_version_is_not_brought_up(how):
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", **{how: "fetch"})
    pool = ReplicaPool([good])
    publisher = make_publisher(pool, timeout_s=0.05)
    await publisher.publish(UPDATE)
    with pytest.raises(ReplicaLostError, match="bad"):
        await publisher.bring_up(bad, slot=0)
    assert bad.calls == ["fetch"] and live(pool) == ["good"]


class TimedReplica(ScriptedReplica):
    """Each call takes `turns` iterations of the event loop; it dies or hangs at one.

    paused: names of all that are paused. most: numbers of them after each pause.
    """

    async def called(self, name, *args, **options):
        if name == "pause":
            self.paused.add(self.name)
            self.most.append(len(self.paused))
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
            result = await super().called(name, *args, **options)
        except BaseException:
            self.paused.discard(self.name)  # it left the pool
            raise
        if name == "resume":
            self.paused.discard(self.name)
        return result


def timed_replicas(chance, count, *, failing):
    calls, shared = ("pause", "abort", "load", "checksum", "resume"), {"paused": set(), "most": []}
    made = [TimedReplica(f"replica-{i}", turns=chance.randrange(1, 4), **shared) for i in range(count)]
    for replica in made:
        if chance.random() < failing:
            setattr(replica, chance.choice(("dies_at", "hangs_at")), chance.choice(calls))
    return made


def check_published(pool, replicas):
    """Every replica that is left loaded once, and every other one was tried once at most."""
    live = {member.name for member in pool.live}
    for replica in replicas:
        assert replica.calls.count("pause") <= 1
        if replica.name in live:
            assert replica.calls[-3:] == ["load", "checksum", "resume"]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), count=st.integers(2, 12), data=st.data())
def test_rolling_publish_never_pauses_more_than_it_may(seed, count, data):
    max_paused, chance = data.draw(st.integers(1, count)), random.Random(seed)

    async def run():
        replicas = timed_replicas(chance, count, failing=0.2)
        replicas[chance.randrange(count)].dies_at = None
        pool, rollouts = ReplicaPool(replicas), RolloutsHere()
        publisher = make_publisher(pool, rollouts=rollouts, max_paused=max_paused, timeout_s=5)
        publish = asyncio.create_task(publisher.publish(UPDATE))
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        if len(pool.live) > 1 and chance.random() < 0.5:
            pool.lose(chance.choice(pool.live), reason="died in a decode")
        with contextlib.suppress(ReplicaLostError):
            await publish
            check_published(pool, replicas)
        assert rollouts.avoided == frozenset()
        assert max(replicas[0].most, default=0) <= max_paused

    run_in_virtual_time(run())  # a replica that does not hang is never late


@pytest.mark.parametrize("max_paused", [1, 64, 512])
async def test_rolling_publish_of_1024_replicas_keeps_the_others_serving(max_paused):
    replicas = timed_replicas(random.Random(max_paused), 1024, failing=0.0)
    pool = ReplicaPool(replicas)
    await make_publisher(pool, max_paused=max_paused, timeout_s=60).publish(UPDATE)
    assert len(pool.live) == 1024
    check_published(pool, replicas)
    assert max(replicas[0].most) == max_paused, "and no fewer, so that a publish takes no longer than it must"


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_rolling_publish_moves_requests_before_a_pause_and_lets_tools_start(on_update):
    rollouts, noted = RolloutsHere(), []

    class Watching(ScriptedReplica):
        async def called(self, name, *args, **options):
            noted.append((rollouts.avoided, rollouts.gate._open.is_set()))
            assert self.name in rollouts.avoided
            return await super().called(name, *args, **options)

    replicas = [Watching(f"replica-{i}") for i in range(3)]
    await make_publisher(replicas, on_update=on_update, rollouts=rollouts, max_paused=1).publish(UPDATE)
    assert all(len(avoided) == 1 and tools for avoided, tools in noted)
    assert len(noted) == 15 and rollouts.avoided == frozenset()


async def test_rolling_publish_touches_no_replica_after_a_wrong_one():
    replicas = [ScriptedReplica("a"), ScriptedReplica("b", holds="c2"), ScriptedReplica("c")]
    rollouts = RolloutsHere()
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="b has .*c2")):
        await make_publisher(replicas, rollouts=rollouts, max_paused=1).publish(UPDATE)
    assert replicas[1].calls[-1] == "checksum" and not replicas[2].calls
    assert rollouts.avoided == frozenset()


async def test_rolling_publish_that_is_cancelled_finishes_the_paused_replicas_only():
    go_on = asyncio.Event()
    replicas = [ScriptedReplica(name, at="load", may_go_on=go_on) for name in "abc"]
    publish = asyncio.create_task(make_publisher(replicas, max_paused=1).publish(UPDATE))
    await replicas[0].reached.wait()
    publish.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert replicas[0].calls[-1] == "resume" and not replicas[1].calls and not replicas[2].calls


async def test_time_limit_of_a_rolling_publish_holds_for_each_replica():
    class Slow(ScriptedReplica):
        async def called(self, name, *args, **options):
            await asyncio.sleep(0.04 if name == "load" else 0)
            return await super().called(name, *args, **options)

    pool = ReplicaPool([Slow(f"replica-{i}") for i in range(4)])
    await make_publisher(pool, max_paused=1, timeout_s=0.1).publish(UPDATE)
    assert len(pool.live) == 4


class Receiving(ScriptedReplica):
    """Keeps the sources of its deliveries; serves the version that it has."""

    async def fetch(self, update, seat=None):
        if seat is not None:
            self.calls.append(("receive", seat.sources))

    async def offer(self, update):
        return Source(self.name, (0,))


async def test_broadcast_version_is_received_before_any_pause_and_by_a_late_replica_from_another_one():
    update = dataclasses.replace(UPDATE, sources=(Source("trainer", (0,)),))
    replicas, late = [Receiving("a"), Receiving("b")], Receiving("late")
    publisher = make_publisher(ReplicaPool(replicas))
    await publisher.publish(update)
    assert all(replica.calls[:2] == [("receive", update.sources), "pause"] for replica in replicas)
    await publisher.bring_up(late, slot=0)
    assert late.calls[:2] == [("receive", (Source("a", (0,)),)), "pause"]


@pytest.mark.parametrize("at", ["stage", "load"])
@pytest.mark.parametrize("max_paused", [None, 1])
async def test_replicas_that_all_missed_a_bucket_stay_and_load_the_next_version(at, max_paused):
    """The fault is the trainer's. After a failed load a replica waits; if only its staging failed, it serves."""
    replicas = [ScriptedReplica(name, at=at, fails=UNDELIVERED) for name in "ab"]
    pool = ReplicaPool(replicas)
    publisher = make_publisher(pool, staged=at == "stage", max_paused=max_paused)
    for is_delivered in (False, True):
        with contextlib.nullcontext() if is_delivered else pytest.raises(DeliveryError, match="bucket 1"):
            await publisher.publish(UPDATE)
        await publisher.abort_all()
        await publisher.resume()
        assert live(pool) == ["a", "b"]
        assert [replica.calls[-1] == "resume" for replica in replicas] == [is_delivered or at == "stage"] * 2
        for replica in replicas:
            replica.fails = None
