"""Processes that the driver starts, replaces and closes."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError
from safetensors.torch import load_file

from async_rl.cluster.queue import QueueClient, QueueUnavailable
from async_rl.cluster.trainer import TrainerLostError
from async_rl.cluster.worker import WorkerClient
from async_rl.config import ModelConfig, load_config
from async_rl.controller import processes
from async_rl.controller.processes import Processes
from async_rl.controller.recovery import RecoveryLoop
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.supervisor import SupervisionConfig
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.rollout.worker import RolloutWorker
from async_rl.weights.model_info import is_quantized
from message_queue.errors import EngineError, ReplicaLostError
from tests.helpers import tiny_models


class FakeTrainer:
    """Keeps the folder of weights that it removes when it is closed."""

    def __init__(self, config=None):
        self.closed, self.pids, self.config = [], [7], config

    async def close(self, *, timeout_s, remove_updates=None):
        self.closed.append(remove_updates)
        raise OSError("its node is gone")


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that were started."""
    started = []

    async def start(config, **options):
        started.append(FakeTrainer(config))
        return started[-1]

    monkeypatch.setattr(processes.TrainerClient, "start", start)
    return started


@pytest.fixture
def replicas(monkeypatch):
    """(config, other options) of the replicas that were started."""
    started = []

    async def start(config, **options):
        started.append((config, options))
        return SimpleNamespace(pid=lambda **_: asyncio.sleep(0, 7), close=lambda **_: asyncio.sleep(0))

    monkeypatch.setattr(processes.ReplicaClient, "start", start)
    return started


class FakePlacement:
    """Places by name; those in `full` have no node with room."""

    def __init__(self, *full):
        self.full, self.waited = full, []

    rank = "rank {}".format

    def replica(self, slot, *, teacher=None):
        return [f"replica {slot}", f"replica {slot} node 1"]

    worker = "worker {}".format
    queue = "queue".format

    async def wait_for_node(self, place, *, timeout_s):
        self.waited.append(place)
        if place in self.full:
            raise TimeoutError


QUIET = SimpleNamespace(note=lambda *_args, **_options: None, phase=lambda *_args: None)


def processes_of(tmp_path, stack, *, placement, overrides=(), console=QUIET):
    return Processes(
        load_config([f"output_dir={tmp_path}", *overrides]),
        task=None,
        placement=placement,
        stack=stack,
        weights_directory=tmp_path / "versions",
        directory=tmp_path,
        console=console,
    )


async def test_a_trainer_removes_its_versions_at_the_end_of_a_run_only(trainers, tmp_path):
    versions = tmp_path / "versions"
    async with contextlib.AsyncExitStack() as stack:
        running = processes_of(tmp_path, stack, placement=(placement := FakePlacement()))
        first = await running._start_trainer(running._config, tmp_path)
        second = await running.replace_trainer(first)
        assert first.closed == [None], "a replica that is restarted meanwhile needs them"
        assert second.closed == []
        assert placement.waited == ["rank 0", "queue"]
    assert trainers == [first, second]
    assert first.closed == [None, versions] and second.closed == [versions]


@pytest.mark.parametrize(
    ("full", "error", "replace"),
    [
        ("rank 0", TrainerLostError, lambda run: run.replace_trainer(FakeTrainer())),
        ("queue", QueueUnavailable, lambda run: run.replace_trainer(FakeTrainer())),
        ("replica 1", EngineError, lambda run: run.replace_replica(FakeTrainer(), slot=1, name="replica-2")),
        ("replica 1 node 1", EngineError, lambda run: run.replace_replica(FakeTrainer(), slot=1, name="replica-2")),
        ("worker 1", WorkerLostError, lambda run: run.start_worker(slot=1, name="worker-2", pool=None)),
    ],
)
async def test_a_part_without_a_node_that_has_room_is_not_started(full, error, replace, trainers, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        running = processes_of(tmp_path, stack, placement=FakePlacement(full))
        with pytest.raises(error):
            await replace(running)
    assert trainers == []


@pytest.mark.parametrize("delta", [False, True])
async def test_a_trainer_publishes_changes_if_asked_to_and_each_node_has_a_store(delta, trainers, tmp_path):
    route = ("sync.route=folder", f"sync.directory={tmp_path}", *(["sync.delta=true"] if delta else []))
    async with contextlib.AsyncExitStack() as stack:
        running = processes_of(tmp_path, stack, placement=FakePlacement(), overrides=route)
        await running._start_trainer(running._config, tmp_path)
        assert trainers[0].config.sync.delta is delta
        assert running._store == Path("/dev/shm/versions-local")
        assert processes_of(tmp_path, stack, placement=FakePlacement())._store is None


@pytest.mark.parametrize("mode", ["at_once", "staged"])
async def test_a_replica_starts_on_all_nodes_of_its_place_and_knows_the_size_of_its_twin(mode, replicas, tmp_path):
    folder = tiny_models.save_checkpoint(tiny_models.qwen3_moe_config(), tmp_path / "model", seed=0)
    async with contextlib.AsyncExitStack() as stack:
        running = processes_of(tmp_path, stack, placement=FakePlacement(), overrides=[f"sync.mode={mode}"])
        running._checkpoint = folder
        await running._start_replica(slot=1, name="replica-2")
    ((config, options),) = replicas
    assert options["places"] == ["replica 1", "replica 1 node 1"]
    values = sum(tensor.numel() for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
    assert config.engine.twin_bytes == (4 * values if mode == "staged" else 0)


async def test_workers_end_first_and_then_trainer_and_replicas_at_the_same_time(monkeypatch, tmp_path):
    ended, all_engines = [], asyncio.Barrier(3)

    def part(name, *, ends_with):
        async def close(**_):
            ended.append(name)
            await ends_with.wait()

        calls = {"start": lambda *_, **__: asyncio.sleep(0), "pid": lambda **_: asyncio.sleep(0, 7), "close": close}
        return SimpleNamespace(name=name, pids=[7], **calls)

    async def start_engine(config, *, name="trainer", **options):
        return part(name, ends_with=all_engines)

    both_workers = asyncio.Barrier(2)
    monkeypatch.setattr(processes.TrainerClient, "start", start_engine)
    monkeypatch.setattr(processes.ReplicaClient, "start", start_engine)
    monkeypatch.setattr(processes.WorkerClient, "create", lambda _, name, **__: part(name, ends_with=both_workers))
    async with contextlib.AsyncExitStack() as stack:
        sizes = ("engine.replicas=2", "rollout.workers=2")
        running = processes_of(tmp_path, stack, placement=FakePlacement(), overrides=sizes)
        workers = running.create_rollout_workers()
        await running._start_trainer(running._config, tmp_path)
        replicas = [await running._start_replica(slot=i, name=f"replica-{i}") for i in range(2)]
        await running.start_rollout_workers(workers, ReplicaPool(replicas))
    assert ended == ["worker-0", "worker-1", "trainer", "replica-0", "replica-1"]


class FakeClosed:
    """A failed worker, or a replica. error: raised when it is to forget a client."""

    def __init__(self, name, error=None):
        self.name, self.error, self.forgot, self.killed = name, error, [], False

    async def close(self, *, timeout_s):
        pass

    async def forget_client(self, client):
        if self.error is not None:
            raise self.error
        self.forgot.append(client)

    def kill(self):
        self.killed = True


async def test_a_replica_that_cannot_forget_a_dead_worker_is_killed(tmp_path):
    lost = FakeClosed("replica-0", ReplicaLostError("replica-0: process died during forget_client"))
    other = FakeClosed("replica-1")
    async with contextlib.AsyncExitStack() as stack:
        running = processes_of(tmp_path, stack, placement=FakePlacement())
        pool = ReplicaPool([lost, other])
        await running.remove_worker(FakeClosed("worker-0"), pool=pool)
    assert (lost.killed, other.killed) == (True, False), "it may come back with the requests of the worker"
    assert list(pool.lost) == ["replica-0"] and other.forgot == ["worker-0"]


def actor_with(method, error):
    """An actor whose `method` fails."""
    answer = asyncio.get_running_loop().create_future()
    answer.set_exception(error)
    return SimpleNamespace(**{method: SimpleNamespace(remote=lambda *_args: answer)})


async def test_a_queue_that_dies_at_its_start_is_reported_in_one_line():
    died = RayActorError(error_msg="The actor died unexpectedly.\n\tclass_name: QueueHost\n\tpid: 7")
    with pytest.raises(QueueUnavailable, match="the queue: process died during pid") as caught:
        await QueueClient(actor_with("pid", died), timeout_s=5).pid(timeout_s=5)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("died", [ObjectLostError("00", None, ""), ActorUnavailableError("no answer", None)])
async def test_a_worker_that_does_not_answer_is_named(died):
    with pytest.raises(WorkerLostError, match="worker-0"):
        await WorkerClient(actor_with("call", died), name="worker-0", timeout_s=5, stop_timeout_s=5).call(
            RolloutWorker.flush
        )


def stage_failed():
    """The error of a run whose training stage read content on a dead node."""
    stage = RuntimeError("stage train failed")
    stage.__cause__ = ObjectLostError("00", None, "")
    return ExceptionGroup("stages", [stage])


@pytest.mark.parametrize("first", [TrainerLostError("rank 0: process died"), stage_failed()], ids=["rank", "content"])
@pytest.mark.parametrize("error", [TrainerLostError("rank 0: no room"), QueueUnavailable("the queue: no room")])
@pytest.mark.parametrize("failures", [0, 1, 2, 3])
async def test_a_restart_of_the_trainer_that_fails_counts_as_one(first, error, failures, monkeypatch, tmp_path):
    replaced, trained_by, notes = [], [], []

    async def run_once(trainer):
        trained_by.append(trainer)
        if trainer == "first":
            raise first
        return True

    async def replace_trainer(lost):
        replaced.append(lost)
        if len(replaced) <= failures:
            raise error
        return "second"

    publisher = SimpleNamespace(resume=lambda: asyncio.sleep(0))
    recorder = SimpleNamespace(warn=notes.append)
    run_parts = SimpleNamespace(recorder=recorder, publisher=publisher, replace_trainer=replace_trainer)
    recovery = RecoveryLoop(load_config([f"output_dir={tmp_path}"]), run_parts, order=None, resume=None)
    monkeypatch.setattr(recovery, "_run_once", run_once)
    is_restarted = failures < SupervisionConfig().max_restarts
    with contextlib.nullcontext() if is_restarted else pytest.raises(type(error), match="room"):
        assert await recovery.run("first")
    assert trained_by == ["first", "second"][: 1 + is_restarted]
    tries = min(failures + 1, SupervisionConfig().max_restarts)
    assert replaced == ["first"] * tries
    assert [note.partition(";")[0] for note in notes[1:]] == [str(error)] * (tries - 1)


async def test_trainer_and_replicas_start_on_the_plain_copy_of_a_quantized_checkpoint(tmp_path, monkeypatch):
    checkpoint = tiny_models.save_checkpoint(tiny_models.qwen3_dense_config(), tmp_path / "tiny", seed=1)
    tiny_models.quantize_fp8(checkpoint)
    given, notes = [], []

    async def start(config, *, checkpoint, **options):
        given.append(checkpoint)
        own = {"close": lambda **_: asyncio.sleep(0), "pid": lambda **_: asyncio.sleep(0, 8)}
        return SimpleNamespace(name="replica-0", pids=[7], **own)

    monkeypatch.setattr(processes.TrainerClient, "start", start)
    monkeypatch.setattr(processes.ReplicaClient, "start", start)
    console = SimpleNamespace(note=lambda *_, **__: None, phase=lambda process, text: notes.append(text))
    ready = set()
    for trains in (True, True, False):
        async with contextlib.AsyncExitStack() as stack:
            running = processes_of(tmp_path, stack, placement=FakePlacement(), console=console)
            running._config = replace(
                running._config,
                model=ModelConfig(checkpoint=checkpoint, cache=tmp_path / "cache"),
                trainer=replace(running._config.trainer, router_replay="none"),
            )
            if trains:
                ready.add((await running.start())[2])
            else:
                await running.start_engines(checkpoint)
    (folder,) = ready
    assert given == [folder] * 5 and folder.parent == tmp_path / "cache"
    assert not is_quantized(folder) and (folder / "model.safetensors").is_file()
    assert sum("dequantizing" in text for text in notes) == 1  # the later starts reuse it


def test_a_process_without_a_log_is_reported(tmp_path):
    notes = []
    console = SimpleNamespace(note=lambda text, *, level: notes.append(text))
    running = processes_of(tmp_path, contextlib.AsyncExitStack(), placement=None, console=console)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "queue.log").touch()
    running._name({"queue": 1, "replica-0": 2})
    (note,) = notes
    assert "replica-0" in note and str(tmp_path / "logs" / "replica-0.log") in note
