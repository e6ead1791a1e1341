"""Starts the processes of a run in their places, and the replacements of failed ones.

Each is closed together with the run's exit stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray

from async_rl.cluster.placement import Placement, start_ray
from async_rl.cluster.queue import QueueClient, QueueUnavailable
from async_rl.cluster.remains import no_remains
from async_rl.cluster.replica import ReplicaClient
from async_rl.cluster.trainer import TrainerClient, TrainerLostError
from async_rl.cluster.worker import WorkerClient
from async_rl.config import RunConfig
from async_rl.controller.summary import with_room_for_twin
from async_rl.controller.warm_start import run_warm_start, warm_start_folder
from async_rl.files.atomic_dir import whole_file
from async_rl.inference.pool import PoolReplica, ReplicaPool
from async_rl.inference.select import ReplicaSettings, check_engine
from async_rl.metrics.console import RunConsole
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Worker, WorkerLostError
from async_rl.rollout.task import Task
from async_rl.trainer.rank_methods import TrainerRank
from async_rl.weights.model_info import is_quantized
from async_rl.weights.quantized import dequantize, plain_folder
from message_queue.errors import EngineError


async def place_run(
    config: RunConfig, *, ranks: int, stack: contextlib.AsyncExitStack, status: Callable[[str], None]
) -> Placement:
    """Start or join the Ray cluster, and reserve the places of a run with `ranks` trainer ranks; `stack` leaves it.

    Without a trainer there are no teachers.

    Args:
        status: called with texts about what Ray does.

    Raises:
        PlacementError: an actor needs more than any node has. TimeoutError: the cluster cannot hold the run.
    """
    status("starting" if config.cluster.address is None else f"joining {config.cluster.address}")
    start_ray(config.cluster)
    if config.cluster.address is None:
        stack.enter_context(no_remains())
    stack.callback(ray.shutdown)
    placement = Placement(
        config.cluster,
        ranks=ranks,
        replicas=config.engine.replicas,
        workers=config.rollout.workers,
        gpus_per_replica=config.gpus_per_replica,
        nodes_per_replica=config.engine.nodes,
        teachers=config.gpus_of_teachers if ranks else (),
    )
    if shortage := placement.shortage():
        status(f"waiting for nodes: {shortage}")
    await placement.ready()
    parallel = config.trainer.parallel
    if ranks and (split := placement.split_groups(parallel.close_ranks)):
        logging.getLogger(__name__).warning(
            "%d of %d tensor, context or expert groups (%d trainer ranks each) are on several nodes, whose network "
            "each layer waits for; use nodes with more GPUs, or smaller trainer.parallel.tensor, context or expert",
            *(split, ranks // parallel.close_ranks, parallel.close_ranks),
        )
    status("ready")
    return placement


class Processes:
    """The trainer's ranks, the replicas, the rollout workers and the queue.

    Args:
        stack: closes them. weights_directory: folder of published versions, on the node of trainer rank 0, or its URL;
            None if there is no trainer.
        directory: run directory. Its folder logs has the output of each process, and processes.json names each process,
            for whoever looks at a run from outside.
        console: shows the phases of each.
        trace: gets the time spans of the trainer ranks; None for none.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        placement: Placement,
        stack: contextlib.AsyncExitStack,
        weights_directory: Path | str | None,
        directory: Path,
        console: RunConsole,
        trace: Trace | None = None,
    ) -> None:
        self._config = config
        self._task = task
        self._placement = placement
        self._stack = stack
        self._weights_directory = weights_directory
        self._store: Path | None = None  # on each node
        if weights_directory is not None and config.sync.route in ("broadcast", "folder"):
            self._store = Path("/dev/shm") / f"{Path(weights_directory).name}-local"
        self._processes_file = directory / "processes.json"
        self._logs = directory / "logs"
        self._trace = trace
        self._console = console
        self._processes: dict[str, int] = {}
        self._checkpoint = Path()
        self._teachers: Mapping[str, ReplicaPool] = {}
        self._teacher_checkpoints: dict[str, Path] = {}
        self._worker_ends: list[Callable[[], Awaitable[None]]] = []
        self._engine_ends: list[Callable[[], Awaitable[None]]] = []  # of trainer and replicas
        stack.push_async_callback(self._close)

    async def start(self) -> tuple[TrainerClient, list[ReplicaClient], Path]:
        """Trainer and replicas on the checkpoint that RL starts from, warm-started first if configured."""
        config, warm = self._config, self._config.warm_start
        folder = warm_start_folder(warm, task=config.task, seed=config.seed, trainer=config.trainer)
        ready = config.model.checkpoint or (folder if folder.is_dir() else None)
        if ready is None and warm.steps == 0:
            ready = self._initial_checkpoint()
        if ready is not None:
            ready = self._checkpoint = await self._plain(ready)
            async with asyncio.TaskGroup() as starts:
                trainer = starts.create_task(self._start_trainer(config, ready))
                replicas = starts.create_task(self._start_replicas())
            return trainer.result(), replicas.result(), ready
        initial = self._initial_checkpoint()
        cold = await self._start_trainer(config, initial, warm_start=True)

        def progress(step: int, loss: float) -> None:
            if step % 25 == 0 or step == warm.steps:
                self._console.phase("trainer", f"warm start {step}/{warm.steps}, loss {loss:.4f}")

        folder.parent.mkdir(parents=True, exist_ok=True)
        await run_warm_start(warm, task=self._task, trainer=cold, initial=initial, folder=folder, progress=progress)
        self._checkpoint = folder
        if config.trainer.lora.rank:  # the warm start trained all weights; the adapters start from its result
            return await self.replace_trainer(cold), await self._start_replicas(), folder
        await cold.call(TrainerRank.reset_optimizer, config.optimizer)
        return cold, await self._start_replicas(), folder

    async def start_teachers(self, *, on_lost: Callable[[str], None]) -> Mapping[str, ReplicaPool]:
        """Teacher -> its replicas; the start of a rollout worker gives them to it.

        Args:
            on_lost: see `ReplicaPool`.
        """
        async with asyncio.TaskGroup() as starts:
            pools = {name: starts.create_task(self._start_replicas(name)) for name in self._config.teachers}
        self._teachers = {name: ReplicaPool(replicas.result(), on_lost=on_lost) for name, replicas in pools.items()}
        return self._teachers

    async def start_engines(self, checkpoint: Path) -> list[ReplicaClient]:
        """Replicas on a checkpoint, without a trainer."""
        self._checkpoint = await self._plain(checkpoint)
        return await self._start_replicas()

    async def replace_trainer(self, lost: TrainerClient) -> TrainerClient:
        """Close the ranks of `lost`, then start all ranks on the checkpoint that RL starts from.

        Versions that `lost` published stay: a replica that is restarted meanwhile loads the newest.

        Raises:
            TrainerLostError: a rank did not start, or its node died and no other has room.
            QueueUnavailable: the node of the queue died, and no other has room.
        """
        await self._closing(lost.close)()
        timeout_s = self._config.cluster.start_timeout_s
        for i in range(self._config.trainer.ranks):
            place = self._placement.rank(i)
            await self._wait_for_node(f"trainer rank {i}", place, timeout_s=timeout_s, error=TrainerLostError)
        await self._wait_for_node("the queue", self._placement.queue(), timeout_s=timeout_s, error=QueueUnavailable)
        return await self._start_trainer(self._config, self._checkpoint)

    async def replace_replica(
        self, lost: PoolReplica, /, *, slot: int, name: str, teacher: str | None = None
    ) -> ReplicaClient:
        """See `async_rl.inference.supervisor.ReplicaFactory`. teacher: whose replica it is; None for the policy's."""
        await self._closing(cast(ReplicaClient, lost).close)()
        timeout_s = self._settings(teacher).engine.start_timeout_s
        for options in self._placement.replica(slot, teacher=teacher):
            await self._wait_for_node(name, options, timeout_s=timeout_s, error=EngineError)
        return await self._start_replica(slot=slot, name=name, teacher=teacher)

    def create_rollout_workers(self) -> list[WorkerClient]:
        """As many processes as `rollout.workers`; they import while trainer and replicas start."""
        return [self._create_worker(slot=i, name=f"worker-{i}") for i in range(self._config.rollout.workers)]

    async def start_rollout_workers(self, workers: Sequence[WorkerClient], pool: ReplicaPool) -> None:
        """Start `workers` on the replicas of `pool`."""
        self._console.phase("workers", f"starting {len(workers)}")
        async with asyncio.TaskGroup() as starts:
            for worker in workers:
                starts.create_task(self._start_worker(worker, pool))
        self._console.phase("workers", "ready")

    async def remove_worker(self, lost: Worker, *, pool: ReplicaPool) -> None:
        """See `async_rl.rollout.dispatcher.WorkerFactory`."""
        await self._closing(cast(WorkerClient, lost).close)()
        for each in (pool, *self._teachers.values()):
            for member in each.live_or_none:
                replica = cast(ReplicaClient, member.replica)
                try:
                    async with each.calling(member):
                        await replica.forget_client(lost.name)
                except EngineError:
                    replica.kill()  # it may only be out of reach; dead, it does not come back with the requests

    async def start_worker(self, *, slot: int, name: str, pool: ReplicaPool) -> WorkerClient:
        """See `async_rl.rollout.dispatcher.WorkerFactory`."""
        options, timeout_s = self._placement.worker(slot), self._config.cluster.start_timeout_s
        await self._wait_for_node(name, options, timeout_s=timeout_s, error=WorkerLostError)
        worker = self._create_worker(slot=slot, name=name)
        await self._start_worker(worker, pool)
        return worker

    async def start_queue(self) -> QueueClient:
        """The queue; `open` comes first."""
        queue = QueueClient.start(self._config, options=self._placement.queue(), log=self._logs / "queue.log")
        self._name({"queue": await queue.pid(timeout_s=self._config.cluster.start_timeout_s)})
        return queue

    # ---- inside

    def _initial_checkpoint(self) -> Path:
        """The model that the task builds, in the run directory, as ranks and replicas on other nodes read it."""
        path = self._config.output_dir / "initial"
        self._stack.callback(shutil.rmtree, path, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
        self._task.save_initial_checkpoint(path)
        return path

    async def _plain(self, checkpoint: Path) -> Path:
        """The checkpoint, or its plain copy in `model.cache` if its weights are quantized."""
        if not is_quantized(checkpoint):
            return checkpoint
        folder, console = plain_folder(checkpoint, cache=self._config.model.cache), self._console
        if folder.is_dir():
            return folder
        console.phase("checkpoint", f"dequantizing {checkpoint} into {folder}; later runs reuse it")
        stopped, loop = threading.Event(), asyncio.get_running_loop()

        def progress(done: int, total: int) -> None:
            if done and done * 10 // total != (done - 1) * 10 // total:
                loop.call_soon_threadsafe(console.phase, "checkpoint", f"dequantized {done}/{total} tensors")

        try:
            await asyncio.to_thread(dequantize, checkpoint, folder, stopped=stopped, progress=progress)
        finally:
            stopped.set()  # if the run is cancelled, the thread ends after its tensor
        return folder

    async def _start_trainer(self, config: RunConfig, checkpoint: Path, *, warm_start: bool = False) -> TrainerClient:
        self._console.phase("trainer", f"starting {config.trainer.ranks} ranks")
        client = await TrainerClient.start(
            config,
            checkpoint=checkpoint,
            placement=self._placement,
            logs=self._logs,
            trace=self._trace,
            warm_start=warm_start,
        )
        self._engine_ends.append(self._closing(partial(client.close, remove_updates=self._weights_directory)))
        self._name({f"trainer-{rank}": pid for rank, pid in enumerate(client.pids)})
        self._console.phase("trainer", "ready")
        return client

    def _settings(self, teacher: str | None) -> ReplicaSettings:
        """Settings of the replicas of the policy, or of a teacher."""
        if teacher is not None:
            return self._config.teacher_settings(teacher)
        return replace(self._config.replica_settings, engine=with_room_for_twin(self._config, self._checkpoint))

    async def _start_replicas(self, teacher: str | None = None) -> list[ReplicaClient]:
        config, ready = self._config, list[str]()
        engine = config.engine if teacher is None else config.teachers[teacher].engine
        process, prefix = ("replicas", "replica") if teacher is None else (f"teacher {teacher}", f"teacher-{teacher}")
        self._console.phase(process, f"starting {engine.replicas} of {engine.name}")
        if teacher is None:
            routing = {"capture": config.captures_routing, "force": config.forces_routing}
            check_engine(engine, checkpoint=self._checkpoint, **routing)
        else:
            self._teacher_checkpoints[teacher] = await self._plain(config.teachers[teacher].checkpoint)

        async def start(slot: int) -> ReplicaClient:
            replica = await self._start_replica(slot=slot, name=f"{prefix}-{slot}", teacher=teacher)
            ready.append(replica.name)
            self._console.phase(process, f"{len(ready)} of {engine.replicas} ready")
            return replica

        async with asyncio.TaskGroup() as starts:
            tasks = [starts.create_task(start(slot)) for slot in range(engine.replicas)]
        return [task.result() for task in tasks]

    async def _start_replica(self, *, slot: int, name: str, teacher: str | None = None) -> ReplicaClient:
        settings = self._settings(teacher)
        replica = await ReplicaClient.start(
            settings,
            name=name,
            checkpoint=self._checkpoint if teacher is None else self._teacher_checkpoints[teacher],
            places=self._placement.replica(slot, teacher=teacher),
            log=self._logs / f"{name}.log",
            store=self._store if teacher is None else None,
        )
        self._engine_ends.append(self._closing(replica.close))
        self._name({name: await replica.pid(timeout_s=settings.engine.load_timeout_s)})
        return replica

    def _create_worker(self, *, slot: int, name: str) -> WorkerClient:
        options, log = self._placement.worker(slot), self._logs / f"{name}.log"
        return WorkerClient.create(self._config.cluster, name=name, options=options, log=log)

    async def _start_worker(self, worker: WorkerClient, pool: ReplicaPool) -> None:
        replicas = [member.replica for member in await pool.serving()]
        teachers = {name: [member.replica for member in await each.serving()] for name, each in self._teachers.items()}
        await worker.start(self._config, checkpoint=self._checkpoint, replicas=replicas, teachers=teachers)
        self._worker_ends.append(self._closing(worker.close))
        self._name({worker.name: await worker.pid(timeout_s=self._config.cluster.call_timeout_s)})

    async def _close(self) -> None:
        """Close all; workers first, because their rollouts end on the replicas."""
        for ends in (self._worker_ends, self._engine_ends):
            await asyncio.gather(*(end() for end in ends))

    async def _wait_for_node(
        self, name: str, options: dict[str, Any], *, timeout_s: float, error: type[Exception]
    ) -> None:
        """Wait until the place of an actor that is to be replaced is on a node that lives, else raise `error`."""
        try:
            await self._placement.wait_for_node(options, timeout_s=timeout_s)
        except TimeoutError as cause:
            raise error(f"{name}: no node of the cluster had room for it within {timeout_s:g} s; add one") from cause

    def _name(self, processes: dict[str, int]) -> None:
        self._processes |= processes
        with whole_file(self._processes_file) as file:
            file.write_text(json.dumps(self._processes) + "\n")
        for name in processes:
            log = self._logs / f"{name}.log"
            if not log.exists():
                self._console.note(f"{name} has no log at {log}: its node cannot write there", level=logging.WARNING)

    def _closing(self, close: Callable[..., Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Close a part; its errors must not hide why the run ended."""

        async def close_in_time() -> None:
            with contextlib.suppress(Exception):
                await close(timeout_s=self._config.cluster.stop_timeout_s)

        return close_in_time
