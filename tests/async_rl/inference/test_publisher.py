"""What a publish does to replicas, in which order, and how it fails."""

import asyncio
from pathlib import Path

import pytest

from agent_loop.engine import EngineError, ReplicaLostError
from agent_loop.tools import PauseGate
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import WeightVersion
from tests.helpers.fakes.rollouts import RolloutsHere

UPDATE = WeightUpdate(path=Path("weights-1.safetensors"), weights=WeightVersion(1, "d1"))


class ScriptedReplica:
    def __init__(self, name="replica-0", *, loads=UPDATE.weights, hangs_at=None, dies_at=None, holds=None):
        self.name, self.calls, self.holds = name, [], holds
        self._loads, self._hangs_at, self._dies_at = loads, hangs_at, dies_at

    async def _call(self, what):
        self.calls.append(what)
        if what == self._dies_at:
            raise ReplicaLostError(f"{self.name}: process died during {what}")
        if what == self._hangs_at:
            await asyncio.Event().wait()

    async def pause(self):
        await self._call("pause")

    async def abort(self):
        await self._call("abort")
        return 3

    async def freeze(self):
        await self._call("freeze")
        return 5

    async def drain(self):
        await self._call("drain")

    async def load(self, update, *, kv="recompute"):
        await self._call("load")
        self.kv = kv
        return self._loads

    async def checksum(self):
        return self.holds or self._loads.digest

    async def resume(self):
        await self._call("resume")


def make_publisher(replicas, *, on_update="resume", tools=None, timeout_s=1.0, **options):
    return Publisher(replicas, on_update=on_update, rollouts=RolloutsHere(tools), timeout_s=timeout_s, **options)


async def test_resume_aborts_between_pause_and_load():
    replicas = [ScriptedReplica(f"replica-{i}") for i in range(2)]
    report = await make_publisher(replicas).publish(UPDATE)
    assert [r.calls for r in replicas] == [["pause", "abort", "load", "resume"]] * 2
    assert (report.aborted, report.frozen) == (6, 0)


async def test_drain_aborts_nothing():
    replica = ScriptedReplica()
    report = await make_publisher([replica], on_update="drain").publish(UPDATE)
    assert replica.calls == ["pause", "drain", "load", "resume"]
    assert (report.aborted, report.frozen) == (0, 0)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_keep_freezes_between_pause_and_load_and_says_what_becomes_of_the_cache(kv):
    replica = ScriptedReplica()
    report = await make_publisher([replica], on_update="keep", kv=kv).publish(UPDATE)
    assert replica.calls == ["pause", "freeze", "load", "resume"]
    assert (report.aborted, report.frozen, replica.kv) == (0, 5, kv)


@pytest.mark.parametrize("on_update", ["resume", "drain"])
async def test_where_nothing_is_frozen_no_cache_outlives_its_weights(on_update):
    replica = ScriptedReplica()
    await make_publisher([replica], on_update=on_update, kv="keep").publish(UPDATE)
    assert replica.kv == "recompute"


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("at", ["pause", "load", "resume"])
@pytest.mark.parametrize("how", ["dies_at", "hangs_at"])
async def test_a_replica_that_is_lost_in_a_publish_leaves_and_the_others_load(on_update, at, how):
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", **{how: at})
    notes = []
    pool = ReplicaPool([bad, good], on_lost=notes.append)
    report = await make_publisher(pool, on_update=on_update, timeout_s=0.05).publish(UPDATE)
    assert good.calls[-2:] == ["load", "resume"]
    assert [member.name for member in pool.live] == ["good"]
    assert report.pause_seconds < report.seconds
    (note,) = notes
    assert "bad" in note and ("died" in note if how == "dies_at" else "(sync.timeout_s) within 0.05 s" in note)
    await make_publisher(pool).publish(UPDATE)
    assert bad.calls.count("pause") == 1


async def test_a_loss_that_the_router_sees_first_ends_the_publish_of_that_replica():
    good, bad = ScriptedReplica("good"), ScriptedReplica("bad", hangs_at="load")
    pool = ReplicaPool([bad, good])
    publish = asyncio.create_task(make_publisher(pool, timeout_s=60).publish(UPDATE))
    await asyncio.sleep(0.01)
    pool.lose(pool.live[0], reason="died in a decode")
    await asyncio.wait_for(publish, 1)
    assert good.calls[-1] == "resume"


async def test_when_all_are_lost_in_a_publish_the_error_names_each_with_its_reason():
    replicas = [ScriptedReplica("a", hangs_at="load"), ScriptedReplica("b", dies_at="abort")]
    with pytest.raises(ReplicaLostError) as caught:
        await make_publisher(replicas, timeout_s=0.01).publish(UPDATE)
    assert "a: a did not load version 1 (sync.timeout_s) within 0.01 s" in str(caught.value)
    assert "b: b: process died during abort" in str(caught.value)


async def test_a_replica_that_loaded_other_weights_is_refused_and_serves_nothing():
    wrong = ScriptedReplica(loads=WeightVersion(1, "other"))
    with pytest.raises(ExceptionGroup) as caught:
        await make_publisher([wrong]).publish(UPDATE)
    assert isinstance(caught.value.exceptions[0], EngineError)
    assert "other" in str(caught.value.exceptions[0]) and "d1" in str(caught.value.exceptions[0])
    assert wrong.calls[-1] == "load"


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("hangs_at", [None, "load"])
async def test_no_tool_starts_while_replicas_are_paused_and_all_may_again_afterwards(hangs_at, on_update):
    tools, passed_at = PauseGate(), []

    class Watching(ScriptedReplica):
        async def _call(self, what):
            passed_at.append((what, tools._open.is_set()))
            await super()._call(what)

    publisher = make_publisher([Watching(hangs_at=hangs_at)], on_update=on_update, tools=tools, timeout_s=0.05)
    if hangs_at:
        with pytest.raises(ReplicaLostError):
            await publisher.publish(UPDATE)
    else:
        await publisher.publish(UPDATE)
    assert not any(is_open for _, is_open in passed_at)
    await asyncio.wait_for(tools.passed(), 1)


@pytest.mark.parametrize("on_update", ["resume", "keep", "drain"])
@pytest.mark.parametrize("at", ["pause", "load", "resume"])
async def test_a_publish_whose_caller_is_cancelled_ends_first_so_that_no_replica_is_left_half_loaded(on_update, at):
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedReplica):
        async def _call(self, what):
            await super()._call(what)
            if what == at and not reached.is_set():
                reached.set()
                await may_go_on.wait()

    replica, tools = Slow(), PauseGate()
    publisher = make_publisher([replica], on_update=on_update, tools=tools)
    publish = asyncio.create_task(publisher.publish(UPDATE))
    await reached.wait()
    publish.cancel()
    resuming = asyncio.create_task(publisher.resume())
    await asyncio.sleep(0.01)
    assert not publish.done() and not resuming.done()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publish
    await resuming
    assert replica.calls[-3:] == ["load", "resume", "resume"]
    await asyncio.wait_for(tools.passed(), 1)


async def test_a_publish_that_is_cancelled_waits_no_longer_than_a_publish_may():
    publish = asyncio.create_task(make_publisher([ScriptedReplica(hangs_at="load")], timeout_s=0.05).publish(UPDATE))
    await asyncio.sleep(0.01)
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(publish, 1)


async def test_replicas_that_hold_different_parameters_stop_the_publish():
    good, bad = ScriptedReplica("good", holds="c1"), ScriptedReplica("bad", holds="c2")
    with pytest.raises(EngineError) as caught:
        await make_publisher([good, bad]).publish(UPDATE)
    assert all(text in str(caught.value) for text in ("good", "bad", "version 1", "c1", "c2"))


async def test_a_new_replica_that_holds_other_parameters_is_not_brought_up():
    good, bad = ScriptedReplica("good", holds="c1"), ScriptedReplica("bad", holds="c2")
    pool = ReplicaPool([good])
    publisher = make_publisher(pool)
    await publisher.publish(UPDATE)
    with pytest.raises(EngineError):
        await publisher.bring_up(bad, slot=0)
    assert [member.name for member in pool.live] == ["good"]


async def test_replicas_are_compared_within_one_version_only():
    replica = ScriptedReplica("good", holds="c1")
    publisher = make_publisher([replica])
    await publisher.publish(UPDATE)
    replica.holds = "c2"
    await publisher.publish(UPDATE)
