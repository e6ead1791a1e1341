"""One start of the run: builds what `async_rl.program.Program` builds, with simulated processes behind the handles."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop.engine import SamplingConfig
from agent_loop.loop import Prompt, TurnLimits
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools import PauseGate, ToolRunner
from async_rl.actors import ReplicaHost
from async_rl.batch.advantage import AdvantageConfig
from async_rl.checkpoints import CheckpointConfig, Checkpoints, RunState, SavesTrainer
from async_rl.data.prompts import PromptSource
from async_rl.handles import ReplicaHandle
from async_rl.observe.recorder import Recorder, StepRecord
from async_rl.observe.trace import Trace
from async_rl.pipeline import Pipeline, PipelineConfig
from async_rl.rollout.fleet import ReplicaFleet
from async_rl.rollout.rollouter import FailureConfig, Rollouter
from async_rl.rollout.routing import ReplicaRouter
from async_rl.rollout.validator import ValidationResult, Validator
from async_rl.simulate import model
from async_rl.simulate.engine import SimulatedReplica
from async_rl.simulate.processes import Process
from async_rl.simulate.trainer import INITIAL, ParityReward, SimulatedTrainer, session_of_task
from async_rl.weights.publisher import Publisher
from message_queue.client import QueueClient, QueueClientConfig
from message_queue.contract import Batch, QueueSnapshot
from message_queue.service import QueueService
from message_queue.staleness import StalenessConfig
from message_queue.tokens import WeightVersion
from message_queue.trajectory import PromptGroup, Trajectory

if TYPE_CHECKING:
    from async_rl.simulate.world import World

CALL_S, GENERATE_S, ROLLOUT_S, TOOL_S = 30.0, 90.0, 200.0, 5.0
QUEUE = {"timeout_s": 30.0, "slice_s": 5.0}


class _Silent:
    """A console and TensorBoard writer that show nothing."""

    def step(self, record: StepRecord) -> None: ...
    def validation(self, train_step: int, result: ValidationResult) -> None: ...
    def note(self, text: str) -> None: ...
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def close(self) -> None: ...


class _WatchedQueue(QueueClient):
    """Tells the oracle which groups the driver gets."""

    world: World

    async def take(self) -> Batch[PromptGroup]:
        batch = await super().take()
        self.world.note("driver", "takes", *(g.group for g in batch.groups))
        self.world.oracle.taken(batch)
        return batch


class _Session:
    """An agent loop in which a tool can tell whose call it is."""

    def __init__(self, loop: ToolUseLoop) -> None:
        self._loop = loop

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        session_of_task.set(session)
        await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=cache_salt)


class _WatchedCheckpoints(Checkpoints):
    """Has the oracle judge each checkpoint. A start has no journal here, so a checkpoint names what it publishes."""

    world: World

    async def save(self, state: RunState, *, trainer: SavesTrainer) -> Path:
        state = with_next_version(state)
        path = await super().save(state, trainer=trainer)
        self.world.checkpointed(state)
        return path


def with_next_version(state: RunState) -> RunState:
    """The state with the version under which a restart publishes its weights."""
    step = state.train_step
    version = state.param_version + (state.version_updates[state.param_version] < step)
    return replace(
        state,
        param_version=version,
        version_updates={**state.version_updates, version: step},
        queue=replace(state.queue, version=version, update=step),
    )


def checkpoints_of(world: World) -> Checkpoints:
    """The checkpoints that all starts share."""
    config = CheckpointConfig(every=world.scenario.checkpoint_every)
    made = _WatchedCheckpoints(world.directory / "checkpoints", config=config)
    made.world = world
    return made


class Run:
    """The parts of one start. processes: by name. state: where it starts."""

    def __init__(self, world: World, *, number: int, state: RunState) -> None:
        scenario = world.scenario
        self.state = state
        self.processes: dict[str, Process] = {}
        self._world = world
        self._number = number
        self._directory = world.directory / f"start-{number}"
        self._service = QueueService(
            batch_groups=scenario.batch_groups,
            staleness=StalenessConfig(
                max_staleness=scenario.max_staleness, policy=scenario.policy, max_recycles=scenario.max_recycles
            ),
            max_ready=scenario.max_ready,
            restored=state.queue,
        )
        queue = _WatchedQueue(
            self._process("queue", self._service),
            name="driver",
            routing=model.ROUTING,
            config=QueueClientConfig(**QUEUE, rank_code_rows=scenario.rank_code_rows),
        )
        queue.world = world
        self._gate = PauseGate()
        self.trainer = SimulatedTrainer(world)
        self.fleet = ReplicaFleet([self._replica(i) for i in range(scenario.replicas)], on_lost=self._lost)
        self.publisher = Publisher(
            self.fleet, on_update=scenario.on_update, kv=scenario.kv, tools=self._gate, timeout_s=CALL_S
        )
        self.recorder = Recorder(self._directory, console=_Silent(), scalars=_Silent())
        self.queue = queue
        self.pipeline = self._build_pipeline()

    async def go(self) -> bool:
        """Run to the end or to what stops it, as `Program.run` does."""
        try:
            latest = checkpoints_of(self._world).latest()
            if latest is not None:
                await self.trainer.restore(latest / "trainer")
                version = self.state.param_version
                await self.publisher.publish(await self.trainer.export(self._directory, version=version))
            try:
                return await self.pipeline.run()
            finally:
                self.recorder.ledger(await self.queue.closing_records())
        finally:
            self.recorder.close()

    def queue_state(self) -> QueueSnapshot:
        """What the queue holds now."""
        return self._service._queue.snapshot()  # pyright: ignore[reportPrivateUsage]

    def records(self) -> list[Any]:
        """What became of the groups of this start, whoever was told."""
        told = self.ledger_lines()
        return [*told, *(record for record in self.untold_records() if record not in told)]

    def untold_records(self) -> list[Any]:
        """Those of them that the queue holds still."""
        ended = self._service._queue._ledger._ended  # pyright: ignore[reportPrivateUsage]
        return [*self._service._records, *ended]  # pyright: ignore[reportPrivateUsage]

    def ledger_lines(self) -> list[Any]:
        """`ledger.jsonl`."""
        return [json.loads(line) for line in (self._directory / "ledger.jsonl").read_text().splitlines()]

    # ---- parts

    def _process(self, name: str, host: object) -> Process:
        draw = random.Random(f"{name} {self._number} {self._world.scenario.seed}")
        latency_s = self._world.scenario.latency_s
        made = self.processes[name] = Process(name, host, world=self._world, latency_s=latency_s, draw=draw)
        return made

    def _replica(self, index: int) -> ReplicaHandle:
        name, scenario = f"replica-{index}", self._world.scenario
        host = ReplicaHost()
        process = self._process(name, host)
        weights = WeightVersion(0, INITIAL)
        replica = SimulatedReplica(
            name, world=self._world, weights=weights, token_s=scenario.token_s[index], edge=scenario.edge
        )
        process.run_inside(host._serve, replica)  # pyright: ignore[reportPrivateUsage]
        handle: Any = process
        return ReplicaHandle(handle, name=name, generate_timeout_s=GENERATE_S, control_timeout_s=CALL_S)

    def _lost(self, text: str) -> None:
        self._world.note("fleet", text)

    def _build_pipeline(self) -> Pipeline:
        world, scenario, state = self._world, self._world.scenario, self.state
        limits = TurnLimits(
            max_turns=scenario.max_turns,
            max_tokens=scenario.max_tokens,
            tool_timeout_s=TOOL_S,
            reward_timeout_s=TOOL_S,
            generate_timeout_s=ROLLOUT_S,
        )
        loop = _Session(
            ToolUseLoop(
                engine=ReplicaRouter(self.fleet),
                chat=world.chat,
                tools=ToolRunner([world.tool], timeout_s=TOOL_S, gate=self._gate),
                reward=ParityReward(world),
                limits=limits,
                sampling=SamplingConfig(),
            )
        )
        held_out = [world.train_prompt(900 + i) for i in range(2)]
        validator = Validator(
            loop=loop, routing=model.ROUTING, prompts=held_out, resume_routing=scenario.resume_routing
        )
        return Pipeline(
            config=PipelineConfig(
                total_train_steps=scenario.steps,
                publish_every=scenario.publish_every,
                validate_every=1 if scenario.validation else 0,
                max_failed_groups=1 << 30,
                advantage=AdvantageConfig(),
                kept_kv=scenario.kv == "keep",
                weights_directory=self._directory / "weights",
                replica_timeout_s=CALL_S,
            ),
            prompts=PromptSource(world, cursor=state.prompt_cursor, unfinished=state.unfinished_prompts),
            queue=self.queue,
            rollouter=Rollouter(
                loop=loop,
                routing=model.ROUTING,
                trajectories_per_group=scenario.trajectories_per_group,
                resume_routing=scenario.resume_routing,
                failure=FailureConfig(on_failed=scenario.on_failed),
            ),
            trainer=self.trainer,
            publisher=self.publisher,
            replicas=self.fleet,
            validator=validator if scenario.validation else None,
            checkpoints=checkpoints_of(world),
            recorder=self.recorder,
            trace=Trace(None),
            start=state,
        )
