"""What a publish does to replicas, in which order, and how it fails."""

import asyncio
from pathlib import Path

import pytest

from agent_loop.engine import EngineError
from agent_loop.tools import PauseGate
from async_rl.weights.publisher import Publisher
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import WeightVersion

UPDATE = WeightUpdate(path=Path("weights-1.safetensors"), weights=WeightVersion(1, "d1"))


class ScriptedReplica:
    def __init__(self, name="replica-0", *, loads=UPDATE.weights, hangs_at=None):
        self.name, self.calls, self._loads, self._hangs_at = name, [], loads, hangs_at

    async def _call(self, what):
        self.calls.append(what)
        if what == self._hangs_at:
            await asyncio.Event().wait()

    async def pause(self):
        await self._call("pause")

    async def abort(self):
        await self._call("abort")
        return 3

    async def drain(self):
        await self._call("drain")

    async def load(self, update):
        await self._call("load")
        return self._loads

    async def resume(self):
        await self._call("resume")


async def test_resume_aborts_between_pause_and_load():
    replicas = [ScriptedReplica(f"replica-{i}") for i in range(2)]
    report = await Publisher(replicas, on_update="resume", tools=PauseGate(), timeout_s=1).publish(UPDATE)
    assert [r.calls for r in replicas] == [["pause", "abort", "load", "resume"]] * 2
    assert report.aborted == 6


async def test_drain_aborts_nothing():
    replica = ScriptedReplica()
    report = await Publisher([replica], on_update="drain", tools=PauseGate(), timeout_s=1).publish(UPDATE)
    assert replica.calls == ["pause", "drain", "load", "resume"]
    assert report.aborted == 0


async def test_a_replica_that_hangs_is_named_with_the_field_that_bounds_it():
    with pytest.raises(ExceptionGroup) as caught:
        await Publisher(
            [ScriptedReplica(hangs_at="load")], on_update="resume", tools=PauseGate(), timeout_s=0.01
        ).publish(UPDATE)
    (error,) = caught.value.exceptions
    assert isinstance(error, EngineError)
    assert "replica-0" in str(error) and "sync.timeout_s=0.01" in str(error)


async def test_a_replica_that_loaded_other_weights_is_refused():
    wrong = ScriptedReplica(loads=WeightVersion(1, "other"))
    with pytest.raises(ExceptionGroup) as caught:
        await Publisher([wrong], on_update="resume", tools=PauseGate(), timeout_s=1).publish(UPDATE)
    assert "other" in str(caught.value.exceptions[0]) and "d1" in str(caught.value.exceptions[0])


@pytest.mark.parametrize("hangs_at", [None, "load"])
async def test_no_tool_starts_while_replicas_are_paused_and_all_may_again_afterwards(hangs_at):
    tools, passed_at = PauseGate(), []

    class Watching(ScriptedReplica):
        async def _call(self, what):
            passed_at.append((what, tools._open.is_set()))
            await super()._call(what)

    publisher = Publisher([Watching(hangs_at=hangs_at)], on_update="resume", tools=tools, timeout_s=0.05)
    if hangs_at:
        with pytest.raises(ExceptionGroup):
            await publisher.publish(UPDATE)
    else:
        await publisher.publish(UPDATE)
    assert not any(is_open for _, is_open in passed_at)
    await asyncio.wait_for(tools.passed(), 1)
