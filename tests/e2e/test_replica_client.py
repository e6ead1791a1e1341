"""Handles and actors over real Ray: replicas of a fake and of vLLM, a blocked rollout worker, a rank that saves."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch

from agent_loop.engine import GenerateRequest
from agent_loop.loop import Message, Prompt
from async_rl.cluster.placement import Placement, PlacementError, start_ray
from async_rl.cluster.replica import REFUSALS, ReplicaClient, ReplicaHost
from async_rl.cluster.trainer import TrainerActor
from async_rl.cluster.worker import WorkerClient
from async_rl.config import ClusterConfig, load_config
from async_rl.inference.replica import EngineReplica
from async_rl.inference.vllm.engine import VllmConfig, engine_environment
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.rollout.worker import RolloutWorker
from async_rl.weights.transport import WeightUpdate
from message_queue.errors import AnswerError, EngineError, ReplicaLostError
from message_queue.tokens import StopReason
from message_queue.trajectory import Admission
from tests.helpers import numerics
from tests.helpers.fakes import FakeEngine, fake_weights

pytestmark = [pytest.mark.filterwarnings("ignore")]

VLLM = VllmConfig(device="auto", threads=numerics.THREADS, max_model_len=512, kv_cache_bytes=16 << 20)


class ClosableEngine(FakeEngine):
    async def close(self):
        self.die("closed")


class FakeHost(ReplicaHost):
    """A replica whose engine is a fake."""

    async def start(self, *, token_s, line=""):
        engine = await asyncio.create_subprocess_exec("echo", line)
        await engine.wait()

        def fail(request):
            match request.request_id:
                case "bad.":
                    return AnswerError("fake-0: request bad.: nonsense")
                case "odd.":
                    return KeyError("no such rows")
                case _:
                    return None

        self._engine = ClosableEngine(lambda _ids: 7, token_s=token_s, fail=fail)
        self.serve(self._engine, refusals=REFUSALS)

    async def in_flight(self):
        return self._engine.in_flight


class Worker:
    """Another process that calls a replica."""

    def __init__(self, replica):
        self._replica = replica.as_client("worker-0")

    async def generate(self, asked):
        return len((await self._replica.call(EngineReplica.generate, asked))[0])


class BlockedWorker:
    """A rollout worker whose rollouts call a synchronous tool that does not return.

    blocks: file that exists once they do.
    """

    def __init__(self, blocks):
        self._blocks = blocks

    async def pid(self):
        return os.getpid()

    async def call(self, _method):
        return

    @ray.method(num_returns=2)
    async def roll(self, *_of, handout):
        self._blocks.touch()
        threading.Event().wait()


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of another cluster, not joined
        start_ray(ClusterConfig(num_cpus=4, object_store_bytes=128 << 20))
    yield
    ray.shutdown()


async def fake_replica(*, token_s=0.0, log=None, line=""):
    actor = ray.remote(FakeHost).options(num_cpus=1).remote(log=log)
    await actor.start.remote(token_s=token_s, line=line)
    return ReplicaClient(actor, name="fake-0", timeout_s=20.0, log=log), actor


def request(name, *, tokens=4):
    return GenerateRequest(request_id=f"{name}.", token_ids=np.array([1, 2], np.int32), max_new_tokens=tokens)


def generate(replica, name, *, tokens=4):
    return asyncio.create_task(replica.call(EngineReplica.generate, request(name, tokens=tokens)))


async def kill(replica):
    os.kill(await replica.pid(timeout_s=20.0), signal.SIGKILL)


async def until_in_flight(actor, count):
    while await actor.in_flight.remote() != count:  # noqa: ASYNC110 - an actor has no event to wait on
        await asyncio.sleep(0.01)


async def test_pause_and_abort_answer_beside_two_thousand_generations(cluster):
    replica, actor = await fake_replica(token_s=1.0)  # all outlast the time-out of a control call
    tasks = [generate(replica, f"r{i}", tokens=5000) for i in range(2000)]
    await until_in_flight(actor, 2000)
    await replica.call(EngineReplica.pause)
    assert await replica.call(EngineReplica.abort) == 2000
    results = await asyncio.gather(*tasks)
    assert {segments[-1].stop_reason for segments in results} == {StopReason.ABORT}
    held = generate(replica, "held")
    update = WeightUpdate(path=Path("version-1"), weights=fake_weights(1))
    assert await replica.call(EngineReplica.load, update) == fake_weights(1)
    await replica.call(EngineReplica.resume)
    assert (await held)[0].weights == fake_weights(1)
    await replica.close(timeout_s=5)


async def test_replica_client_gives_each_error_to_its_own_caller(cluster):
    replica, _ = await fake_replica()
    asked = [generate(replica, name) for name in ("bad", "odd", "good")]
    bad, odd, good = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(bad, AnswerError) and str(bad) == "fake-0: request bad.: nonsense"
    assert type(odd) is EngineError and "fake-0: generate failed: KeyError: 'no such rows'" in str(odd)
    assert isinstance(good, list)
    await replica.close(timeout_s=5)


async def test_replica_clients_of_two_processes_share_a_replica(cluster):
    replica, actor = await fake_replica(token_s=0.01)
    worker = ray.remote(Worker).options(num_cpus=1).remote(replica)
    own = generate(replica, "own", tokens=100_000)
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
    assert len((await generate(replica, "later"))[0]) == 4
    await replica.close(timeout_s=5)


@pytest.mark.parametrize("limit_s", [None, 0.5], ids=["cancelled", "out of time"])
async def test_a_caller_that_ends_takes_its_request_out_of_the_engine(cluster, limit_s):
    replica, actor = await fake_replica(token_s=0.01)
    task = asyncio.create_task(asyncio.wait_for(generate(replica, "long", tokens=100_000), limit_s))
    if limit_s is None:
        await until_in_flight(actor, 1)
        task.cancel()
    with pytest.raises(asyncio.CancelledError if limit_s is None else TimeoutError):
        await task
    await until_in_flight(actor, 0)
    await replica.close(timeout_s=5)


async def test_close_of_a_stopped_process_returns_in_time(cluster):
    replica, _ = await fake_replica()
    process = psutil.Process(await replica.pid(timeout_s=20.0))
    process.suspend()
    with pytest.raises(TimeoutError):
        await replica.close(timeout_s=0.5)
    process.resume()
    await asyncio.to_thread(process.wait, 60)


async def test_a_killed_replica_fails_every_call_with_the_end_of_its_log(cluster, tmp_path):
    log = tmp_path / "fake-0.log"
    replica, actor = await fake_replica(token_s=0.05, log=log, line="out of memory")
    tasks = [generate(replica, f"r{i}", tokens=5000) for i in range(20)]
    await until_in_flight(actor, 20)
    await kill(replica)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, ReplicaLostError)
        (note,) = outcome.__notes__
        assert note.splitlines()[0] == f"the end of {log}:" and "    out of memory" in note.splitlines()
        assert "\n" not in str(outcome)
    with pytest.raises(ReplicaLostError, match="fake-0"):
        await replica.call(EngineReplica.pause)
    with pytest.raises(ReplicaLostError, match="fake-0"):
        await generate(replica, "later")


async def test_a_replica_whose_log_cannot_be_opened_works_and_reports_it(cluster, tmp_path):
    log = tmp_path / "no such folder" / "fake-0.log"
    replica, _ = await fake_replica(log=log)
    assert len((await generate(replica, "one"))[-1]) > 0
    await kill(replica)
    with pytest.raises(ReplicaLostError) as raised:
        await generate(replica, "two", tokens=100_000)
    assert str(log) in raised.value.__notes__[0] and "no log" in raised.value.__notes__[0]


async def test_a_rollout_worker_whose_tool_never_returns_is_killed_at_a_stop(cluster, tmp_path):
    blocks = tmp_path / "blocks"
    actor = ray.remote(BlockedWorker).options(num_cpus=1).remote(blocks)
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


def test_a_trainer_rank_trains_while_a_checkpoint_is_written(cluster, tmp_path):
    rank = TrainerActor.options(num_cpus=0).remote()
    in_thread, go_on = rank.__ray_call__, tmp_path / "go on"

    def begin_save(actor):
        actor._written = Future()
        actor._written.set_result(None)

    def train(_actor):
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


async def test_a_replica_in_an_actor_has_the_variables_of_its_node_and_ends_with_its_engine(
    cluster, tmp_path, monkeypatch
):
    from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint  # other processes do without transformers

    config = load_config(["trainer.router_replay=R3"])
    cluster_config = replace(config.cluster, replica_env={"NCCL_DEBUG": "WARN"})
    with monkeypatch.context() as driver:
        driver.setattr(torch.cuda, "is_available", lambda: True)  # as on a node that is not the replica's
        replica = await ReplicaClient.start(
            replace(config, engine=VLLM, cluster=cluster_config).replica_settings,
            name="replica-0",
            checkpoint=save_checkpoint(qwen3_moe_config(), tmp_path / "model", seed=0),
            places=[{"num_cpus": 1}],
            log=tmp_path / "replica-0.log",
        )
    actor = psutil.Process(await replica.pid(timeout_s=60))
    processes = [actor, *actor.children(recursive=True)]
    assert len(processes) >= 2, "the engine has a process of its own"
    expected_variables = {"NCCL_DEBUG": "WARN", **engine_environment(replace(VLLM, device="cpu"))}
    for process in processes[1:]:
        assert expected_variables.items() <= process.environ().items()
        assert "VLLM_USE_V2_MODEL_RUNNER" not in process.environ()
    lost = generate(replica, "lost", tokens=400)
    await replica.call(EngineReplica.stats)
    engine = next(process for process in processes if "EngineCore" in process.name())
    engine.kill()
    with pytest.raises(ReplicaLostError, match="replica-0") as raised:
        await lost
    assert f"the end of {tmp_path}/replica-0.log:" in raised.value.__notes__[0]
    actor.kill()
    with pytest.raises(ReplicaLostError, match="replica-0"):
        await replica.call(EngineReplica.stats)
    assert (await asyncio.to_thread(psutil.wait_procs, processes, timeout=30))[1] == []


@pytest.mark.parametrize("wanted", [{"cpus_per_replica": 5.0}, {"cpus_per_rank": 5.0}, {"gpus_per_rank": 1.0}])
def test_an_actor_that_no_node_can_hold_is_refused_by_field(cluster, wanted):
    with pytest.raises(PlacementError, match=next(iter(wanted))):
        Placement(ClusterConfig(**wanted), ranks=1, replicas=1, workers=1, gpus_per_replica=0)


def test_placement_tells_what_all_nodes_together_lack(cluster):
    def short(workers):
        return Placement(ClusterConfig(), ranks=1, replicas=1, workers=workers, gpus_per_replica=0).shortage()

    have = int(ray.cluster_resources()["CPU"])
    assert short(have - 3) is None  # a rank, a replica and the queue have one each
    assert f"{have + 1} CPU" in short(have - 2) and f"have {have}" in short(have - 2)
