"""A run in virtual time, with the real controller and without tokens.

real      controller, queue, staleness policy, dispatcher, router, pool, publisher, gates of the replicas
planned   replicas, trainer and checkpoints (`parts.py`), rollouts (`worker.py`), records (`figures.py`)

If the cluster is larger than `MAX_REPLICAS` or its batch than `MAX_TRAJECTORIES`, a part is simulated: of N times
fewer replicas and groups, each as fast as before, with a trainer that trains N times the tokens. A thinned simulation
has N times fewer requests on the same replicas, each as costly as N.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from agent_loop.loop import Message, Prompt
from async_rl.controller.checkpoints import RunState
from async_rl.controller.controller import Controller
from async_rl.controller.parts import RunParts, Trainer
from async_rl.files.rollouts import RecordConfig
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.metrics.trace import Trace
from async_rl.plan.description import Description
from async_rl.plan.figures import Figures, Seen
from async_rl.plan.parts import (
    OpenTrajectories,
    PlannedCheckpoints,
    PlannedReplica,
    PlannedTrainer,
    Replicas,
    Scale,
)
from async_rl.plan.worker import PlannedWorker
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.group_contents import GroupContents
from async_rl.rollout.prompts import PromptSource
from async_rl.simulator.standins import LocalQueue
from async_rl.simulator.virtual_time import run_in_virtual_time
from message_queue.policies import build_policy

if TYPE_CHECKING:
    from async_rl.cluster.queue import QueueClient
    from async_rl.config import RunConfig

MAX_REPLICAS, MAX_TRAJECTORIES = 64, 1024
LEAST_GROUPS = 8  # of a simulated batch
NO_TIMEOUT_S = 1e9


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
    return Scale(replicas, part, kept, groups / kept, simulated / kept)


def simulate(
    description: Description, *, steps: int, seed: int = 0, thin_to: int | None = None, directory: Path | None = None
) -> Seen:
    """A run with the split of the description.

    Args:
        steps: train steps after those that fill the pipeline.
        thin_to: see `scale_of`.
        directory: gets trace, metrics, schedule and ledger of the run; None writes no files.
    """
    cluster = description.cluster
    alone = replace(description, rates=description.rates.model_copy(update={"switch_s": 0.0}))
    scale = scale_of(alone, replicas=(cluster.gpus - cluster.train_gpus) // cluster.gpus_per_replica, thin_to=thin_to)
    return _seen(partial(_run, alone, scale, training=cluster.train_gpus, steps=steps, seed=seed), directory)


def simulate_synchronous(description: Description, *, steps: int, seed: int = 0) -> Seen:
    """The same with bound 0, on the GPUs that `cluster.synchronous` names."""
    cluster, bound = description.cluster, replace(description.staleness, max_staleness=0, policy="wait")
    publish = description.publish.model_copy(update={"mode": "at_once", "every": 1})
    alone = replace(description, staleness=bound, publish=publish)
    if cluster.synchronous == "split":
        return simulate(alone, steps=steps, seed=seed)
    scale = scale_of(alone, replicas=cluster.gpus // cluster.gpus_per_replica)
    return _seen(partial(_run, alone, scale, training=cluster.gpus, steps=steps, seed=seed))


def _seen(run: Callable[..., Coroutine[None, None, Seen]], directory: Path | None = None) -> Seen:
    """Figures of a run whose files are in a directory; None discards them."""
    with TemporaryDirectory(prefix="async_rl-plan-") as scratch:
        return run_in_virtual_time(run(to=directory or Path(scratch), with_trace=directory is not None))


async def _run(
    description: Description, scale: Scale, *, training: int, steps: int, seed: int, to: Path, with_trace: bool
) -> Seen:
    """Figures of one run.

    Args:
        training: GPUs of the trainer.
        steps: train steps after those that fill the pipeline.
        seed: for lengths, tools and failures.
        to: directory for the files of the run.
        with_trace: whether its trace is among them.
    """
    replicas, opened = _replicas(description, scale), OpenTrajectories()
    pool, trace = (
        ReplicaPool(replicas),
        Trace(to / "trace.json" if with_trace else None, clock=asyncio.get_running_loop().time),
    )
    worker = PlannedWorker(pool, description, scale, seed=seed, opened=opened)
    rollouts = Dispatcher([worker], pool=pool, trace=trace)
    figures = Figures(to, replicas=replicas, opened=opened, drawn=worker.drawn)
    trainer = PlannedTrainer(description, scale, gpus=training, replicas=replicas, opened=opened)
    skipped = description.staleness.max_staleness + 2
    publish = description.publish
    controller = Controller(
        _config(description, steps=skipped + steps),
        RunParts(
            start_queue=cast(Any, None),
            replace_trainer=cast(Any, None),
            publisher=Publisher(
                pool,
                on_update=publish.on_update,
                kv=publish.kv,
                rollouts=rollouts,
                max_paused=scale.part_of(publish.max_paused) if publish.mode == "rolling" else None,
                staged=publish.mode == "staged",
                timeout_s=NO_TIMEOUT_S,
                trace=trace,
            ),
            replicas=Replicas(replicas),
            rollouts=rollouts,
            routing=None,
            checkpoints=PlannedCheckpoints(description.interruptions),
            recorder=figures,
            trace=trace,
            weights_directory=Path(),
            held_out={"": _held_out(description, groups_of=scale.groups_of)},
        ),
        prompts=PromptSource(_prompt),
        queue=cast("QueueClient", LocalQueue(build_policy(description.staleness, batch_groups=scale.groups))),
        contents=GroupContents(),
        trainer=cast(Trainer, trainer),
        start=RunState(),
    )
    try:
        await controller.run()
    finally:
        figures.close()
    trace.write()
    return figures.seen(description, scale, skipped=skipped)


def _replicas(description: Description, scale: Scale) -> list[PlannedReplica]:
    rates, last = description.rates.thinned(scale.requests_of), scale.replicas - 1
    slow = description.interruptions.slow_replica
    return [PlannedReplica(f"replica-{n}", rates=rates, slow=slow if n == last else 1.0) for n in range(scale.replicas)]


def _config(description: Description, *, steps: int) -> RunConfig:
    from async_rl.simulator.scenario import run_config  # imports Hydra, which a command that plans nothing does without

    return run_config(
        {
            "total_train_steps": steps,
            "seed": 0,
            "staleness": description.staleness,
            "rollout.on_update": description.publish.on_update,
            "rollout.record": RecordConfig(steps=0),
            "sync.every": description.publish.every,
            "sync.timeout_s": NO_TIMEOUT_S,
            "validation.every": description.interruptions.validation_every,
        }
    )


def _held_out(description: Description, *, groups_of: float) -> Sequence[Prompt]:
    trajectories = description.interruptions.validation_trajectories
    count = max(1, round(trajectories / groups_of)) if trajectories else 0
    return [_prompt(index) for index in range(count)]


def _prompt(index: int) -> Prompt:
    """A prompt without text."""
    return Prompt(index=index, messages=(Message(role="user", content=""),))
