"""A run in virtual time, with the real decisions and without tokens.

real      queue, staleness policy, dispatcher, router, pool, publisher, gates of the replicas
planned   replicas (`replica.py`), rollouts (`worker.py`), trainer, and the loop of the controller, which here only
          feeds, takes, trains, exports, publishes, validates and saves, in the order of
          `async_rl.controller.controller`

If the cluster is larger than `MAX_REPLICAS` or its batch than `MAX_TRAJECTORIES`, a part of it is simulated: of N times
fewer replicas and groups, each as fast as before, with a trainer that trains N times the tokens. A thinned simulation
has N times fewer requests on the same replicas, each of which costs as much as N.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.loop import Message, Prompt
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import Publisher
from async_rl.metrics.registry import staleness_histogram
from async_rl.plan.description import Description
from async_rl.plan.replica import PlannedReplica, TracedSpan
from async_rl.plan.worker import GroupLengths, PlannedWorker
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.simulator.virtual_time import run_in_virtual_time
from async_rl.weights.transport import WeightUpdate
from message_queue.contract import Admission, Batch
from message_queue.heads import GroupHead
from message_queue.ledger import Drop, DropKind
from message_queue.policies import build_policy
from message_queue.queue import TrajectoryQueue
from message_queue.tokens import WeightVersion

MAX_REPLICAS, MAX_TRAJECTORIES = 64, 1024
LEAST_GROUPS = 8  # of a simulated batch
NO_TIMEOUT_S = 1e9
CLOSE_S = 1e-6
TEXT = (Message(role="user", content=""),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Figures of a simulated run, without its first steps."""

    step_s: float
    """Seconds of a train step."""
    tokens_per_s: float
    """Sampled tokens trained per second."""
    trainer_idle: float
    """Share of the time that the trainer waited for a batch."""
    rollout_idle: float
    """Share of the time that a replica had no running request, mean over replicas."""
    staleness_mean: float
    """Mean over trained tokens, in optimizer steps."""
    staleness_p99: int
    """99th percentile over trained tokens."""
    length_bias: float
    """Mean length in the loss of trained trajectories over that of all which ended."""
    open_share: float
    """Share of the time in which a trajectory was open."""
    open_tokens_per_s: float
    """Tokens sampled per second of that time."""
    sync_bytes_per_s: float
    """Weights that all replicas receive, mean over time."""
    rollout_bytes_per_s: float
    """Content that rollout workers receive, mean over time."""


@dataclass(slots=True)
class _Mark:
    """Counters at a moment."""

    at: float = 0.0
    steps: int = 0
    trained: int = 0
    sampled: float = 0.0
    waited: float = 0.0
    busy: float = 0.0
    open_s: float = 0.0


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
        thin_to: trajectories of a batch to which the part is thinned; None does not thin it.
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


@dataclass(frozen=True, slots=True)
class Traced:
    """Spans and batches of a simulated run, from its start."""

    spans: list[TracedSpan] = field(default_factory=list[TracedSpan])
    """Spans of all processes, with the kinds of `trace.json`."""
    batches: list[Batch] = field(default_factory=list[Batch])
    """Trained batches."""
    failed: list[GroupHead] = field(default_factory=list[GroupHead])
    """Groups that failed (`Interruptions.failed`)."""
    expired: list[DroppedGroup] = field(default_factory=list[DroppedGroup])
    """Groups that the staleness policy gave up while they were open."""


def simulate(
    description: Description, *, steps: int, seed: int = 0, traced: Traced | None = None, thin_to: int | None = None
) -> Seen:
    """A run with the split of the description.

    Args:
        traced: gets its spans and batches. thin_to: see `scale_of`.
    """
    return run_in_virtual_time(_simulated(description, steps=steps, seed=seed, traced=traced, thin_to=thin_to))


def simulate_synchronous(description: Description, *, steps: int, seed: int = 0) -> Seen:
    """The same with bound 0, on the GPUs that `cluster.synchronous` names."""
    bound = replace(description.staleness, max_staleness=0, policy="wait")
    publish = description.publish.model_copy(update={"mode": "at_once"})
    alone = replace(description, staleness=bound, publish=publish)
    colocated = description.cluster.synchronous == "colocated"
    return run_in_virtual_time(_simulated(alone, steps=steps, seed=seed, colocated=colocated))


async def _simulated(
    description: Description, *, steps: int, seed: int, traced: Traced | None = None, **options: Any
) -> Seen:
    return await _Run(description, seed=seed, traced=traced or Traced(), **options).run(steps)


class _Run:
    """One simulated run."""

    def __init__(
        self,
        description: Description,
        *,
        seed: int,
        traced: Traced,
        colocated: bool = False,
        thin_to: int | None = None,
    ) -> None:
        cluster, rates, publish = description.cluster, description.rates, description.publish
        self._description = description
        self._num_replicas = (cluster.gpus - (0 if colocated else cluster.train_gpus)) // cluster.gpus_per_replica
        self._train_gpus = cluster.gpus if colocated else cluster.train_gpus
        self._switch_s = rates.switch_s if colocated else 0.0
        self._scale = scale = scale_of(description, replicas=self._num_replicas, thin_to=thin_to)
        self._lengths = GroupLengths(description.workload, groups=scale.groups, scale=scale.groups_of, seed=seed)
        self._replicas = [
            PlannedReplica(
                f"replica-{n}",
                rates=rates.thinned(scale.requests_of),
                load_s=rates.load_s,
                staged=publish.mode == "staged",
                slow=description.interruptions.slow_replica if n == scale.replicas - 1 else 1.0,
                spans=traced.spans,
            )
            for n in range(scale.replicas)
        ]
        self._traced = traced
        self._failures = np.random.default_rng((seed, 1))
        self._ready: dict[int, float] = {}  # group -> when it was put
        self._validation: asyncio.Task[None] | None = None
        self._queue = TrajectoryQueue(build_policy(description.staleness, batch_groups=scale.groups))
        pool = ReplicaPool(self._replicas)
        worker = PlannedWorker(
            pool,
            workload=description.workload,
            lengths=self._lengths,
            seed=seed,
            on_open=self._on_open,
            spans=traced.spans,
        )
        self._worker = worker
        self._rollouts = Dispatcher([worker], pool=pool)
        paused = publish.max_paused * scale.replicas / self._num_replicas
        self._publisher = Publisher(
            pool,
            on_update=publish.on_update,
            kv=publish.kv,
            rollouts=self._rollouts,
            max_paused=max(1, round(paused)) if publish.mode == "rolling" else None,
            staged=publish.mode == "staged",
            timeout_s=NO_TIMEOUT_S,
        )
        self._admitted: asyncio.Queue[tuple[Prompt, Admission]] = asyncio.Queue(maxsize=1)
        self._updates: asyncio.Queue[WeightUpdate] = asyncio.Queue(maxsize=1)
        self._now, self._first = _Mark(), _Mark()
        self._open, self._open_since = 0, 0.0
        self._turned = asyncio.Event()  # set when the first trajectory opens, or the last one ends
        self._staleness = Counter[int]()
        self._trained_tokens = self._trained_trajectories = 0
        self._ended_tokens = self._ended_trajectories = 0

    async def run(self, steps: int) -> Seen:
        """Simulate `steps` steps after those in which the pipeline fills."""
        stages = [self._feed(), self._rollout(), self._expire(), self._publish()]
        tasks = [asyncio.create_task(stage) for stage in stages]
        train = asyncio.create_task(self._train(self._description.staleness.max_staleness + 2, steps))
        await asyncio.wait([train, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (train, *tasks):
            if task.done():
                task.result()
            task.cancel()
        if self._validation is not None:
            tasks.append(self._validation)
            self._validation.cancel()
        await asyncio.wait(tasks)
        return self._seen()

    # ---- stages, as those of the controller

    async def _feed(self) -> None:
        cursor = 0
        while True:
            with self._span("admit", reason="staleness"):
                admission = await self._queue.admit(cursor)
            cursor += admission.prompt == cursor
            await self._admitted.put((Prompt(index=admission.prompt, messages=TEXT), admission))

    async def _rollout(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                groups.create_task(self._roll(*await self._admitted.get()))

    async def _roll(self, prompt: Prompt, admission: Admission) -> None:
        with self._span("rollout", group=admission.group, version=admission.admitted_version):
            outcome, _ = await self._rollouts.roll(prompt, admission)
        if isinstance(outcome, DroppedGroup):
            self._traced.expired.append(outcome)
            await self._queue.drop(
                outcome.group, reason=outcome.reason, segments=outcome.segments, tokens=outcome.tokens
            )
            self._count_ended(prompt.index)
        elif self._failures.random() < self._description.interruptions.failed:
            self._traced.failed.append(outcome)
            reason = Drop(DropKind.ROLLOUT_FAILED, "as often as in the run")
            await self._queue.drop(
                outcome.group, reason=reason, segments=outcome.num_segments, tokens=outcome.num_tokens
            )
        else:
            self._ready[outcome.group] = asyncio.get_running_loop().time()
            if await self._queue.put(outcome) is not None:
                self._count_ended(prompt.index)

    async def _expire(self) -> None:
        known: set[int] = set()
        while True:
            expired = set(await self._queue.wait_expired(known=known))
            for group in sorted(expired - known):
                self._rollouts.cancel(group, reason=Drop(DropKind.EXPIRED, "no batch is left for it"))
            known = expired

    async def _train(self, skipped: int, steps: int) -> None:
        loop, rates = asyncio.get_running_loop(), self._description.rates
        for step in range(skipped + steps):
            if step == skipped:
                self._begin()
            started = loop.time()
            with self._span("wait", step=step + 1):
                batch = await self._queue.take()
            self._now.waited += loop.time() - started
            for group in batch.groups:
                ready = self._ready.pop(group.group)
                self._traced.spans.append(TracedSpan("controller", "queue", ready, loop.time(), {"group": group.group}))
            self._traced.batches.append(batch)
            with self._span("train", step=step + 1, groups=[group.group for group in batch.groups]):
                await self._train_on(batch, step + 1)
            if (step + 1) % self._description.publish.every == 0:
                with self._span("export"):
                    await asyncio.sleep(rates.export_s)
                await self._queue.publish(step + 1, update=step + 1)
                await self._updates.put(WeightUpdate(path=Path(), weights=WeightVersion(step + 1, str(step + 1))))
            await self._interrupt(step + 1)
        self._mark()

    async def _interrupt(self, step: int) -> None:
        """Start a validation and make a checkpoint after a step, if they are due."""
        interruptions = self._description.interruptions
        validates = interruptions.validation_trajectories and step % interruptions.validation_every == 0
        if validates and (self._validation is None or self._validation.done()):
            self._validation = asyncio.create_task(self._validate(step))
        if interruptions.checkpoint_s and step % interruptions.checkpoint_every == 0:
            with self._span("checkpoint"):
                await asyncio.sleep(interruptions.checkpoint_s)

    async def _validate(self, step: int) -> None:
        trajectories = self._description.interruptions.validation_trajectories
        with self._span("validate", step=step):
            await self._worker.roll_held_out(max(1, round(trajectories / self._scale.groups_of)), number=step)

    @contextlib.contextmanager
    def _span(self, kind: str, **args: Any) -> Generator[None]:
        """Trace the time in the context, unless it is none."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            yield
        finally:
            if loop.time() > started:
                self._traced.spans.append(TracedSpan("controller", kind, started, loop.time(), args))

    async def _train_on(self, batch: Batch, step: int) -> None:
        rates, tokens = self._description.rates, sum(t.length for g in batch.groups for t in g.trajectories)
        rate = rates.train_tokens_per_s * self._train_gpus
        await self._work(rates.train_s + tokens * self._scale.groups_of / rate)
        await asyncio.sleep(self._switch_s)
        await self._queue.trained([group.group for group in batch.groups], train_step=step)
        await self._queue.checkpointed(step)
        self._now.steps += 1
        histogram = staleness_histogram(
            batch.groups, update=batch.update, version_updates=batch.version_updates, min_update=batch.min_update
        )
        self._staleness.update(histogram)
        self._now.trained += sum(histogram.values())
        self._trained_tokens += sum(histogram.values())
        self._trained_trajectories += sum(len(group.trajectories) for group in batch.groups)
        for group in batch.groups:
            self._count_ended(group.prompt, group)

    async def _work(self, seconds: float) -> None:
        """Train for `seconds` at full speed; slower while a trajectory is open, if both share cores."""
        loop, shared = asyncio.get_running_loop(), self._description.rates.shared_speed
        if shared == 1:
            await asyncio.sleep(seconds)
            return
        for replica in self._replicas:
            replica.share(shared)
        while seconds > CLOSE_S:
            started, speed = loop.time(), shared if self._open else 1.0
            self._turned.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds / speed):
                    await self._turned.wait()
            seconds -= speed * (loop.time() - started)
        for replica in self._replicas:
            replica.share(1.0)

    async def _publish(self) -> None:
        while True:
            update = await self._updates.get()
            with self._span("publish", version=update.weights.version):
                await asyncio.sleep(self._description.rates.transfer_s)
                await self._publisher.publish(update)
            await self._queue.loaded(update.weights.version)

    # ---- figures

    def _on_open(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._open:
            self._now.open_s += now - self._open_since
        if bool(self._open) != bool(self._open + change):
            self._turned.set()
        self._open, self._open_since = self._open + change, now

    def _count_ended(self, prompt: int, group: GroupHead | None = None) -> None:
        """Count the lengths that a group has, or would have if it were not given up."""
        lengths = self._lengths.of(prompt) if group is None else [t.num_sampled for t in group.trajectories]
        self._ended_tokens += int(sum(lengths))
        self._ended_trajectories += len(lengths)

    def _mark(self) -> None:
        """Bring the counters to now."""
        self._on_open(0)
        for each in self._replicas:
            each.advance()
        self._now.at = asyncio.get_running_loop().time()
        self._now.sampled = sum(each.tokens for each in self._replicas)
        self._now.busy = sum(each.busy_s for each in self._replicas) / len(self._replicas)

    def _begin(self) -> None:
        """Figures are of the time from now on."""
        self._mark()
        self._first = replace(self._now)
        self._staleness.clear()
        self._trained_tokens = self._trained_trajectories = 0
        self._ended_tokens = self._ended_trajectories = 0

    def _seen(self) -> Seen:
        first, now, workload = self._first, self._now, self._description.workload
        rates, steps = self._description.rates, now.steps - first.steps
        seconds, open_s = now.at - first.at, now.open_s - first.open_s
        sampled = now.sampled - first.sampled
        cluster = self._scale.groups_of
        return Seen(
            step_s=seconds / steps,
            tokens_per_s=cluster * (now.trained - first.trained) / seconds,
            trainer_idle=(now.waited - first.waited) / seconds,
            rollout_idle=1 - (now.busy - first.busy) / seconds,
            staleness_mean=sum(lag * tokens for lag, tokens in self._staleness.items()) / self._staleness.total(),
            staleness_p99=_quantile(self._staleness, 0.99),
            length_bias=(self._trained_tokens / self._trained_trajectories)
            / (self._ended_tokens / self._ended_trajectories),
            open_share=open_s / seconds,
            open_tokens_per_s=cluster * sampled / open_s,
            sync_bytes_per_s=rates.model_bytes * self._num_replicas * steps / seconds / self._description.publish.every,
            rollout_bytes_per_s=cluster * workload.bytes_per_token * sampled / seconds,
        )


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least this share of the counts do not exceed."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return max(counts)
