"""Handles and actors over real Ray: a replica with a fake engine, a blocked rollout worker, a rank that saves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import ray

from agent_loop.engine import GenerateRequest
from agent_loop.loop import Message, Prompt
from async_rl.cluster.placement import start_ray
from async_rl.cluster.replica import REFUSALS, ReplicaClient, ReplicaHost
from async_rl.cluster.trainer import TrainerActor
from async_rl.cluster.worker import WorkerClient
from async_rl.config import ClusterConfig
from async_rl.inference.replica import EngineReplica
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.rollout.worker import RolloutWorker
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import AnswerError, EngineError, ReplicaLostError
from message_queue.tokens import StopReason
from message_queue.trajectory import Admission
from tests.helpers.fakes import FakeEngine, fake_weights

pytestmark = [pytest.mark.filterwarnings("ignore")]


class ClosableEngine(FakeEngine):
    async def close(self) -> None:
        self.die("closed")


class FakeHost(ReplicaHost):
    """A replica whose engine is a fake."""

    async def start(self, *, token_s: float, line: str = "") -> None:  # type: ignore[override]
        engine = await asyncio.create_subprocess_exec("echo", line)
        await engine.wait()

        def fail(request: GenerateRequest) -> Exception | None:
            match request.request_id:
                case "bad.":
                    return AnswerError("fake-0: request bad.: nonsense")
                case "odd.":
                    return KeyError("no such rows")
                case _:
                    return None

        self._engine = ClosableEngine(lambda _ids: 7, token_s=token_s, fail=fail)
        self.serve(self._engine, refusals=REFUSALS)

    async def in_flight(self) -> int:
        return self._engine.in_flight

    async def die(self) -> None:
        os._exit(1)


class Worker:
    """Another process that calls a replica."""

    def __init__(self, replica: ReplicaClient) -> None:
        self._replica = replica.as_client("worker-0")

    async def generate(self, asked: GenerateRequest) -> int:
        return len((await self._replica.call(EngineReplica.generate, asked))[0])


class BlockedWorker:
    """A rollout worker whose rollouts call a synchronous tool that does not return.

    blocks: file that exists once they do.
    """

    def __init__(self, blocks: Path) -> None:
        self._blocks = blocks

    async def pid(self) -> int:
        return os.getpid()

    async def call(self, _method: str) -> None:
        return

    @cast(Any, ray.method)(num_returns=2)
    async def roll(self, *_of: Any, handout: int) -> None:
        self._blocks.touch()
        threading.Event().wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


async def fake_replica(*, token_s: float = 0.0, log: Path | None = None, line: str = "") -> tuple[ReplicaClient, Any]:
    actor: Any = ray.remote(FakeHost).options(num_cpus=1).remote(log=log)
    await actor.start.remote(token_s=token_s, line=line)
    return ReplicaClient(actor, name="fake-0", timeout_s=20.0, log=log), actor


def request(name: str, *, tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(request_id=f"{name}.", token_ids=np.array([1, 2], np.int32), max_new_tokens=tokens)


async def until_in_flight(actor: Any, count: int) -> None:
    while await actor.in_flight.remote() != count:  # noqa: ASYNC110 - an actor has no event to wait on
        await asyncio.sleep(0.01)


async def test_pause_and_abort_answer_beside_two_thousand_generations(cluster: None):
    replica, actor = await fake_replica(token_s=1.0)  # all outlast the time-out of a control call
    tasks = [
        asyncio.create_task(replica.call(EngineReplica.generate, request(f"r{i}", tokens=5000))) for i in range(2000)
    ]
    await until_in_flight(actor, 2000)
    await replica.call(EngineReplica.pause)
    assert await replica.call(EngineReplica.abort) == 2000
    results = await asyncio.gather(*tasks)
    assert {segments[-1].stop_reason for segments in results} == {StopReason.ABORT}
    held = asyncio.create_task(replica.call(EngineReplica.generate, request("held")))
    update = WeightUpdate(path=Path("version-1"), weights=fake_weights(1))
    assert await replica.call(EngineReplica.load, update) == fake_weights(1)
    await replica.call(EngineReplica.resume)
    assert (await held)[0].weights == fake_weights(1)
    await replica.close(timeout_s=5)


async def test_replica_client_gives_each_error_to_its_own_caller(cluster: None):
    replica, _ = await fake_replica()
    bad, odd, good = await asyncio.gather(
        *(replica.call(EngineReplica.generate, request(name)) for name in ("bad", "odd", "good")),
        return_exceptions=True,
    )
    assert isinstance(bad, AnswerError) and str(bad) == "fake-0: request bad.: nonsense"
    assert type(odd) is EngineError and "fake-0: generate failed: KeyError: 'no such rows'" in str(odd)
    assert isinstance(good, list)
    await replica.close(timeout_s=5)


async def test_replica_clients_of_two_processes_share_a_replica(cluster: None):
    replica, actor = await fake_replica(token_s=0.01)
    worker: Any = ray.remote(Worker).options(num_cpus=1).remote(replica)
    own = asyncio.create_task(replica.call(EngineReplica.generate, request("own", tokens=100_000)))
    theirs = asyncio.ensure_future(worker.generate.remote(request("theirs", tokens=100_000)))
    await until_in_flight(actor, 2)
    own.cancel()
    await until_in_flight(actor, 1)
    assert await worker.generate.remote(request("short")) == 4
    await replica.call(EngineReplica.pause)
    assert await replica.call(EngineReplica.abort) == 1
    assert await theirs > 0
    await replica.call(EngineReplica.resume)
    ray.kill(worker)
    assert len((await replica.call(EngineReplica.generate, request("later")))[0]) == 4
    await replica.close(timeout_s=5)


@pytest.mark.parametrize("limit_s", [None, 0.5], ids=["cancelled", "out of time"])
async def test_a_caller_that_ends_takes_its_request_out_of_the_engine(cluster: None, limit_s: float | None):
    replica, actor = await fake_replica(token_s=0.01)
    task = asyncio.create_task(
        asyncio.wait_for(replica.call(EngineReplica.generate, request("long", tokens=100_000)), limit_s)
    )
    if limit_s is None:
        await until_in_flight(actor, 1)
        task.cancel()
    with pytest.raises(asyncio.CancelledError if limit_s is None else TimeoutError):
        await task
    await until_in_flight(actor, 0)
    await replica.close(timeout_s=5)


async def test_close_of_a_stopped_process_returns_in_time(cluster: None):
    replica, _ = await fake_replica()
    process = psutil.Process(await replica.pid(timeout_s=20.0))
    process.suspend()
    with pytest.raises(TimeoutError):
        await replica.close(timeout_s=0.5)
    process.resume()
    await asyncio.to_thread(process.wait, 60)


async def test_a_dead_process_fails_every_caller_and_every_control_call(cluster: None):
    replica, actor = await fake_replica(token_s=0.05)
    tasks = [
        asyncio.create_task(replica.call(EngineReplica.generate, request(f"r{i}", tokens=5000))) for i in range(20)
    ]
    await until_in_flight(actor, 20)
    actor.die.remote()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ReplicaLostError}
    with pytest.raises(ReplicaLostError, match="fake-0"):
        await replica.call(EngineReplica.pause)
    with pytest.raises(ReplicaLostError, match="fake-0"):
        await replica.call(EngineReplica.generate, request("later"))


async def test_a_killed_replica_shows_the_end_of_its_log(cluster: None, tmp_path: Path):
    log = tmp_path / "fake-0.log"
    replica, _ = await fake_replica(token_s=0.05, log=log, line="out of memory")
    tasks = [asyncio.create_task(replica.call(EngineReplica.generate, request(f"r{i}", tokens=5000))) for i in range(3)]
    os.kill(await replica.pid(timeout_s=20.0), signal.SIGKILL)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, ReplicaLostError)
        (note,) = outcome.__notes__
        assert note.splitlines()[0] == f"the end of {log}:" and "    out of memory" in note.splitlines()
        assert "\n" not in str(outcome)


async def test_a_replica_whose_log_cannot_be_opened_works_and_reports_it(cluster: None, tmp_path: Path):
    log = tmp_path / "no such folder" / "fake-0.log"
    replica, actor = await fake_replica(log=log)
    assert len((await replica.call(EngineReplica.generate, request("one")))[-1]) > 0
    actor.die.remote()
    with pytest.raises(ReplicaLostError) as raised:
        await replica.call(EngineReplica.generate, request("two", tokens=100_000))
    assert str(log) in raised.value.__notes__[0] and "no log" in raised.value.__notes__[0]


async def test_a_rollout_worker_whose_tool_never_returns_is_killed_at_a_stop(cluster: None, tmp_path: Path):
    blocks = tmp_path / "blocks"
    actor: Any = ray.remote(BlockedWorker).options(num_cpus=1).remote(blocks)
    worker = WorkerClient(actor, name="worker-0", timeout_s=300.0, stop_timeout_s=0.5)
    process = psutil.Process(await worker.pid(timeout_s=300.0))
    prompt = Prompt(index=0, messages=(Message(role="user", content="?"),))
    admission = Admission(group=0, prompt=0, admitted_version=0, admitted_update=0)
    roll = asyncio.create_task(worker.call(RolloutWorker.roll, prompt, admission, handout=0))
    async with asyncio.timeout(120):
        while not blocks.exists():  # noqa: ASYNC110 - a blocked actor tells nothing
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerLostError):
            await worker.call(RolloutWorker.end)
        await worker.close(timeout_s=60.0)
        with pytest.raises(WorkerLostError):
            await roll
    process.wait(60)


def test_a_trainer_rank_trains_while_a_checkpoint_is_written(cluster: None, tmp_path: Path):
    rank: Any = TrainerActor.options(num_cpus=0).remote()
    in_thread, go_on = rank.__ray_call__, tmp_path / "go on"

    def begin_save(actor: Any) -> None:
        actor._written = Future()
        actor._written.set_result(None)

    def train(_actor: Any) -> None:
        while not go_on.exists():
            time.sleep(0.01)

    try:
        ray.get(in_thread.remote(begin_save))
        training = in_thread.remote(train)
        assert ray.get(rank.saved.remote(), timeout=60) == (None, [])
        assert not ray.wait([training], timeout=0)[0]
        go_on.touch()
        ray.get(training, timeout=60)
    finally:
        ray.kill(rank)
