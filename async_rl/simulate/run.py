"""One start of the run: builds what `async_rl.program.Program` builds, with simulated processes behind the handles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agent_loop.engine import EngineError, ReplicaLostError, SamplingConfig
from agent_loop.loop import Prompt
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools import PauseGate, ToolRunner
from async_rl.actors import ReplicaHost, RolloutHost
from async_rl.batch.advantage import AdvantageConfig
from async_rl.checkpoints import CheckpointConfig
from async_rl.cluster.queue_host import REFUSALS, QueueHost
from async_rl.cluster.rpc import BatchingServer
from async_rl.config import QueueConfig, RunConfig, SyncConfig, ValidationConfig, load_config
from async_rl.engines.replica import Replica
from async_rl.handles import ReplicaAddress, ReplicaHandle
from async_rl.lives import Lasting, Lives, RunQueue, supervised
from async_rl.observe.recorder import Recorder, StepRecord
from async_rl.observe.trace import Trace
from async_rl.resume import Resume
from async_rl.rollout.conductor import Free
from async_rl.rollout.contents import ContentPlace, StoredContent
from async_rl.rollout.dispatcher import Dispatcher, Worker
from async_rl.rollout.fleet import FleetReplica, ReplicaFleet
from async_rl.rollout.recorded import RolloutLog, StoredRolloutLog, StoresRecords
from async_rl.rollout.rollouter import FailureConfig, Rollouter
from async_rl.rollout.routing import ReplicaRouter
from async_rl.rollout.supervisor import SupervisionConfig
from async_rl.rollout.validator import ValidationResult, Validator
from async_rl.rollout.worker import RolloutWorker
from async_rl.rollout_workers import WorkerFleet, WorkerHandle
from async_rl.simulate import model
from async_rl.simulate.engine import SimulatedReplica
from async_rl.simulate.processes import Observed, Process
from async_rl.simulate.queue_client import WatchedQueue
from async_rl.simulate.scenario import Scenario
from async_rl.simulate.trainer import INITIAL, ParityReward, SimulatedTrainer, session_of_task
from message_queue.contract import Admission, QueueSnapshot
from message_queue.events import Event
from message_queue.progress import RolloutRecord
from message_queue.recovery import JournalPlace, Restored
from message_queue.tokens import WeightVersion
from message_queue.trajectory import Trajectory

if TYPE_CHECKING:
    from async_rl.simulate.world import World

CALL_S, STOP_S, GENERATE_S, ROLLOUT_S, TOOL_S = 30.0, 20.0, 90.0, 200.0, 5.0
OPEN_S, START_S, LINGER_S = 60.0, 2.0, 2.0


class _Silent:
    """A console and TensorBoard writer that show nothing."""

    def step(self, record: StepRecord) -> None: ...
    def validation(self, train_step: int, result: ValidationResult) -> None: ...
    def note(self, text: str) -> None: ...
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def close(self) -> None: ...


class _Session:
    """An agent loop in which a tool can tell whose call it is."""

    def __init__(self, loop: ToolUseLoop) -> None:
        self._loop = loop

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        session_of_task.set(session)
        await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)


class _SimulatedQueueHost(QueueHost):
    """The process of the queue; the world sees the result of each call."""

    def __init__(self, world: World, **options: Any) -> None:
        super().__init__(**options)
        self.process: Process | None = None
        self._world = world

    async def open(self, place: JournalPlace) -> Restored:
        self._world.journal_opens()
        restored = await super().open(place)
        assert self.process is not None and self.queue is not None
        state, world = self.queue._state, self._world  # pyright: ignore[reportPrivateUsage]
        apply = state.apply

        def watched(event: Event) -> None:
            apply(event)
            world.applied(event)

        state.apply = watched
        self._server = BatchingServer[Any](Observed(self.queue, self.process), refusals=REFUSALS)
        return restored


class _WatchedLives(Lives[SimulatedTrainer]):
    """Lives that report restarts and stored content to the world."""

    def __init__(self, config: RunConfig, lasting: Lasting[SimulatedTrainer], *, world: World, **options: Any) -> None:
        super().__init__(config, lasting, **options)
        self._world = world

    async def _open_queue(self, place: ContentPlace) -> tuple[RunQueue, Restored, StoredContent]:
        queue, restored, stored = await super()._open_queue(place)
        self._world.reopened(restored, stored)
        return queue, restored, stored


class _WatchedDispatcher(Dispatcher):
    """Tells the world what is read of the groups of a lost worker, and when no tool may start."""

    world: World
    tools_paused = False

    async def pause(self) -> None:
        await super().pause()
        self.tools_paused = True

    async def resume(self) -> None:
        self.tools_paused = False
        await super().resume()

    async def _read(self, groups: Mapping[int, Admission]) -> None:
        await super()._read(groups)
        self.world.moved({group: self._held[group] for group in groups})


class _ToldStore:
    """Where rollouts are stored; the world is told of each record that is."""

    def __init__(self, store: StoresRecords, world: World) -> None:
        self._store = store
        self._world = world

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        await self._store.append(records)
        for record in records:
            self._world.told.store(record)


@cache
def _template() -> RunConfig:
    return load_config(["trainer.router_replay=R3", "name=simulated", "resume=auto", "mismatch.prompts=0"])


def run_config(scenario: Scenario, *, directory: Path) -> RunConfig:
    """The run config of a scenario."""
    whole = _template()
    limits = replace(
        whole.rollout.limits,
        max_turns=scenario.max_turns,
        max_tokens=scenario.max_tokens,
        tool_timeout_s=TOOL_S,
        reward_timeout_s=TOOL_S,
        generate_timeout_s=ROLLOUT_S,
    )
    rollout = replace(
        whole.rollout,
        groups_per_batch=scenario.batch_groups,
        trajectories_per_group=scenario.trajectories_per_group,
        on_update=scenario.on_update,
        kv=scenario.kv,
        resume_routing=scenario.resume_routing,
        max_failed_groups=1 << 30,
        failure=FailureConfig(on_failed=scenario.on_failed),
        sampling=SamplingConfig(top_p=scenario.top_p),
        limits=limits,
    )
    alone = scenario.trajectories_per_group == 1
    return replace(
        whole,
        output_dir=directory,
        seed=scenario.seed,
        total_train_steps=scenario.steps,
        advantage=AdvantageConfig(name="reinforce_plus_plus") if alone else AdvantageConfig(),
        staleness=scenario.staleness,
        rollout=rollout,
        trainer=replace(whole.trainer, updates_per_batch=scenario.updates_per_batch),
        sync=SyncConfig(every=scenario.publish_every, timeout_s=CALL_S),
        queue=QueueConfig(timeout_s=CALL_S, max_ready=scenario.max_ready),
        supervision=SupervisionConfig(max_restarts=scenario.max_restarts),
        validation=ValidationConfig(every=1 if scenario.validation else 0, prompts=2 if scenario.validation else 0),
        checkpoint=CheckpointConfig(every=scenario.checkpoint_every),
        cluster=replace(whole.cluster, start_timeout_s=OPEN_S),
    )


class Run:
    """The parts of one start. processes: those that run, by name.

    Raises:
        ConfigError, ValueError: from the constructor, where the directory cannot be used.
    """

    def __init__(self, world: World, *, number: int) -> None:
        scenario = world.scenario
        self.processes: dict[str, Process] = {}
        self._all: list[Process] = []
        self._world = world
        self._number = number
        self._config = config = run_config(scenario, directory=world.directory)
        resume = Resume(config)
        self.recorder = Recorder(world.directory, console=_Silent(), scalars=_Silent())
        self._queue: _SimulatedQueueHost | None = None
        self._trainer = SimulatedTrainer(world)
        replicas = [self._replica(slot, f"replica-{slot}") for slot in range(scenario.replicas)]
        self.fleet = ReplicaFleet(replicas, on_lost=self.recorder.warn)
        rollouts = self.rollouts = _WatchedDispatcher(
            [self._worker(f"worker-{slot}") for slot in range(scenario.workers)],
            fleet=self.fleet,
            processes=self,
            config=config.supervision,
            note=self.recorder.warn,
        )
        rollouts.world = world
        publisher, supervisor = supervised(
            config, self.fleet, rollouts=rollouts, start=self.replace_replica, recorder=self.recorder
        )
        lasting = Lasting(
            workers=self,
            publisher=publisher,
            replicas=supervisor,
            rollouts=rollouts,
            routing=model.ROUTING,
            recorder=self.recorder,
            trace=Trace(None),
            weights_directory=world.directory / "weights",
            conductor=Free(),
        )
        held_out = [world.train_prompt(900 + i) for i in range(config.validation.prompts)]
        self.lives = _WatchedLives(config, lasting, world=world, order=world, held_out=held_out, resume=resume)

    async def go(self) -> bool:
        """Run to the end or to what stops it, as `Program.run` does."""
        try:
            return await self.lives.run(self._trainer)
        finally:
            self.recorder.close()

    def cut_off(self) -> None:
        """The driver is dead, and all processes with it."""
        for process in self._all:
            process.cut_off()

    @property
    def train_step(self) -> int:
        """Optimizer updates in the trainer."""
        return self._trainer.train_step

    @property
    def serving(self) -> Collection[str]:
        """Replicas in the fleet."""
        try:
            return [member.name for member in self.fleet.live]
        except ReplicaLostError:
            return []

    def queue_state(self) -> QueueSnapshot:
        """State of the queue now."""
        queue = None if self._queue is None else self._queue.queue
        return QueueSnapshot() if queue is None else queue._state.snapshot()  # pyright: ignore[reportPrivateUsage]

    def records(self) -> list[Any]:
        """Ledger records of all groups that ended."""
        told = self.ledger_lines()
        return [*told, *(record for record in self.untold_records() if record not in told)]

    def untold_records(self) -> list[Any]:
        """Those that the queue still has."""
        queue = None if self._queue is None else self._queue.queue
        return [] if queue is None else [*queue._ended, *queue._state._records]  # pyright: ignore[reportPrivateUsage]

    def ledger_lines(self) -> list[Any]:
        """`ledger.jsonl`."""
        return [json.loads(line) for line in (self._world.directory / "ledger.jsonl").read_text().splitlines()]

    # ---- parts that may be lost; see `async_rl.workers.Workers`

    async def start_queue(self) -> WatchedQueue:
        world, config = self._world, self._config
        host = self._queue = _SimulatedQueueHost(
            world,
            batch_groups=config.rollout.groups_per_batch,
            staleness=config.staleness,
            max_ready=config.queue.max_ready,
            updates_per_batch=config.trainer.updates_per_batch,
        )
        process = host.process = self._process("queue", host)

        def kill() -> None:
            world.before_queue_ends()
            process.die("killed by the driver")

        return WatchedQueue(
            process,
            told=world.told,
            opens=world.queue_starts,
            taken=world.taken,
            on_kill=kill,
            timeout_s=config.queue.timeout_s,
        )

    async def replace_trainer(self, lost: SimulatedTrainer) -> SimulatedTrainer:
        await asyncio.sleep(START_S)
        self._trainer = SimulatedTrainer(self._world)
        return self._trainer

    async def replace_replica(self, lost: FleetReplica, /, *, slot: int, name: str) -> ReplicaHandle:
        self.processes[lost.name].die("killed by the driver")
        fault, seconds = self._world.fault("start"), START_S
        if fault is not None and fault.kind == "slow start":
            seconds += fault.amount
        await asyncio.sleep(seconds)
        if fault is not None and fault.kind == "replica does not start":
            raise EngineError(f"{name}: start failed: no room for the weights")
        return self._replica(slot, name)

    async def remove_worker(self, lost: Worker) -> None:
        self.processes[lost.name].die("killed by the driver")
        await asyncio.sleep(LINGER_S)
        for member in self.fleet.live_or_none:
            with contextlib.suppress(EngineError):
                await cast(ReplicaHandle, member.replica).forget_client(lost.name)

    async def start_worker(self, *, slot: int, name: str) -> WorkerHandle:
        await asyncio.sleep(START_S)
        await self.fleet.serving()
        return self._worker(name)

    # ---- processes

    def _worker(self, name: str) -> WorkerHandle:
        host = RolloutHost()
        process = self._process(name, host)
        replicas = [cast(ReplicaHandle, member.replica).address for member in self.fleet.live]
        fleet = WorkerFleet([ReplicaHandle(address, client=name) for address in replicas])
        worker = self._build_worker(name, fleet)
        fleet.report = worker.report
        host.serve(worker, fleet)
        actor: Any = process
        return WorkerHandle(actor, name=name, timeout_s=CALL_S, stop_timeout_s=STOP_S)

    def _build_worker(self, name: str, fleet: WorkerFleet) -> RolloutWorker:
        world, config, gate = self._world, self._config, PauseGate()
        loop = _Session(
            ToolUseLoop(
                engine=ReplicaRouter(fleet),
                chat=world.chat,
                tools=ToolRunner([world.tool], timeout_s=TOOL_S, gate=gate),
                reward=ParityReward(world),
                limits=config.rollout.limits,
                sampling=config.rollout.sampling,
            )
        )

        def rollouter(log: RolloutLog | None) -> Rollouter:
            if isinstance(log, StoredRolloutLog):
                log = StoredRolloutLog(_ToldStore(log._store, world))  # pyright: ignore[reportPrivateUsage]
            return Rollouter(
                loop=loop,
                routing=model.ROUTING,
                trajectories_per_group=config.rollout.trajectories_per_group,
                resume_routing=config.rollout.resume_routing,
                log=log,
                failure=config.rollout.failure,
                note=lambda text: worker.report(text),
            )

        validator = Validator(loop=loop, routing=model.ROUTING, resume_routing=config.rollout.resume_routing)
        worker = RolloutWorker(name, rollouter=rollouter, validator=validator, gate=gate, fleet=fleet)
        return worker

    def _process(self, name: str, host: object) -> Process:
        draw = random.Random(f"{name} {self._number} {len(self._all)} {self._world.scenario.seed}")
        latency_s, linger_s = self._world.scenario.latency_s, draw.random() * LINGER_S
        made = self.processes[name] = Process(
            name, host, world=self._world, latency_s=latency_s, draw=draw, linger_s=linger_s
        )
        self._all.append(made)
        return made

    def _replica(self, slot: int, name: str) -> ReplicaHandle:
        scenario = self._world.scenario
        host = ReplicaHost()
        process = self._process(name, host)
        weights = WeightVersion(0, INITIAL)
        replica = SimulatedReplica(
            name, world=self._world, weights=weights, token_s=scenario.token_s[slot], edge=scenario.edge
        )
        host._serve(cast(Replica, Observed(replica, process)))  # pyright: ignore[reportPrivateUsage]
        return ReplicaHandle(
            ReplicaAddress(actor=process, name=name, generate_timeout_s=GENERATE_S, control_timeout_s=CALL_S)
        )
