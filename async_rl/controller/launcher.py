"""Topology of a run: builds, places, starts and stops every part. No other module constructs parts.

driver: Controller, Dispatcher, Publisher, Recorder                                        one event loop
actors: queue | trainer rank 0..R-1 | engine replica 0..N-1 | rollout worker 0..W-1      one process each (an engine
        replicas of each teacher                                                         may add its own)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from async_rl.cluster.build_worker import build_worker
from async_rl.cluster.placement import Placement
from async_rl.cluster.trainer import TrainerClient
from async_rl.cluster.worker import WorkerClient
from async_rl.config import RunConfig, plain_values
from async_rl.controller.checkpoints import Checkpoints, hold
from async_rl.controller.interrupt import stop_on_interrupt
from async_rl.controller.parts import RunParts, run_stage
from async_rl.controller.preflight import check_run
from async_rl.controller.probe import Probe
from async_rl.controller.processes import Processes, place_run
from async_rl.controller.recovery import RecoveryLoop, supervised
from async_rl.controller.resume import record_config
from async_rl.files.atomic_dir import make_folder
from async_rl.files.command import prog
from async_rl.files.owner import identity
from async_rl.files.rollouts import FOLDER
from async_rl.files.starts import record_start
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.supervisor import Supervisor
from async_rl.metrics.callbacks import Callbacks, Kind, RunEvent
from async_rl.metrics.console import RunConsole
from async_rl.metrics.pages import write_rollouts_page
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.report import read_run, write_report
from async_rl.metrics.trace import Trace
from async_rl.metrics.trackers import TrackedRun, build_trackers
from async_rl.rollout.dispatcher import Dispatcher, Worker
from async_rl.rollout.rollouter import session_name
from async_rl.rollout.schedule import ScheduleReplay
from async_rl.trainer.rank_methods import TrainerRank
from async_rl.weights.model_info import is_quantized, read_model_info
from async_rl.weights.pretrained import keep_model_files
from async_rl.weights.transport import remove_directory
from message_queue.tokens import RoutingSpec


class Launcher:
    """One run from config to exit. What can be refused is refused in the constructor, before any process starts.

    This process owns `config.output_dir`; see `async_rl.files.owner`.

    Args:
        resume_command: shell command that continues the run after a stop; it is shown then.
        callbacks: functions of the user; see `async_rl.metrics.callbacks`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        resume_command: str,
        callbacks: Mapping[Kind, Callable[[RunEvent], Any] | None] | None = None,
    ) -> None:
        self._callbacks = callbacks or {}
        self._config = config
        self._resume_command = resume_command
        Checkpoints(config.output_dir / "checkpoints", config=config.checkpoint).recover()
        checked = check_run(config)
        self._checked, self._resume, schedule = checked, checked.resume, checked.schedule
        self._order = checked.order if schedule is None else schedule.order(checked.order)
        self._schedule_replay = None if schedule is None else ScheduleReplay(schedule, session=session_name)
        self._directory = config.output_dir

    async def run(self) -> bool:
        """Run to the end; True if all train steps were done, False after a stop request (Ctrl-C).

        Raises:
            Exception: whatever made a stage fail; every process is stopped before it is raised.
        """
        config = self._config
        logs = self._directory.resolve() / "logs"
        make_folder(logs)
        changes = record_config(self._directory, config, train_step=self._resume.state.train_step)
        record_start(self._directory, command=self._resume_command, train_step=self._resume.state.train_step)
        async with contextlib.AsyncExitStack() as stack:
            if self._resume.source is not None:
                stack.enter_context(hold(self._resume.source))
            console = RunConsole(total_train_steps=config.total_train_steps, log=logs / "driver.log")
            callbacks, values, step = Callbacks(self._callbacks), plain_values(config), self._resume.state.train_step
            tracked = TrackedRun(directory=self._directory, name=config.name, config=values, train_step=step)
            recorder = Recorder(
                self._directory,
                console=console,
                trackers=build_trackers(config.tracking, tracked, warn=console.warn),
                rollouts=config.rollout.record,
                tell=callbacks.tell,
            )
            stack.callback(recorder.close)
            await stack.enter_async_context(callbacks.calling(recorder.warn_once))
            for change in changes:
                recorder.note(f"config changed since the last start: {change}")
            for text in (*self._checked.warnings, *self._checked.task.notes):
                recorder.note(text)
            trace = Trace(self._directory / "trace.json", warn=recorder.warn)
            stack.callback(trace.write)
            status = partial(console.phase, "Ray")
            placement = await place_run(config, ranks=config.trainer.ranks, stack=stack, status=status)
            await self._require_places(placement)
            weights_directory = self._weights_directory
            stack.callback(self._remove_versions, recorder)  # if rank 0 died, it did not remove them on this node
            processes = Processes(
                config,
                task=self._checked.task,
                placement=placement,
                stack=stack,
                weights_directory=weights_directory,
                directory=self._directory.resolve(),
                console=console,
                trace=trace,
            )
            async with asyncio.TaskGroup() as background:
                nodes = background.create_task(run_stage("nodes", lambda: placement.watch(recorder.warn)))
                pages = background.create_task(run_stage("pages", lambda: self._renew_pages(recorder)))
                finished = await self._run_with(processes, console=console, recorder=recorder, trace=trace)
                nodes.cancel()
                pages.cancel()
            await self._write_rollouts(recorder)
            write_report([read_run(self._directory)], self._directory / "report.html")
            recorder.note(self._farewell(finished))
            recorder.ended()
            return finished

    async def _renew_pages(self, recorder: Recorder) -> None:
        """Write the rollouts as a page after each checkpoint."""
        while True:
            await recorder.checkpointed.wait()
            recorder.checkpointed.clear()
            await self._write_rollouts(recorder)

    async def _write_rollouts(self, recorder: Recorder) -> None:
        if self._config.rollout.record.steps and any((self._directory / FOLDER).glob("*")):
            await write_rollouts_page(self._directory, warn=recorder.warn)

    async def _run_with(self, processes: Processes, *, console: RunConsole, recorder: Recorder, trace: Trace) -> bool:
        """Start the processes, and run the controller to its end."""
        workers = processes.create_rollout_workers() if self._schedule_replay is None else []
        async with asyncio.TaskGroup() as starts:
            of_run = starts.create_task(processes.start())
            of_teachers = starts.create_task(processes.start_teachers(on_lost=recorder.warn))
        (trainer, replicas, checkpoint), teachers = of_run.result(), of_teachers.result()
        keep_model_files(checkpoint, self._directory / "model")
        await trainer.call(TrainerRank.remove_updates, self._weights_directory)  # those of a killed run
        pool = ReplicaPool(replicas, on_lost=recorder.warn)
        await processes.start_rollout_workers(workers, pool)
        run_parts = self._build_parts(processes, (pool, teachers), workers, checkpoint, recorder, trace)
        console.phase("workers", "first rollouts")
        recovery = RecoveryLoop(self._config, run_parts, order=self._order, resume=self._resume)
        async with stop_on_interrupt(run_parts.request_stop, note=recorder.note):
            return await recovery.run(trainer)

    # ---- parts

    async def _require_places(self, placement: Placement) -> None:
        """Check, before any actor starts, that the nodes of the run share the directories that they use together."""
        config = self._config
        if config.sync.route == "memory":
            placement.require_shared_memory()
        checkpoint = config.model.checkpoint
        shared = {
            "output_dir": self._directory,
            "sync.directory": config.sync.directory,
            "warm_start.cache": config.warm_start.cache if checkpoint is None else None,
            "model.cache": config.model.cache if checkpoint and is_quantized(checkpoint) else None,
        }
        for field, directory in shared.items():
            if isinstance(directory, str):
                await placement.require_store(directory, field=field)
            elif directory is not None:
                make_folder(directory)
                await placement.require_visible(directory, field=field)

    @property
    def _weights_directory(self) -> Path | str:
        """Folder, or URL, where trainer ranks write published versions."""
        sync = self._config.sync
        parent = (sync.directory if sync.route == "folder" else None) or Path("/dev/shm")
        here = f"{self._directory.resolve()} {identity(self._directory)}"  # other hosts may have the same path
        name = sha256(here.encode()).hexdigest()[:12]
        folder = f"async_rl-weights-{name}"
        return f"{parent.rstrip('/')}/{folder}" if isinstance(parent, str) else parent / folder

    def _remove_versions(self, recorder: Recorder) -> None:
        """Remove all published versions that this node sees; a store that refuses does not hide why the run ended."""
        try:
            remove_directory(self._weights_directory)
        except OSError as error:
            recorder.warn(f"published versions stay (sync.directory): {error}")

    def _build_parts(
        self,
        processes: Processes,
        pools: tuple[ReplicaPool, Mapping[str, ReplicaPool]],
        workers: Sequence[WorkerClient],
        checkpoint: Path,
        recorder: Recorder,
        trace: Trace,
    ) -> RunParts[TrainerClient]:
        config, (pool, teachers) = self._config, pools
        rollouts = Dispatcher(
            workers or [self._worker_here(pool, teachers, checkpoint)],
            pool=pool,
            teachers=teachers,
            processes=processes if self._schedule_replay is None else None,
            config=config.supervision,
            note=recorder.warn,
            note_failure=recorder.warn_once,
            record_failed=recorder.failed_rollout,
            trace=trace,
        )
        publisher, supervisor = supervised(
            config, pool, rollouts=rollouts, start=processes.replace_replica, note=recorder.warn, trace=trace
        )
        routing = read_model_info(checkpoint).routing
        return RunParts(
            start_queue=processes.start_queue,
            replace_trainer=processes.replace_trainer,
            checkpoints=Checkpoints(config.output_dir / "checkpoints", config=config.checkpoint),
            publisher=publisher,
            replicas=supervisor,
            rollouts=rollouts,
            teachers={
                name: Supervisor(
                    of_one,
                    None,
                    start=partial(processes.replace_replica, teacher=name),
                    config=config.supervision,
                    note=recorder.warn,
                )
                for name, of_one in teachers.items()
            },
            routing=routing if config.captures_routing else None,
            recorder=recorder,
            trace=trace,
            weights_directory=self._weights_directory,
            held_out=self._checked.held_out,
            schedule_replay=self._schedule_replay,
            probe=self._build_probe(pool, routing),
        )

    def _worker_here(self, pool: ReplicaPool, teachers: Mapping[str, ReplicaPool], checkpoint: Path) -> Worker:
        """The worker of a run that keeps to a schedule: in this process, next to the schedule replay."""
        replay = self._schedule_replay
        parts: dict[str, Any] = {"pool": pool, "teachers": teachers, "schedule_replay": replay}
        return build_worker(self._config, name="worker-0", checkpoint=checkpoint, **parts)

    def _build_probe(self, pool: ReplicaPool, routing: RoutingSpec | None) -> Probe | None:
        config = self._config
        same_experts = routing is None or config.captures_routing
        verifies = config.walks_versions and same_experts and not config.trainer.replay_threshold
        if verifies or not config.mismatch.prompts:
            return None
        return Probe(
            pool,
            config=config.mismatch,
            dtypes=(config.engine.dtype, config.trainer.dtype),
            same_experts=same_experts,
            temperature=config.rollout.sampling.temperature,
            max_tokens=config.engine.max_model_len,
            timeout_s=config.rollout.limits.generate_timeout_s,
            routing=routing if config.captures_routing else None,
        )

    def _farewell(self, finished: bool) -> str:
        if not finished:
            return f"stopped; continue with: {self._resume_command}"
        return (
            f"done: {self._config.total_train_steps} train steps; the model is in {self._directory / 'final'}, the "
            f"rest in {self._directory}; {prog('explain')} {self._directory} says what limited the throughput"
        )
