"""One start of the run: the parts of `async_rl.controller.launcher`, with simulated processes behind the clients."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from async_rl.cluster.queue import QueueClient, QueueHost
from async_rl.cluster.replica import REFUSALS, ReplicaClient, ReplicaHost
from async_rl.cluster.worker import RolloutHost, WorkerClient
from async_rl.controller.checkpoints import Checkpoints
from async_rl.controller.parts import RunParts
from async_rl.controller.recovery import RecoveryLoop, supervised
from async_rl.controller.resume import Resume
from async_rl.inference.pool import PoolReplica, ReplicaPool
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Dispatcher, Worker
from async_rl.rollout.task import TaskConfig, held_out_sets
from async_rl.simulator import model
from async_rl.simulator.agents import EXTERNAL, SimulatedTask, external_agent
from async_rl.simulator.engine import SimulatedReplica, SimulatedTrainer
from async_rl.simulator.processes import Observed, Process
from message_queue.errors import EngineError

if TYPE_CHECKING:
    from async_rl.simulator.world import World

CALL_S, STOP_S, START_S, LINGER_S = 30.0, 20.0, 2.0, 2.0


class WatchedDispatcher(Dispatcher):
    """tools_paused: whether every worker has agreed to start no tool."""

    tools_paused = False

    async def pause(self) -> None:
        await super().pause()
        self.tools_paused = True

    async def resume(self) -> None:
        self.tools_paused = False
        await super().resume()


class Run:
    """The parts of one start. processes: those that run, by name. trainer: the newest.

    Raises:
        ConfigError, ValueError: from the constructor, where the directory cannot be used.
    """

    def __init__(self, world: World, *, number: int) -> None:
        scenario = world.scenario
        self.processes: dict[str, Process] = {}
        self._all: list[Process] = []
        self._world = world
        self._number = number
        task = TaskConfig(factory=f"{SimulatedTask.__module__}:{SimulatedTask.__name__}", options={"world": world})
        self._config = config = replace(scenario.config, output_dir=world.directory, task=task)
        resume = Resume(config)
        self.recorder = Recorder(world.directory, console=None)
        self.trainer = SimulatedTrainer(world)
        replicas = [self._replica(slot, f"replica-{slot}") for slot in range(len(scenario.token_s))]
        self.pool = ReplicaPool(replicas, on_lost=self.recorder.warn)
        rollouts = self.rollouts = WatchedDispatcher(
            [self._worker(f"worker-{slot}") for slot in range(config.rollout.workers)],
            pool=self.pool,
            processes=self,
            config=config.supervision,
            note=self.recorder.warn,
        )
        publisher, supervisor = supervised(
            config, self.pool, rollouts=rollouts, start=self.replace_replica, note=self.recorder.warn
        )
        order = SimulatedTask(config.task.options, seed=config.seed)
        self.parts = RunParts(
            start_queue=self.start_queue,
            replace_trainer=self.replace_trainer,
            checkpoints=Checkpoints(config.output_dir / "checkpoints", config=config.checkpoint),
            publisher=publisher,
            replicas=supervisor,
            rollouts=rollouts,
            routing=model.ROUTING,
            recorder=self.recorder,
            trace=Trace(None),
            weights_directory=world.directory / "weights",
            held_out=held_out_sets(order.validation_prompts(config.validation.prompts)),
        )
        self.recovery = RecoveryLoop(config, self.parts, order=order.train_prompt, resume=resume)

    async def go(self) -> bool:
        """Run to the end or to what stops it, as `Launcher.run` does."""
        agents = [external_agent(self._world, n) for n in range(EXTERNAL * (self._world.scenario.agent == "external"))]
        outside = [asyncio.create_task(agent) for agent in agents]
        try:
            return await self.recovery.run(self.trainer)
        finally:
            for agent in outside:
                agent.cancel()
            self.recorder.close()

    def cut_off(self) -> None:
        """The driver is dead, and all processes with it."""
        for process in self._all:
            process.cut_off()

    def close_files(self) -> None:
        """Close all that is still open."""
        self.recorder.close()
        for process in self._all:
            for file in process.files:
                file.release()

    # ---- parts that may be lost; see `async_rl.controller.processes.Processes`

    async def start_queue(self) -> QueueClient:
        process = self._process("queue", QueueHost(self._config))
        client = QueueClient(process, timeout_s=self._config.queue.timeout_s)
        client.kill = partial(process.die, "killed by the driver")
        return client

    async def replace_trainer(self, lost: SimulatedTrainer) -> SimulatedTrainer:
        await asyncio.sleep(START_S)
        self.trainer = SimulatedTrainer(self._world)
        return self.trainer

    async def replace_replica(self, lost: PoolReplica, /, *, slot: int, name: str) -> ReplicaClient:
        self.processes[lost.name].die("killed by the driver")
        await asyncio.sleep(START_S)
        kind, seconds = self._world.fault("start")
        if kind == "replica does not start":
            raise EngineError(f"{name}: start failed: no room for the weights")
        successor = self._replica(slot, name)
        if kind == "successor dies":
            asyncio.get_running_loop().call_later(seconds, self.processes[name].die, "killed")
        return successor

    async def remove_worker(self, lost: Worker, *, pool: ReplicaPool) -> None:
        self.processes[lost.name].die("killed by the driver")
        await asyncio.sleep(LINGER_S)
        for member in pool.live_or_none:
            try:
                async with pool.calling(member):
                    await cast(ReplicaClient, member.replica).forget_client(lost.name)
            except EngineError:
                self.processes[member.name].die("killed by the driver")

    async def start_worker(self, *, slot: int, name: str, pool: ReplicaPool) -> WorkerClient:
        await asyncio.sleep(START_S)
        await pool.serving()
        return self._worker(name)

    # ---- processes

    def _worker(self, name: str) -> WorkerClient:
        host = RolloutHost()
        replicas = [member.replica for member in self.pool.live]
        host.serve(self._config, name=name, checkpoint=Path(), replicas=replicas)
        actor = cast(Any, self._process(name, host))
        return WorkerClient(actor, name=name, timeout_s=CALL_S, stop_timeout_s=STOP_S)

    def _replica(self, slot: int, name: str) -> ReplicaClient:
        host = ReplicaHost()
        replica = SimulatedReplica(name, world=self._world, token_s=self._world.scenario.token_s[slot])
        host.serve(Observed(replica), refusals=REFUSALS)
        return ReplicaClient(self._process(name, host), name=name, timeout_s=CALL_S)

    def _process(self, name: str, host: object) -> Process:
        draw = random.Random(f"{name} {self._number} {len(self._all)} {self._world.scenario.config.seed}")
        latency_s, linger_s = self._world.scenario.latency_s, draw.random() * LINGER_S
        made = self.processes[name] = Process(
            name, host, world=self._world, latency_s=latency_s, draw=draw, linger_s=linger_s
        )
        self._all.append(made)
        return made
