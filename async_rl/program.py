"""Topology of a run: builds, places, starts and stops every part. Nobody else constructs.

driver: Pipeline, Rollouter, Publisher, Validator, Recorder        one event loop
actors: queue | trainer rank 0..R-1 | engine replica 0..N-1        one process each (an engine may add its own)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import ray
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoTokenizer

from agent_loop.loop import AgentLoop
from agent_loop.tools import PauseGate
from async_rl.actors import Placement, start_ray
from async_rl.checkpoints import Checkpoints
from async_rl.config import RunConfig
from async_rl.data.prompts import prompt_order
from async_rl.data.task import Task, build_task
from async_rl.handles import ReplicaHandle, TrainerHandle, TrainerLostError
from async_rl.interrupt import stop_on_interrupt
from async_rl.model_info import read_model_info
from async_rl.observe.console import open_console
from async_rl.observe.recorder import Recorder
from async_rl.observe.report import read_run, write_report
from async_rl.observe.trace import Trace
from async_rl.pipeline import Pipeline, PipelineConfig
from async_rl.resume import Resume
from async_rl.rollout.conductor import Conductor, Conducts, Free
from async_rl.rollout.fleet import ReplicaFleet
from async_rl.rollout.recorded import QueueRolloutLog
from async_rl.rollout.rollouter import Rollouter, session_name
from async_rl.rollout.routing import ReplicaRouter
from async_rl.rollout.schedule import RunSchedule, read_schedule
from async_rl.rollout.supervisor import RestartLimit, Supervisor
from async_rl.rollout.validator import Validator
from async_rl.weights.publisher import Publisher
from async_rl.weights.transport import remove_directory
from async_rl.workers import Workers
from message_queue.client import QueueClient, QueueUnavailable
from message_queue.restart import Restored
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import PromptGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lasting:
    """What outlives a trainer or a queue."""

    workers: Workers
    publisher: Publisher
    replicas: Supervisor
    loop: AgentLoop
    routing: RoutingSpec | None
    recorder: Recorder
    trace: Trace
    weights_directory: Path


class Program:
    """One run from config to exit. What can be refused is refused in the constructor, before any process starts."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._task: Task = build_task(config.task, seed=config.seed)
        self._order = prompt_order(self._task, prompt_file=config.task.prompt_file, seed=config.seed)
        self._conductor: Conducts = Free()
        if config.schedule is not None:
            schedule = _read_schedule(config)
            self._order = schedule.order(self._order)
            self._conductor = Conductor(schedule, session=session_name)
        self._directory = config.output_dir
        self._resume = Resume(config)
        self._stopping = False
        self._pipeline: Pipeline | None = None

    async def run(self) -> bool:
        """Run to the end; True if all train steps were done, False after a stop request (Ctrl-C).

        Raises:
            Exception: whatever made a stage fail; every process is stopped before it is raised.
        """
        config = self._config
        (self._directory / "config.yaml").write_text(json.dumps(asdict(config), indent=2, default=str) + "\n")
        async with contextlib.AsyncExitStack() as stack:
            console = open_console(total_train_steps=config.total_train_steps)
            recorder = Recorder(
                self._directory, console=console, scalars=SummaryWriter(str(self._directory / "tensorboard"))
            )
            stack.callback(recorder.close)
            trace = Trace(self._directory / "trace.json")
            stack.callback(trace.write)
            start_ray(config.cluster)
            stack.callback(ray.shutdown)
            placement = Placement(config.cluster, ranks=config.trainer.ranks, replicas=config.engine.replicas)
            await placement.ready()
            workers = Workers(
                config,
                task=self._task,
                placement=placement,
                stack=stack,
                processes=self._directory / "processes.json",
            )
            trainer, replicas, checkpoint = await workers.start(console)
            lasting = self._build_lasting(workers, replicas, checkpoint, recorder, trace, stack)
            async with stop_on_interrupt(self._request_stop, note=recorder.note):
                finished = await self._run_through_losses(lasting, trainer)
            write_report([read_run(self._directory)], self._directory / "report.html")
            recorder.note(self._farewell(finished))
            return finished

    async def _run_through_losses(self, lasting: _Lasting, trainer: TrainerHandle) -> bool:
        """Run, and where the trainer or the queue is lost go on from the last checkpoint and the journal."""
        limit = RestartLimit(self._config.supervision)
        while True:
            try:
                return await self._run_once(lasting, trainer)
            except Exception as error:
                lost = _lost_part(error)
                if lost is None or not limit.allows_one_more():
                    raise
                lasting.recorder.warn(f"{lost}; trainer and queue start anew from the last checkpoint and the journal")
                self._resume = Resume(self._config, again=True)
                trainer = await lasting.workers.replace_trainer(trainer)

    async def _run_once(self, lasting: _Lasting, trainer: TrainerHandle) -> bool:
        queue = await lasting.workers.start_queue(self._resume.journal(lasting.routing), routing=lasting.routing)
        try:
            restored = await queue.open(timeout_s=self._config.cluster.start_timeout_s)
            self._resume.rewind(restored, lasting.recorder)
            if self._resume.checkpoint is not None:
                await trainer.restore(self._resume.checkpoint / "trainer")
            self._pipeline = self._build_pipeline(lasting, queue, trainer, restored)
            if self._stopping:
                self._pipeline.request_stop()
            try:
                return await self._pipeline.run()
            finally:
                with contextlib.suppress(Exception):  # a queue that died must not hide why the run ended
                    lasting.recorder.ledger(await queue.closing_records())
                    await queue.close_journal()
        finally:
            queue.kill()

    def _request_stop(self) -> None:
        self._stopping = True
        if self._pipeline is not None:
            self._pipeline.request_stop()

    # ---- parts

    @contextlib.contextmanager
    def _weights_directory(self) -> Generator[Path]:
        """Where published versions are written: removed at the end, and what a killed run left at the start."""
        sync = self._config.sync
        parent = Path("/dev/shm") if sync.transport == "shm" else sync.directory
        assert parent is not None
        name = sha256(str(self._directory.resolve()).encode()).hexdigest()[:12]
        path = parent / f"async_rl-weights-{name}"
        remove_directory(path)
        path.mkdir()
        try:
            yield path
        finally:
            remove_directory(path)

    def _build_lasting(
        self,
        workers: Workers,
        replicas: Sequence[ReplicaHandle],
        checkpoint: Path,
        recorder: Recorder,
        trace: Trace,
        stack: contextlib.AsyncExitStack,
    ) -> _Lasting:
        config = self._config
        tools = PauseGate()
        fleet = ReplicaFleet(replicas, on_lost=recorder.warn)
        publisher = Publisher(
            fleet,
            on_update=config.rollout.on_update,
            kv=config.rollout.kv,
            tools=tools,
            timeout_s=config.sync.timeout_s,
        )
        loop = self._task.build_loop(
            engine=self._conductor.engine(ReplicaRouter(fleet)),
            tokenizer=AutoTokenizer.from_pretrained(checkpoint),
            sampling=config.rollout.sampling,
            limits=config.rollout.limits,
            gate=tools,
        )
        return _Lasting(
            workers=workers,
            publisher=publisher,
            replicas=Supervisor(
                fleet,
                publisher,
                start=workers.replace_replica,
                config=config.supervision,
                note=recorder.warn,
            ),
            loop=self._conductor.loop(loop),
            routing=read_model_info(checkpoint).routing if config.captures_routing else None,
            recorder=recorder,
            trace=trace,
            weights_directory=stack.enter_context(self._weights_directory()),
        )

    def _build_pipeline(
        self, lasting: _Lasting, queue: QueueClient, trainer: TrainerHandle, restored: Restored[PromptGroup]
    ) -> Pipeline:
        config = self._config
        loop, routing = lasting.loop, lasting.routing
        validator = None
        if config.validation.prompts:
            held_out = self._task.validation_prompts(config.validation.prompts)
            validator = Validator(
                loop=loop, routing=routing, prompts=held_out, resume_routing=config.rollout.resume_routing
            )
        return Pipeline(
            config=PipelineConfig(
                total_train_steps=config.total_train_steps,
                publish_every=config.sync.every,
                validate_every=config.validation.every,
                max_failed_groups=config.rollout.max_failed_groups,
                advantage=config.advantage,
                kept_kv=config.rollout.on_update == "keep" and config.rollout.kv == "keep",
                weights_directory=lasting.weights_directory,
                replica_timeout_s=config.sync.timeout_s,
            ),
            prompts=self._resume.prompts(self._order, restored),
            queue=queue,
            rollouter=Rollouter(
                loop=loop,
                routing=routing,
                trajectories_per_group=config.rollout.trajectories_per_group,
                resume_routing=config.rollout.resume_routing,
                log=QueueRolloutLog(queue),
                failure=config.rollout.failure,
                note=lasting.recorder.warn,
            ),
            trainer=trainer,
            publisher=lasting.publisher,
            replicas=lasting.replicas,
            validator=validator,
            checkpoints=Checkpoints(self._directory / "checkpoints", config=config.checkpoint),
            recorder=lasting.recorder,
            trace=lasting.trace,
            start=self._resume.state,
            restored=restored,
            conductor=self._conductor,
        )

    def _farewell(self, finished: bool) -> str:
        if finished:
            return f"done: {self._config.total_train_steps} train steps; everything is in {self._directory}"
        return f"stopped; continue with: python -m async_rl.run output_dir={self._directory} resume=auto"


def _read_schedule(config: RunConfig) -> RunSchedule:
    """The schedule that the run is to keep to.

    Raises:
        ScheduleError: it cannot be read, or does not suit the run.
    """
    assert config.schedule is not None
    schedule = read_schedule(config.schedule)
    schedule.check(
        groups_per_batch=config.rollout.groups_per_batch,
        trajectories_per_group=config.rollout.trajectories_per_group,
        train_steps=config.total_train_steps,
        max_staleness=config.staleness.max_staleness,
        every=config.sync.every,
    )
    return schedule


def _lost_part(error: BaseException) -> str | None:
    """What ended a run, where it was a trainer or a queue that died or fell silent; None where anything else did."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_lost_part, error.exceptions)), None)
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, TrainerLostError | QueueUnavailable):
            return str(link)
        link = link.__cause__
    return None
