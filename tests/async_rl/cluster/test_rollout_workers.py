"""The driver's side of rollout workers that do not answer."""

import asyncio

import pytest
from ray.exceptions import RayActorError

from async_rl.cluster import rollout_workers
from async_rl.cluster.rollout_workers import WorkerHandle
from async_rl.inference.pool import ReplicaFleet
from async_rl.rollout.dispatcher import Dispatcher, WorkerLostError
from tests.helpers.fakes import FakeEngine, SeededScript

SCRIPT = SeededScript(0, vocab_size=40, stop_token=1, mean_length=8)
FOR_EVER_S = 1e6  # longer than any test runs


class FakeActor:
    """Keeps the names of its calls. blocked: it answers none until it is killed."""

    def __init__(self, *, blocked):
        self.blocked, self.killed, self.calls, self.answers = blocked, False, [], []

    def kill(self):
        self.killed = True
        for answer in self.answers:
            if not answer.done():
                answer.set_exception(RayActorError())

    def __getattr__(self, method):
        return FakeMethod(self, method)


class FakeMethod:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *_args):
        self.actor.calls.append(self.name)
        answer = asyncio.get_running_loop().create_future()
        self.actor.answers.append(answer)
        if self.actor.killed:
            answer.set_exception(RayActorError())
        elif not self.actor.blocked:
            answer.set_result(None)
        return answer


@pytest.fixture
def workers(monkeypatch):
    """A worker that is blocked in user code and one that answers, by name."""
    monkeypatch.setattr(rollout_workers.ray, "kill", FakeActor.kill)
    actors = {"worker-0": FakeActor(blocked=True), "worker-1": FakeActor(blocked=False)}
    return {
        name: (actor, WorkerHandle(actor, name=name, timeout_s=FOR_EVER_S, stop_timeout_s=0.01))
        for name, actor in actors.items()
    }


async def test_a_blocked_worker_holds_up_a_stop_for_the_time_limit_of_a_stop(workers):
    (blocked, handle), (free, other) = workers.values()
    dispatcher = Dispatcher([handle, other], fleet=ReplicaFleet([FakeEngine(SCRIPT)]))
    async with asyncio.timeout(30):
        await dispatcher.flush()
        await dispatcher.end()
        for worker in (handle, other):
            await worker.close(timeout_s=FOR_EVER_S)
    assert blocked.calls == ["flush", "pid"] and blocked.killed
    assert free.calls == ["flush", "end", "end", "pid"] and free.killed


@pytest.mark.parametrize("call", [WorkerHandle.end, WorkerHandle.flush])
async def test_a_blocked_worker_is_lost_at_a_stop_and_killed_without_another_wait(workers, call):
    blocked, handle = workers["worker-0"]
    async with asyncio.timeout(30):
        with pytest.raises(WorkerLostError, match="worker-0"):
            await call(handle)
        await handle.close(timeout_s=FOR_EVER_S)
    assert blocked.calls == [call.__name__, "pid"] and blocked.killed


async def test_closing_a_blocked_worker_kills_it(workers):
    blocked, handle = workers["worker-0"]
    async with asyncio.timeout(30):
        with pytest.raises(WorkerLostError):
            await handle.close(timeout_s=FOR_EVER_S)
    assert blocked.calls == ["end", "pid"] and blocked.killed
