"""A run in virtual time, with the real controller and without tokens.

real      controller, queue, staleness policy, dispatcher, router, pool, publisher, gates of the replicas
planned   replicas (`replica.py`), rollouts (`worker.py`), trainer, checkpoints (`trainer.py`), records (`figures.py`)

If the cluster is larger than `MAX_REPLICAS` or its batch than `MAX_TRAJECTORIES`, a part is simulated: of N times
fewer replicas and groups, each as fast as before, with a trainer that trains N times the tokens. A thinned simulation
has N times fewer requests on the same replicas, each as costly as N.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt
from async_rl.controller.checkpoints import RunState
from async_rl.controller.controller import Controller
from async_rl.controller.parts import RunParts, Trainer
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.inference.stub import InProcess
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.plan.description import Description
from async_rl.plan.figures import Figures, OpenTrajectories, Seen
from async_rl.plan.replica import PlannedReplica, Replicas
from async_rl.plan.trainer import PlannedCheckpoints, PlannedTrainer
from async_rl.plan.worker import GroupLengths, PlannedWorker
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import GroupContents
from async_rl.rollout.prompts import PromptSource
from async_rl.simulator.virtual_time import run_in_virtual_time
from async_rl.trainer.batch.advantage import AdvantageConfig
from message_queue.ledger import LedgerRecord
from message_queue.policies import build_policy
from message_queue.queue import TrajectoryQueue

if TYPE_CHECKING:
    from async_rl.cluster.queue import QueueClient
    from async_rl.config import RunConfig

MAX_REPLICAS, MAX_TRAJECTORIES = 64, 1024
LEAST_GROUPS = 8  # of a simulated batch
NO_TIMEOUT_S = 1e9
TEXT = (Message(role="user", content=""),)


@dataclass(frozen=True, slots=True)
class Scale:
    """Simulated part of a cluster."""

    replicas: int
    """Simulated replicas."""
    groups: int
    """Simulated groups of a batch."""
    groups_of: float
    """Groups of the cluster for each simulated one."""
    requests_of: float
    """Requests of a replica for each simulated one."""


def scale_of(description: Description, *, replicas: int, thin_to: int | None = None) -> Scale:
    """The part of a cluster with that many replicas that is simulated.

    Args:
        thin_to: trajectories of a batch after thinning; None does not thin the part.
    """
    workload = description.workload
    groups, trajectories = workload.groups_per_batch, workload.groups_per_batch * workload.trajectories_per_group
    by = max(1.0, replicas / MAX_REPLICAS, trajectories / MAX_TRAJECTORIES)
    by = max(1.0, min(by, replicas, groups / LEAST_GROUPS))
    part = max(1, round(replicas / by))
    simulated = max(1, round(groups * part / replicas))
    most = max(LEAST_GROUPS, (thin_to or math.inf) / workload.trajectories_per_group)
    kept = simulated if simulated <= most else round(most)
    return Scale(part, kept, groups / kept, simulated / kept)


def simulate(
    description: Description, *, steps: int, seed: int = 0, thin_to: int | None = None, directory: Path | None = None
) -> Seen:
    """A run with the split of the description.

    Args:
        steps: train steps after those that fill the pipeline.
        thin_to: see `scale_of`.
        directory: gets trace, metrics, schedule and ledger of the run; None writes no files.
    """
    cluster, rates = description.cluster, description.rates.model_copy(update={"switch_s": 0.0})

    async def run() -> Seen:
        alone = replace(description, rates=rates)
        serving = cluster.gpus - cluster.train_gpus
        simulated = _Run(alone, serving=serving, training=cluster.train_gpus, seed=seed, thin_to=thin_to, to=directory)
        return await simulated.go(steps)

    return run_in_virtual_time(run())


def simulate_synchronous(description: Description, *, steps: int, seed: int = 0) -> Seen:
    """The same with bound 0, on the GPUs that `cluster.synchronous` names."""
    bound = replace(description.staleness, max_staleness=0, policy="wait")
    publish = description.publish.model_copy(update={"mode": "at_once"})
    alone = replace(description, staleness=bound, publish=publish)
    if description.cluster.synchronous == "split":
        return simulate(alone, steps=steps, seed=seed)

    async def run() -> Seen:
        gpus = description.cluster.gpus
        return await _Run(alone, serving=gpus, training=gpus, seed=seed).go(steps)

    return run_in_virtual_time(run())


class _Run:
    """One simulated run.

    Args:
        serving: GPUs of the replicas.
        training: GPUs of the trainer.
        seed: for lengths, tools and failures.
        thin_to: see `scale_of`.
        to: directory for the files of the run; None writes none.
    """

    def __init__(
        self,
        description: Description,
        *,
        serving: int,
        training: int,
        seed: int,
        thin_to: int | None = None,
        to: Path | None = None,
    ) -> None:
        self._description = description
        self._num_replicas = serving // description.cluster.gpus_per_replica
        self._scale = scale = scale_of(description, replicas=self._num_replicas, thin_to=thin_to)
        self._replicas = _replicas(description, scale)
        self._pool = ReplicaPool(self._replicas)
        opened, clock = OpenTrajectories(), asyncio.get_running_loop().time
        self._trace = Trace(None if to is None else to / "trace.json", clock=clock)
        lengths = GroupLengths(description.workload, groups=scale.groups, scale=scale.groups_of, seed=seed)
        worker = PlannedWorker(self._pool, description, lengths=lengths, seed=seed, opened=opened, clock=clock)
        self._rollouts = Dispatcher([worker], pool=self._pool, trace=self._trace)
        self._trainer = PlannedTrainer(
            description.rates, gpus=training, groups_of=scale.groups_of, replicas=self._replicas, opened=opened
        )
        self._files = None if to is None else Recorder(to, console=None)
        self._figures = Figures(self._replicas, opened=opened, drawn=worker.drawn, files=self._files)

    async def go(self, steps: int) -> Seen:
        """Simulate `steps` steps after those that fill the pipeline."""
        description, scale, workload = self._description, self._scale, self._description.workload
        skipped = description.staleness.max_staleness + 2
        parts = RunParts(
            start_queue=cast(Any, None),
            replace_trainer=cast(Any, None),
            publisher=self._publisher(),
            replicas=Replicas(self._replicas),
            rollouts=self._rollouts,
            routing=None,
            checkpoints=PlannedCheckpoints(description.interruptions),
            recorder=self._figures,
            trace=self._trace,
            weights_directory=Path(),
            held_out={"": _held_out(description, groups_of=scale.groups_of)},
        )
        controller = Controller(
            _config(description, steps=skipped + steps),
            parts,
            prompts=PromptSource(lambda index: Prompt(index=index, messages=TEXT)),
            queue=cast("QueueClient", _Queue(build_policy(description.staleness, batch_groups=scale.groups))),
            contents=GroupContents(),
            trainer=cast(Trainer, self._trainer),
            start=RunState(),
        )
        await controller.run()
        self._trace.write()
        if self._files is not None:
            self._files.close()
        trajectories = scale.groups * workload.trajectories_per_group
        return self._figures.seen(
            description,
            num_replicas=self._num_replicas,
            trajectories=trajectories,
            groups_of=scale.groups_of,
            skipped=skipped,
        )

    def _publisher(self) -> Publisher:
        publish, simulated = self._description.publish, self._scale.replicas / self._num_replicas
        return Publisher(
            self._pool,
            on_update=publish.on_update,
            kv=publish.kv,
            rollouts=self._rollouts,
            max_paused=max(1, round(publish.max_paused * simulated)) if publish.mode == "rolling" else None,
            staged=publish.mode == "staged",
            timeout_s=NO_TIMEOUT_S,
            trace=self._trace,
        )


def _replicas(description: Description, scale: Scale) -> list[PlannedReplica]:
    rates, last = description.rates.thinned(scale.requests_of), scale.replicas - 1
    staged, slow = description.publish.mode == "staged", description.interruptions.slow_replica
    return [
        PlannedReplica(f"replica-{n}", rates=rates, staged=staged, slow=slow if n == last else 1.0)
        for n in range(scale.replicas)
    ]


def _config(description: Description, *, steps: int) -> RunConfig:
    """What the controller reads of a run's settings; to make a whole RunConfig would import Hydra and torch."""
    values = SimpleNamespace(
        total_train_steps=steps,
        seed=0,
        advantage=AdvantageConfig(),
        rollout=SimpleNamespace(
            max_failed_groups=sys.maxsize,
            drop_without_spread=0,
            on_update=description.publish.on_update,
            kv="recompute",
            record=SimpleNamespace(steps=0, trajectories=0),
            sampling=SamplingConfig(),
        ),
        sync=SimpleNamespace(every=description.publish.every, timeout_s=NO_TIMEOUT_S),
        trainer=SimpleNamespace(updates_per_batch=1),
        validation=SimpleNamespace(every=description.interruptions.validation_every, samples=1),
    )
    return cast("RunConfig", values)


def _held_out(description: Description, *, groups_of: float) -> Sequence[Prompt]:
    trajectories = description.interruptions.validation_trajectories
    count = max(1, round(trajectories / groups_of)) if trajectories else 0
    return [Prompt(index=index, messages=TEXT) for index in range(count)]


class _Queue(InProcess, TrajectoryQueue):
    """A queue of the process itself."""

    _drained = 0

    async def drain_records(self) -> list[LedgerRecord]:
        records = await self.records_after(self._drained)
        self._drained += len(records)
        return records
