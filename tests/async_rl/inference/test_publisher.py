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
    """Keeps the names of its calls; `holds` is its checksum after a load."""

    def __init__(self, name="replica-0", *, loads=UPDATE.weights, hangs_at=None, dies_at=None, holds="c1"):
        self.name = self.node = name
        self.calls, self.kv = [], None
        self.hangs_at, self.dies_at = hangs_at, dies_at
        self.results = {"load": loads, "abort": 3, "freeze": 5, "checksum": holds}

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
        return self.results.get(name)


def make_publisher(replicas, *, on_update="resume", tools=None, timeout_s=1.0, **options):
    return Publisher(replicas, on_update=on_update, rollouts=RolloutsHere(tools), timeout_s=timeout_s, **options)


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
@pytest.mark.parametrize("at", ["pause", "load", "resume"])
@pytest.mark.parametrize("how", ["dies_at", "hangs_at"])
async def test_replica_that_fails_in_a_publish_leaves_and_the_others_load(on_update, at, how):
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", **{how: at})
    notes = []
    pool = ReplicaPool([bad, good], on_lost=notes.append)
    report = await make_publisher(pool, on_update=on_update, timeout_s=0.05).publish(UPDATE)
    assert good.calls[-3:] == ["load", "checksum", "resume"]
    assert [member.name for member in pool.live] == ["good"]
    assert report.pause_seconds < report.seconds
    (note,) = notes
    assert "bad" in note and ("died" if how == "dies_at" else "sync.timeout_s") in note
    await make_publisher(pool).publish(UPDATE)
    assert bad.calls.count("pause") == 1


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


class Refusing(ScriptedReplica):
    """Refuses the version at `at`."""

    def __init__(self, name, at):
        super().__init__(name)
        self.at = at

    async def called(self, name, *args, **options):
        await super().called(name, *args, **options)
        if name == self.at:
            raise EngineError(f"{self.name} refused at {name}")
        return self.results.get(name)


@pytest.mark.parametrize("rolling", [False, True])
async def test_replica_that_loaded_other_weights_serves_nothing_and_leaves(rolling):
    wrong, good = ScriptedReplica("wrong", loads=WeightVersion(1, "other")), ScriptedReplica("good")
    pool = ReplicaPool([wrong, good])
    await make_publisher(pool, max_paused=1 if rolling else None).publish(UPDATE)
    assert wrong.calls[-1] == "load" and good.calls[-1] == "resume"
    assert [member.name for member in pool.live] == ["good"]
    assert all(text in pool.lost["wrong"] for text in ("other", "d1"))


@pytest.mark.parametrize("at", ["stage", "load"])
async def test_replica_that_refuses_a_version_leaves(at):
    refusing, good = Refusing("refusing", at), ScriptedReplica("good")
    pool = ReplicaPool([refusing, good])
    await make_publisher(pool, staged=True).publish(UPDATE)
    assert refusing.calls[-1] == at and good.calls[-1] == "resume"
    assert pool.lost == {"refusing": f"refusing refused at {at}"}


@pytest.mark.parametrize("at", ["stage", "load"])
async def test_publish_that_all_replicas_refuse_ends_with_the_refusal_of_the_last(at):
    pool = ReplicaPool([Refusing("a", at), Refusing("b", at)])
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match=f"b refused at {at}")):
        await make_publisher(pool, staged=True).publish(UPDATE)
    assert pool.lost == {"a": f"a refused at {at}"}


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_staged_publish_pauses_no_replica_and_no_tool_before_all_have_staged(on_update):
    tools, slow = PauseGate(), asyncio.Event()

    class Slow(ScriptedReplica):
        async def stage(self, update):
            self.calls.append("stage")
            await slow.wait()

    replicas = [ScriptedReplica("fast"), Slow("slow")]
    publish = asyncio.create_task(
        make_publisher(replicas, on_update=on_update, tools=tools, staged=True).publish(UPDATE)
    )
    for _ in range(20):
        await asyncio.sleep(0)
    assert [r.calls for r in replicas] == [["stage"], ["stage"]]
    await asyncio.wait_for(tools.passed(), 1)  # open
    slow.set()
    report = await publish
    assert all(r.calls[:2] == ["stage", "pause"] and r.calls[-1] == "resume" for r in replicas)
    assert report.pause_seconds < report.seconds


@pytest.mark.parametrize("at", ["fetch", "stage"])
@pytest.mark.parametrize("how", ["dies_at", "hangs_at"])
async def test_replica_that_fails_before_its_pause_leaves_and_the_others_load(how, at):
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", **{how: at})
    notes = []
    pool = ReplicaPool([bad, good], on_lost=notes.append)
    await make_publisher(pool, staged=True, timeout_s=0.05).publish(UPDATE)
    assert [member.name for member in pool.live] == ["good"] and good.calls[-1] == "resume"
    assert bad.calls == [at]
    (note,) = notes
    assert "bad" in note and ("died" if how == "dies_at" else "did not stage version 1 (sync.timeout_s)") in note


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
    reached, may_continue = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedReplica):
        async def called(self, name, *args, **options):
            if name == at and not reached.is_set():
                reached.set()
                await may_continue.wait()
            return await super().called(name, *args, **options)

    replica, tools = Slow(), PauseGate()
    publisher = make_publisher([replica], on_update=on_update, tools=tools)
    publish = asyncio.create_task(publisher.publish(UPDATE))
    await reached.wait()
    publish.cancel()
    resuming = asyncio.create_task(publisher.resume())
    await asyncio.sleep(0.01)
    assert not publish.done() and not resuming.done()
    may_continue.set()
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
    assert [member.name for member in pool.live] == ["good"]
    good.results["checksum"] = "c2"
    await publisher.publish(UPDATE)  # replicas are compared within one version only


async def test_version_that_was_published_with_other_weights_reaches_no_replica():
    replica = ScriptedReplica()
    publisher = make_publisher([replica])
    await publisher.publish(UPDATE)
    calls = list(replica.calls)
    with pytest.raises(ValueError, match="version"):
        await publisher.publish(dataclasses.replace(UPDATE, weights=WeightVersion(1, "other")))
    assert replica.calls == calls


@pytest.mark.parametrize("how", ["dies_at", "hangs_at"])
async def test_new_replica_that_does_not_get_the_version_is_not_brought_up(how):
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", **{how: "fetch"})
    pool = ReplicaPool([good])
    publisher = make_publisher(pool, timeout_s=0.05)
    await publisher.publish(UPDATE)
    with pytest.raises(ReplicaLostError, match="bad"):
        await publisher.bring_up(bad, slot=0)
    assert bad.calls == ["fetch"] and [member.name for member in pool.live] == ["good"]


# ---- rolling


class Service:
    """Counts the replicas that are paused; `most` is the largest number at one time."""

    def __init__(self):
        self.paused, self.most = set(), 0

    def changed(self, name, *, paused):
        (self.paused.add if paused else self.paused.discard)(name)
        self.most = max(self.most, len(self.paused))


class TimedReplica(ScriptedReplica):
    """Each call takes `turns` iterations of the event loop; it dies or hangs at `fails_at`."""

    def __init__(self, name, *, service, turns=0, **options):
        super().__init__(name, **options)
        self._service, self._turns = service, turns

    async def called(self, name, *args, **options):
        if name == "pause":
            self._service.changed(self.name, paused=True)
        try:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            result = await super().called(name, *args, **options)
        except BaseException:
            self._service.changed(self.name, paused=False)  # it left the pool
            raise
        if name == "resume":
            self._service.changed(self.name, paused=False)
        return result


def timed_replicas(chance, count, service, *, failing):
    calls = ("pause", "abort", "load", "checksum", "resume")
    return [
        TimedReplica(
            f"replica-{i}",
            service=service,
            turns=chance.randrange(1, 4),
            **({chance.choice(("dies_at", "hangs_at")): chance.choice(calls)} if chance.random() < failing else {}),
        )
        for i in range(count)
    ]


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
    max_paused, chance, service = data.draw(st.integers(1, count)), random.Random(seed), Service()

    async def run():
        replicas = timed_replicas(chance, count, service, failing=0.2)
        replicas[chance.randrange(count)].dies_at = None
        pool, rollouts = ReplicaPool(replicas), RolloutsHere()
        publisher = Publisher(pool, on_update="resume", rollouts=rollouts, max_paused=max_paused, timeout_s=5)
        publish = asyncio.create_task(publisher.publish(UPDATE))
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        if len(pool.live) > 1 and chance.random() < 0.5:
            pool.lose(chance.choice(pool.live), reason="died in a decode")
        with contextlib.suppress(ReplicaLostError):
            await publish
            check_published(pool, replicas)
        assert rollouts.avoided == frozenset()

    run_in_virtual_time(run())  # a replica that does not hang is never late
    assert service.most <= max_paused


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 32), max_paused=st.sampled_from([1, 7, 64, 512]))
def test_rolling_publish_of_1024_replicas_keeps_the_others_serving(seed, max_paused):
    service = Service()

    async def run():
        replicas = timed_replicas(random.Random(seed), 1024, service, failing=0.0)
        pool = ReplicaPool(replicas)
        publisher = Publisher(pool, on_update="resume", rollouts=RolloutsHere(), max_paused=max_paused, timeout_s=60)
        await publisher.publish(UPDATE)
        assert len(pool.live) == 1024
        check_published(pool, replicas)

    asyncio.run(run())
    assert service.most == max_paused, "and no fewer, so that a publish takes no longer than it must"


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
async def test_rolling_publish_moves_requests_before_a_pause_and_lets_tools_start(on_update):
    rollouts, noted = RolloutsHere(), []

    class Watching(ScriptedReplica):
        async def called(self, name, *args, **options):
            noted.append((rollouts.avoided, rollouts.gate._open.is_set()))
            assert self.name in rollouts.avoided
            return await super().called(name, *args, **options)

    replicas = [Watching(f"replica-{i}") for i in range(3)]
    publisher = Publisher(replicas, on_update=on_update, rollouts=rollouts, max_paused=1, timeout_s=1)
    await publisher.publish(UPDATE)
    assert all(len(avoided) == 1 and tools for avoided, tools in noted)
    assert len(noted) == 15 and rollouts.avoided == frozenset()


async def test_rolling_publish_touches_no_replica_after_a_wrong_one():
    replicas = [ScriptedReplica("a"), ScriptedReplica("b", holds="c2"), ScriptedReplica("c")]
    rollouts = RolloutsHere()
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="b has .*c2")):
        await Publisher(replicas, on_update="resume", rollouts=rollouts, max_paused=1, timeout_s=1).publish(UPDATE)
    assert replicas[1].calls[-1] == "checksum" and not replicas[2].calls
    assert rollouts.avoided == frozenset()


async def test_rolling_publish_that_is_cancelled_finishes_the_paused_replicas_only():
    reached, may_continue = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedReplica):
        async def called(self, name, *args, **options):
            if name == "load":
                reached.set()
                await may_continue.wait()
            return await super().called(name, *args, **options)

    replicas = [Slow("a"), Slow("b")]
    publisher = make_publisher(replicas, max_paused=1)
    publish = asyncio.create_task(publisher.publish(UPDATE))
    await reached.wait()
    publish.cancel()
    await asyncio.sleep(0)
    may_continue.set()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert replicas[0].calls[-1] == "resume" and not replicas[1].calls


async def test_time_limit_of_a_rolling_publish_holds_for_each_replica():
    class Slow(ScriptedReplica):
        async def called(self, name, *args, **options):
            await asyncio.sleep(0.04 if name == "load" else 0)
            return await super().called(name, *args, **options)

    pool = ReplicaPool([Slow(f"replica-{i}") for i in range(4)])
    await make_publisher(pool, max_paused=1, timeout_s=0.1).publish(UPDATE)
    assert len(pool.live) == 4


# ---- broadcast


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


# ---- direct


class Undelivered(ScriptedReplica):
    """A bucket does not come to it in the first `fails` calls of `at`."""

    def __init__(self, name, *, at="load", fails=1):
        super().__init__(name)
        self.at, self.fails = at, fails

    async def called(self, name, *args, **options):
        if name == self.at and self.fails:
            self.fails -= 1
            self.calls.append(name)
            raise DeliveryError(f"{self.name}: bucket 1 of weights-1 did not come from trainer:1")
        return await super().called(name, *args, **options)


@pytest.mark.parametrize("at", ["stage", "load"])
async def test_a_replica_that_missed_a_bucket_leaves_if_another_one_got_it(at):
    pool = ReplicaPool([Undelivered("bad", at=at), ScriptedReplica("good")])
    await make_publisher(pool, staged=at == "stage").publish(UPDATE)
    assert [member.name for member in pool.live] == ["good"]
    assert "did not come from trainer:1" in pool.lost["bad"]


@pytest.mark.parametrize("at", ["stage", "load"])
@pytest.mark.parametrize("max_paused", [None, 1])
async def test_replicas_that_all_missed_a_bucket_stay_and_load_the_next_version(at, max_paused):
    """The fault is the trainer's. After a failed load a replica waits; if only its staging failed, it serves."""
    replicas = [Undelivered(name, at=at) for name in "ab"]
    pool = ReplicaPool(replicas)
    publisher = make_publisher(pool, staged=at == "stage", max_paused=max_paused)
    with pytest.raises(DeliveryError, match="a: bucket 1"):
        await publisher.publish(UPDATE)
    await publisher.abort_all()
    await publisher.resume()
    assert len(pool.live) == 2
    assert [replica.calls[-1] == "resume" for replica in replicas] == [at == "stage"] * 2
    await publisher.publish(dataclasses.replace(UPDATE))
    await publisher.abort_all()
    await publisher.resume()
    assert len(pool.live) == 2 and all(replica.calls[-1] == "resume" for replica in replicas)
