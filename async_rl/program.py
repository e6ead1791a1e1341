"""Topology of a run: builds, places, starts and stops every part. Nobody else constructs.

driver: Pipeline, Rollouter, Publisher, Validator, Recorder        one event loop
actors: queue | trainer rank 0..R-1 | engine replica 0..N-1        one process each (an engine may add its own)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from dataclasses import asdict
from pathlib import Path

import ray
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoTokenizer

from agent_loop.loop import AgentLoop
from agent_loop.tools import PauseGate
from async_rl.actors import Placement, start_ray
from async_rl.checkpoints import Checkpoints, RunState, read_run_state
from async_rl.config import ConfigError, RunConfig
from async_rl.data.prompts import PromptSource, prompt_order
from async_rl.data.task import Task, build_task
from async_rl.engines.select import check_engine
from async_rl.handles import ReplicaHandle, TrainerHandle, start_queue
from async_rl.model_info import ModelInfo, read_model_info
from async_rl.observe.console import open_console
from async_rl.observe.recorder import Console, Recorder
from async_rl.observe.report import read_run, write_report
from async_rl.observe.trace import Trace
from async_rl.pipeline import Pipeline, PipelineConfig
from async_rl.rollout.fleet import ReplicaFleet
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.routing import ReplicaRouter
from async_rl.rollout.validator import Validator
from async_rl.train.optimizer import OptimizerConfig
from async_rl.warm_start import run_warm_start, warm_start_folder
from async_rl.weights.publisher import Publisher
from async_rl.weights.transport import remove_directory
from message_queue.client import QueueClient
from message_queue.tokens import RoutingSpec


class Program:
    """One run from config to exit. What can be refused is refused in the constructor, before any process starts."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._task: Task = build_task(config.task, seed=config.seed)
        self._order = prompt_order(self._task, prompt_file=config.task.prompt_file, seed=config.seed)
        self._directory = config.output_dir
        self._resume_from = _checkpoint_to_resume(config)
        self._start = RunState() if self._resume_from is None else read_run_state(self._resume_from)

    async def run(self) -> bool:
        """Run to the end; True if all train steps were done, False after a stop request (Ctrl-C).

        Raises:
            Exception: whatever made a stage fail; every process is stopped before it is raised.
        """
        config = self._config
        self._directory.mkdir(parents=True, exist_ok=True)
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
            trainer, replicas, checkpoint = await self._start_workers(placement, stack, console)
            routing = self._captured_routing(read_model_info(checkpoint))
            queue = self._start_queue(placement, routing)
            await self._name_processes(trainer, replicas)
            weights_directory = stack.enter_context(self._weights_directory())
            tools = PauseGate()
            fleet = ReplicaFleet(replicas, on_lost=recorder.warn)
            publisher = Publisher(
                fleet,
                on_update=config.rollout.on_update,
                kv=config.rollout.kv,
                tools=tools,
                timeout_s=config.sync.timeout_s,
            )
            if self._resume_from is not None:
                await trainer.restore(self._resume_from / "trainer")
                version = self._start.param_version
                await publisher.publish(await trainer.export(weights_directory, version=version))
                recorder.note(f"resumed from {self._resume_from}: step {self._start.train_step}, version {version}")
            pipeline = self._build_pipeline(
                queue, trainer, fleet, publisher, tools, recorder, trace, checkpoint, routing, weights_directory
            )
            try:
                async with _stop_on_interrupt(pipeline, recorder):
                    finished = await pipeline.run()
            finally:
                with contextlib.suppress(Exception):  # a queue that died must not hide why the run ended
                    recorder.ledger(await queue.closing_records())
            write_report([read_run(self._directory)], self._directory / "report.html")
            recorder.note(self._farewell(finished))
            return finished

    # ---- parts

    def _captured_routing(self, model: ModelInfo) -> RoutingSpec | None:
        """What the rows of this run mean; None where the engines capture none."""
        return model.routing if self._config.captures_routing else None

    def _start_queue(self, placement: Placement, routing: RoutingSpec | None) -> QueueClient:
        config = self._config
        return start_queue(
            batch_groups=config.rollout.groups_per_batch,
            staleness=config.staleness,
            max_ready=config.queue.max_ready,
            restored=self._start.queue,
            routing=routing,
            config=config.queue,
            options=placement.queue(),
        )

    async def _start_workers(
        self, placement: Placement, stack: contextlib.AsyncExitStack, console: Console
    ) -> tuple[TrainerHandle, list[ReplicaHandle], Path]:
        """Trainer and replicas on the checkpoint that RL starts from, warm-started first where that is asked for."""
        config, warm = self._config, self._config.warm_start
        folder = warm_start_folder(warm, task=config.task, seed=config.seed, trainer=config.trainer)
        ready = config.model.checkpoint or (folder if folder.is_dir() else None)
        if ready is None and warm.steps == 0:
            ready = self._initial_checkpoint(stack)
        if ready is not None:
            async with asyncio.TaskGroup() as starts:
                trainer = starts.create_task(self._start_trainer(placement, stack, ready, config.optimizer))
                replicas = starts.create_task(self._start_replicas(placement, stack, ready))
            return trainer.result(), replicas.result(), ready
        initial = self._initial_checkpoint(stack)
        cold = await self._start_trainer(placement, stack, initial, warm.optimizer)

        def progress(step: int, loss: float) -> None:
            if step % 25 == 0 or step == warm.steps:
                console.note(f"warm start {step}/{warm.steps}  loss {loss:.4f}")

        folder.parent.mkdir(parents=True, exist_ok=True)
        await run_warm_start(warm, task=self._task, trainer=cold, initial=initial, folder=folder, progress=progress)
        await cold.reset_optimizer(config.optimizer)
        return cold, await self._start_replicas(placement, stack, folder), folder

    def _initial_checkpoint(self, stack: contextlib.AsyncExitStack) -> Path:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="async_rl-"))) / "initial"
        self._task.save_initial_checkpoint(path)
        return path

    async def _start_trainer(
        self, placement: Placement, stack: contextlib.AsyncExitStack, checkpoint: Path, optimizer: OptimizerConfig
    ) -> TrainerHandle:
        config = self._config
        trainer = await TrainerHandle.start(
            config.trainer,
            optimizer=optimizer,
            loss=config.loss,
            checkpoint=checkpoint,
            placement=placement,
            timeout_s=config.cluster.call_timeout_s,
        )
        stack.push_async_callback(_closing(trainer, config.cluster.stop_timeout_s))
        return trainer

    async def _start_replicas(
        self, placement: Placement, stack: contextlib.AsyncExitStack, checkpoint: Path
    ) -> list[ReplicaHandle]:
        config = self._config
        capture = config.captures_routing
        check_engine(config.engine, checkpoint=checkpoint, capture=capture, force=config.forces_routing)

        async def start(index: int) -> ReplicaHandle:
            replica = await ReplicaHandle.start(
                config.engine,
                name=f"replica-{index}",
                checkpoint=checkpoint,
                capture_routing=capture,
                options=placement.replica(index),
            )
            stack.push_async_callback(_closing(replica, config.cluster.stop_timeout_s))
            return replica

        async with asyncio.TaskGroup() as starts:
            tasks = [starts.create_task(start(i)) for i in range(config.engine.replicas)]
        return [task.result() for task in tasks]

    async def _name_processes(self, trainer: TrainerHandle, replicas: list[ReplicaHandle]) -> None:
        """Write `processes.json`: which process id is which part, for whoever looks at a run from outside."""
        ranks = await trainer.pids()
        pids = {f"trainer-{i}": pid for i, pid in enumerate(ranks)} | {r.name: await r.pid() for r in replicas}
        (self._directory / "processes.json").write_text(json.dumps(pids) + "\n")

    @contextlib.contextmanager
    def _weights_directory(self) -> Generator[Path]:
        """Where published versions are written: removed at the end."""
        sync = self._config.sync
        if sync.transport == "disk":
            assert sync.directory is not None
            path = Path(tempfile.mkdtemp(prefix="async_rl-weights-", dir=sync.directory))
        else:
            path = Path(tempfile.mkdtemp(prefix="async_rl-weights-", dir="/dev/shm"))
        try:
            yield path
        finally:
            remove_directory(path)

    def _build_pipeline(
        self,
        queue: QueueClient,
        trainer: TrainerHandle,
        fleet: ReplicaFleet,
        publisher: Publisher,
        tools: PauseGate,
        recorder: Recorder,
        trace: Trace,
        checkpoint: Path,
        routing: RoutingSpec | None,
        weights_directory: Path,
    ) -> Pipeline:
        config = self._config
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        loop: AgentLoop = self._task.build_loop(
            engine=ReplicaRouter(fleet),
            tokenizer=tokenizer,
            sampling=config.rollout.sampling,
            limits=config.rollout.limits,
            gate=tools,
        )
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
                weights_directory=weights_directory,
                replica_timeout_s=config.sync.timeout_s,
            ),
            prompts=PromptSource(
                self._order, cursor=self._start.prompt_cursor, unfinished=self._start.unfinished_prompts
            ),
            queue=queue,
            rollouter=Rollouter(
                loop=loop,
                routing=routing,
                trajectories_per_group=config.rollout.trajectories_per_group,
                resume_routing=config.rollout.resume_routing,
            ),
            trainer=trainer,
            publisher=publisher,
            replicas=fleet,
            validator=validator,
            checkpoints=Checkpoints(self._directory / "checkpoints", config=config.checkpoint),
            recorder=recorder,
            trace=trace,
            start=self._start,
        )

    def _farewell(self, finished: bool) -> str:
        if finished:
            return f"done: {self._config.total_train_steps} train steps; everything is in {self._directory}"
        return f"stopped; continue with: python -m async_rl.run output_dir={self._directory} resume=auto"


def _checkpoint_to_resume(config: RunConfig) -> Path | None:
    """The checkpoint that `resume` asks for.

    Raises:
        ConfigError: `resume=never` on a run directory that holds a run.
    """
    checkpoints = Checkpoints(config.output_dir / "checkpoints", config=config.checkpoint)
    checkpoints.recover()
    latest = checkpoints.latest()
    match config.resume:
        case "auto":
            return latest
        case "never":
            if (config.output_dir / "metrics.jsonl").exists():
                raise ConfigError(
                    f"output_dir is {config.output_dir}, which holds a run, and resume=never; "
                    "give another output_dir, remove it, or use resume=auto"
                )
            return None
        case path:
            return Path(path)


def _closing(part: ReplicaHandle | TrainerHandle, timeout_s: float) -> Callable[[], Awaitable[None]]:
    """Close a part at exit; what it raises then must not hide why the run ended."""

    async def close() -> None:
        with contextlib.suppress(Exception):
            await part.close(timeout_s=timeout_s)

    return close


@contextlib.asynccontextmanager
async def _stop_on_interrupt(pipeline: Pipeline, recorder: Recorder) -> AsyncGenerator[None]:
    """First Ctrl-C or SIGTERM: finish the step and save. Second: stop at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def interrupt() -> None:
        nonlocal asked
        if asked and task is not None:
            task.cancel()
            return
        asked = True
        recorder.note("stopping after this train step; once more to stop at once")
        pipeline.request_stop()

    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
