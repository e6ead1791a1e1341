"""What the driver does with the processes that it starts."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError

from agent_loop.engine import EngineError, ReplicaLostError
from async_rl.cluster import actors
from async_rl.cluster.actors import Placement
from async_rl.cluster.clients import TrainerLostError
from async_rl.cluster.queue_client import QueueHandle
from async_rl.cluster.queue_host import QueueUnavailable
from async_rl.cluster.rollout_workers import WorkerHandle
from async_rl.config import ClusterConfig, load_config
from async_rl.controller import processes
from async_rl.controller.processes import Processes
from async_rl.controller.recovery import RecoveryLoop
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.supervisor import SupervisionConfig
from async_rl.rollout.dispatcher import WorkerLostError

DIED = RayActorError(error_msg="The actor died unexpectedly.\n\tclass_name: QueueHost\n\tpid: 7")


class FakeTrainer:
    """Keeps what it is closed with."""

    def __init__(self):
        self.closed, self.pids = [], [7]

    async def close(self, *, timeout_s, remove_updates=None):
        self.closed.append(remove_updates)
        raise OSError("its node is gone")


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that were started."""
    started = []

    async def start(config, **options):
        started.append(FakeTrainer())
        return started[-1]

    monkeypatch.setattr(processes.TrainerHandle, "start", start)
    return started


class FakePlacement:
    """Places by name, of which those in `full` have no node with room."""

    def __init__(self, *full):
        self.full, self.waited = full, []

    def rank(self, index):
        return f"rank {index}"

    def replica(self, index):
        return f"replica {index}"

    def worker(self, index):
        return f"worker {index}"

    def queue(self):
        return "queue"

    async def wait_for_node(self, place, *, timeout_s):
        self.waited.append(place)
        if place in self.full:
            raise TimeoutError


def workers_of(tmp_path, stack, *, placement):
    """Processes of the default run."""
    return Processes(
        load_config([f"output_dir={tmp_path}"]),
        task=None,
        placement=placement,
        stack=stack,
        weights_directory=tmp_path / "versions",
        processes=tmp_path / "processes.json",
        logs=tmp_path,
    )


async def test_a_trainer_removes_its_versions_at_the_end_of_a_run_and_not_before(trainers, tmp_path):
    versions = tmp_path / "versions"
    async with contextlib.AsyncExitStack() as stack:
        running = workers_of(tmp_path, stack, placement=(placement := FakePlacement()))
        first = await running._start_trainer(tmp_path, load_config([]).optimizer)
        second = await running.replace_trainer(first)
        assert first.closed == [None], "a replica that is restarted meanwhile needs them"
        assert second.closed == []
        assert placement.waited == ["rank 0", "queue"]
    assert trainers == [first, second]
    assert first.closed == [None, versions] and second.closed == [versions]


@pytest.mark.parametrize(
    ("full", "lost"),
    [
        ("rank 0", TrainerLostError),
        ("queue", QueueUnavailable),
        ("replica 1", EngineError),
        ("worker 1", WorkerLostError),
    ],
)
async def test_a_part_without_a_node_that_has_room_is_not_started(full, lost, trainers, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        running = workers_of(tmp_path, stack, placement=FakePlacement(full))
        replace = {
            "rank 0": lambda: running.replace_trainer(FakeTrainer()),
            "queue": lambda: running.replace_trainer(FakeTrainer()),
            "replica 1": lambda: running.replace_replica(FakeTrainer(), slot=1, name="replica-2"),
            "worker 1": lambda: running.start_worker(slot=1, name="worker-2"),
        }
        with pytest.raises(lost, match="no node of the cluster had room"):
            await replace[full]()
    assert trainers == []


class FakeClosed:
    """A failed worker, or a replica. error: what it answers when it is to forget a client."""

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


async def test_a_replica_that_cannot_forget_a_dead_worker_is_lost_and_killed(tmp_path):
    lost = FakeClosed("replica-0", ReplicaLostError("replica-0: process died during forget_client"))
    other = FakeClosed("replica-1")
    async with contextlib.AsyncExitStack() as stack:
        running = workers_of(tmp_path, stack, placement=FakePlacement())
        pool = running._pool = ReplicaPool([lost, other])
        await running.remove_worker(FakeClosed("worker-0"))
    assert (lost.killed, other.killed) == (True, False), "it may come back with the requests of the worker"
    assert list(pool.lost) == ["replica-0"] and other.forgot == ["worker-0"]


async def test_a_queue_that_dies_at_its_start_is_reported_in_one_line():
    answer = asyncio.get_running_loop().create_future()
    answer.set_exception(DIED)
    actor = SimpleNamespace(pid=SimpleNamespace(remote=lambda: answer))
    with pytest.raises(QueueUnavailable) as caught:
        await QueueHandle(actor, timeout_s=5).pid(timeout_s=5)
    assert str(caught.value) == "the queue died before it could start (RayActorError: The actor died unexpectedly.)"


@pytest.mark.parametrize("died", [ObjectLostError("00", None, ""), ActorUnavailableError("no answer", None)])
async def test_a_worker_whose_answer_was_on_a_dead_node_is_lost(died):
    answer = asyncio.get_running_loop().create_future()
    answer.set_exception(died)
    method = SimpleNamespace(remote=lambda *_args: answer)
    with pytest.raises(WorkerLostError, match="worker-0"):
        await WorkerHandle(SimpleNamespace(flush=method), name="worker-0", timeout_s=5, stop_timeout_s=5).flush()


def recovery_of(tmp_path, monkeypatch, *, run_once, replace_trainer):
    """RecoveryLoop of the default run with these two calls, and what they note."""
    notes = []

    async def nothing():
        pass

    run_parts = SimpleNamespace(
        recorder=SimpleNamespace(warn=notes.append),
        publisher=SimpleNamespace(resume=nothing),
        processes=SimpleNamespace(replace_trainer=replace_trainer),
    )
    config = load_config([f"output_dir={tmp_path}"])
    recovery = RecoveryLoop(config, run_parts, order=None, held_out=(), resume=None)
    monkeypatch.setattr(recovery, "_run_once", run_once)
    return recovery, notes


async def test_finished_groups_on_a_dead_node_are_read_again_with_a_new_trainer(monkeypatch, tmp_path):
    trained_by = []

    async def run_once(trainer):
        trained_by.append(trainer)
        if len(trained_by) == 1:
            stage = RuntimeError("stage train failed")
            stage.__cause__ = ObjectLostError("00", None, "")
            raise ExceptionGroup("stages", [stage])
        return True

    async def replace_trainer(lost):
        return f"after {lost}"

    recovery, notes = recovery_of(tmp_path, monkeypatch, run_once=run_once, replace_trainer=replace_trainer)
    assert await recovery.run("first")
    assert trained_by == ["first", "after first"]
    (note,) = notes
    assert note.startswith("a finished group was on a node that died; trainer and queue start anew")


@pytest.mark.parametrize("error", [TrainerLostError("rank 0: no room"), QueueUnavailable("the queue: no room")])
@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_a_restart_of_the_trainer_that_fails_counts_as_one(error, failures, monkeypatch, tmp_path):
    replaced, trained_by = [], []

    async def run_once(trainer):
        trained_by.append(trainer)
        if trainer == "first":
            raise TrainerLostError("rank 0: process died")
        return True

    async def replace_trainer(lost):
        replaced.append(lost)
        if len(replaced) <= failures:
            raise error
        return "second"

    recovery, notes = recovery_of(tmp_path, monkeypatch, run_once=run_once, replace_trainer=replace_trainer)
    if failures < SupervisionConfig().max_restarts:
        assert await recovery.run("first")
        assert trained_by == ["first", "second"]
    else:
        with pytest.raises(type(error), match="no room"):
            await recovery.run("first")
        assert trained_by == ["first"]
    tries = min(failures + 1, SupervisionConfig().max_restarts)
    assert replaced == ["first"] * tries
    assert [note.partition(";")[0] for note in notes] == ["rank 0: process died", *[str(error)] * (tries - 1)]


async def test_a_placement_reports_nodes_that_leave_and_places_without_one(monkeypatch):
    looks = iter(
        [
            {0: "a", 1: "b", 2: "b", 3: "a"},
            {0: "a", 1: "", 2: "c", 3: "a"},
            {0: "a", 1: "", 2: "c", 3: "a"},
            {0: "a", 1: "d", 2: "c", 3: "a"},
        ]
    )
    placement = object.__new__(Placement)
    placement._ranks, placement._replicas, placement._queue = 1, 1, 3
    placement._config, placement._bundles = ClusterConfig(), [{"CPU": 2.0}] * 4
    monkeypatch.setattr(placement, "_nodes", lambda: next(looks, None))
    monkeypatch.setattr(actors, "NODES_S", 0)
    monkeypatch.setattr(actors, "_address", lambda node: node)
    notes = []
    with contextlib.suppress(TypeError):  # no more looks
        await placement.watch(notes.append)
    assert notes == [
        "node b left the cluster; the run had there: replica slot 0, rollout worker slot 0",
        "no node has room for replica slot 0 {'CPU': 2.0}; its restart waits for one",
        "rollout worker slot 0 has a place on node c",
        "replica slot 0 has a place on node d",
    ]
