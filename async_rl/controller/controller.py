"""The system on one page: four stages in one TaskGroup.

    feed --------> rollout --------> queue --------> train --------> publish
     ^  admitted     |  prompt group         batch     |  weights       |
     |               +--- aborted partials resume <----|----------------+
     +------------------ admission reopens when every replica serves the new version

    stage     consumes              produces              waits for                     is unblocked by
    feed      prompts, first the    admitted prompts      the staleness budget          publish, drops
              requeued ones
    rollout   admitted prompts      prompt groups         engines, tools                (nothing: it never blocks feed)
    train     batches of groups     gradients, versions   a batch the bound allows      rollout
    publish   versions              loaded replicas       every replica to load         train
    validate  requests              held-out success      engines                       train
    save      copies of the state   checkpoints           the disk                      train
    expire    expired groups       cancelled rollouts    the bound (drop, recycle)     train
    watch     signs of life         lost replicas         time                          (nothing)
    workers   their reports         new workers           rollout workers               (nothing)

All but train are endless and run in the background; train is finite and is the body. A failed
rollout is data (a dropped group with its reason); a failed stage is a crash with its cause. Only this module passes
values between stages.

After a restart `catch up` comes before `feed`: the batches that were taken after the checkpoint are trained once more
as they were, and the replicas get the weights. Then open groups continue in `rollout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_loop.loop import Prompt
from agent_loop.user_errors import Failure
from async_rl.controller.checkpoints import RunState
from async_rl.controller.parts import WATCH_EVERY_S, RunParts, StageError, Trainer, run_stage
from async_rl.controller.prepare import PreparedBatch, prepare, recorded_groups
from async_rl.inference.notifier import Notifier
from async_rl.inference.pool import Member
from async_rl.inference.publisher import PublishReport
from async_rl.inference.stub import Stub
from async_rl.metrics.registry import StepRecord, draft_metrics, queue_metrics
from async_rl.rollout.group_contents import GroupContents, fetched
from async_rl.rollout.prompts import PromptSource
from async_rl.rollout.recorded import require_closed
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.rollout.validator import ValidationSchedule, is_due
from async_rl.trainer.batch.advantage import PromptValues, has_spread
from async_rl.trainer.rank_methods import TrainerRank
from async_rl.weights.transport import WeightUpdate
from message_queue.heads import GroupHead
from message_queue.ledger import Drop, DropKind
from message_queue.queue import Batch, TrajectoryQueue
from message_queue.recovery import Restored
from message_queue.trajectory import Admission, Trajectory

if TYPE_CHECKING:
    from async_rl.cluster.queue import QueueClient
    from async_rl.config import RunConfig

PROMPT_KEYS = 1 << 16  # remembered, more than the groups between admission and training
NO_BATCH_LEFT = Drop(DropKind.EXPIRED, "no batch within the staleness bound is left for it")


class Controller:
    """Runs the stages until the last train step, a stop request, or a failed stage.

    Args:
        start: state of the checkpoint; the trainer holds its weights.
        restored: the queue's state of the run before; None if it has none and the replicas serve the weights.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: RunParts[Any],
        *,
        prompts: PromptSource,
        queue: QueueClient,
        contents: GroupContents,
        trainer: Trainer,
        start: RunState,
        restored: Restored | None = None,
    ) -> None:
        self._config = config
        self._per_batch = per_batch = config.trainer.updates_per_batch
        self._prompts = prompts
        self._contents = contents
        self._trainer = trainer
        self._rollouts = rollouts = parts.rollouts
        self._publisher = parts.publisher
        self._replicas, self._teachers = parts.replicas, parts.teachers
        self._recorder = parts.recorder
        self._trace = parts.trace
        self._weights_directory = parts.weights_directory
        self._schedule_replay = parts.schedule_replay
        self._probe = parts.probe
        self._stop = parts.stop
        self._checkpoints = parts.checkpoints
        self._train_step = start.train_step
        self._version = start.param_version
        self._loaded_version = 0
        self._version_updates = updates = dict(start.version_updates)
        self._values = PromptValues(config.advantage, start.prompt_values) if config.advantage.tracks_prompts else None
        self._key_of = lru_cache(PROMPT_KEYS)(lambda index: prompts.at(index).key)
        self._drain_records, replay = queue.drain_records, parts.schedule_replay
        self._queue: Stub[TrajectoryQueue] = queue if replay is None else replay.queue(queue, updates=updates)
        self._restored = restored
        self._replayed = start.train_step + (0 if restored is None else restored.replay) * per_batch
        self._admitted: asyncio.Queue[tuple[Prompt, Admission]] = asyncio.Queue(maxsize=1)
        self._updates: asyncio.Queue[WeightUpdate] = asyncio.Queue(maxsize=1)
        self._saves: asyncio.Queue[RunState] = asyncio.Queue(maxsize=1)
        validate = partial(rollouts.validate, parts.held_out, samples=config.validation.samples)
        self._validations = ValidationSchedule(
            validate if any(parts.held_out.values()) else None,
            every=config.validation.every,
            per_batch=per_batch,
            last=config.total_train_steps,
            recorder=parts.recorder,
            trace=parts.trace,
        )
        self._unscored: int | None = None  # version that the engines are asked about, and the trainer was not
        self._k3_probe = math.nan
        self._served = Notifier()  # rings when every replica serves a version
        self._last_publish = PublishReport(seconds=0.0, pause_seconds=0.0, aborted=0)
        self._failed_row: list[int] = []  # prompts of the groups that failed since one did not
        self._num_without_spread = 0  # groups dropped for that in a row
        ready = () if restored is None else (admission.group for admission in restored.ready)
        self._queued = {group: parts.trace.start("queue", group=group) for group in ready}
        self._unpublished: list[int] = []  # groups trained since the last export
        self._groups_of: dict[int, list[int]] = {}  # version -> groups trained since the one before
        if parts.stop.is_set():
            rollouts.end_soon()

    async def run(self) -> bool:
        """Run to the last train step; True if it got there, False after a stop request.

        Raises:
            ExceptionGroup: of StageError, the cause of each chained.
        """
        try:
            return await self._run()
        finally:
            if self._probe is not None:
                self._probe.cancel()

    async def _run(self) -> bool:
        timeout_s = self._config.sync.timeout_s
        async with asyncio.TaskGroup() as background:

            def start(name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
                stages[name] = background.create_task(run_stage(name, work), name=name)

            stages: dict[str, asyncio.Task[None]] = {}
            start("workers", self._rollouts.watch)
            start("save", self._finish_saves)
            if (restored := self._restored) is not None:
                await run_stage("catch up", lambda: self._replay_batches(restored))
            if self._train_step == 0 and (self._restored is None or self._restored.began):
                self._validations.request_first()
            start("feed", self._feed)
            start("rollout", self._rollout)
            start("expire", self._expire)
            start("publish", self._publish)
            start("validate", self._validations.run)
            start("watch", lambda: self._replicas.watch(every_s=WATCH_EVERY_S, timeout_s=timeout_s))
            for name, teacher in self._teachers.items():
                watch = partial(teacher.watch, every_s=WATCH_EVERY_S, timeout_s=timeout_s)
                start(f"watch teacher {name}", watch)
            try:
                await run_stage("train", self._train)
            except StageError:
                with contextlib.suppress(Exception):  # it must not hide why the stage failed
                    await self._drain_rollouts(stages)
                raise
            stages["feed"].cancel()
            if self._schedule_replay is not None:
                self._schedule_replay.finish()
            await self._updates.join()
            await run_stage("probe", lambda: self._compare(wait=True))
            await self._drain_rollouts(stages)
            await self._save()
            await self._saves.join()
            if finished := not self._stop.is_set():
                await self._validations.finish(self._train_step)
            for task in stages.values():
                task.cancel()
        return finished

    async def _drain_rollouts(self, stages: Mapping[str, asyncio.Task[None]]) -> None:
        """End the rollouts, with all that they generated written down."""
        if self._restored is not None:
            await self._publisher.abort_all()
            await self._rollouts.flush()
        stages["rollout"].cancel()
        await asyncio.wait({stages["rollout"]})
        if self._restored is not None:
            await self._publisher.resume()

    # ---- stages

    async def _replay_batches(self, restored: Restored) -> None:
        """Replay the batches trained after the checkpoint, then load the weights into the replicas."""
        if self._schedule_replay is not None:
            self._schedule_replay.resume(
                list(self._contents.unfinished.values()),
                train_step=self._train_step,
                cursor=self._prompts.cursor,
                updates=restored.version_updates,
            )
        self._version = max(self._version, restored.version)
        self._version_updates |= restored.version_updates
        first = self._train_step + (0 if restored.diverged else 1)
        for _ in range(restored.replay):
            await self._step(await self._queue.call(TrajectoryQueue.take), waited=0.0, started=_now(), busy=0.0)
        if not self._version and not restored.replay:
            return  # the replicas started with these weights
        known = self._version_updates[self._version] == self._train_step and not (restored.replay or restored.diverged)
        # Groups of the queue may name other weights after these updates, made with other settings.
        await self._trainer.call(TrainerRank.forget_versions, first, self._train_step)
        if not known:
            self._version += 1
            self._version_updates[self._version] = self._train_step
            await self._queue.call(TrajectoryQueue.publish, self._version, update=self._train_step)
        update = await self._write_weights()
        await self._snapshot_weights(update)
        await self._load(update)
        if not known:
            await self._save()

    async def _feed(self) -> None:
        while True:
            prompt = self._prompts.current()
            version = self._loaded_version
            with self._trace.span("admit") as span:
                admission = await self._queue.call(TrajectoryQueue.admit, prompt.index)
                reason = "staleness" if admission.admitted_version > version else "capacity"
                span.args |= {"group": admission.group, "reason": reason}
            if admission.prompt == prompt.index:
                self._prompts.advance()
            else:
                prompt = self._prompts.at(admission.prompt)
            await self._admitted.put((prompt, admission))

    async def _rollout(self) -> None:
        async with asyncio.TaskGroup() as groups:
            for admission in self._restored.open if self._restored is not None else ():
                prompt, group = self._prompts.at(admission.prompt), self._contents.unfinished.get(admission.group)
                existing = () if group is None else group.trajectories
                groups.create_task(self._roll(prompt, admission, existing=existing), name=f"group-{admission.group}")
            while True:
                prompt, admission = await self._admitted.get()
                groups.create_task(self._roll(prompt, admission), name=f"group-{admission.group}")

    async def _roll(self, prompt: Prompt, admission: Admission, *, existing: Sequence[Trajectory] = ()) -> None:
        if self._values is not None:
            self._key_of(prompt.index)  # now, because a source of rows may start over for an earlier index
        with self._trace.span("rollout", group=admission.group, version=admission.admitted_version):
            outcome, content = await self._rollouts.roll(prompt, admission, existing=existing)
        if isinstance(outcome, DroppedGroup):
            too_many = not outcome.expired and self._count_failed(prompt)
            await self._drop(outcome.group, outcome.reason, segments=outcome.segments, tokens=outcome.tokens)
            if outcome.expired:
                self._recorder.lengths.offered(outcome.lengths)
                return
            text = f"group {outcome.group} dropped: {outcome.reason}"
            self._recorder.warn_once(Failure(kind=outcome.reason.kind, line=outcome.line, text=text))
            if too_many:
                raise RuntimeError(
                    f"{self._config.rollout.max_failed_groups} groups in a row failed (rollout.max_failed_groups); the "
                    f"next start admits their prompts again; the last: {outcome.reason}"
                )
            return
        self._failed_row.clear()
        self._recorder.lengths.offered((t.num_sampled, True) for t in outcome.trajectories)
        if self._drops_without_spread(outcome):
            reason = Drop(DropKind.NO_SPREAD, f"the rewards of its {len(outcome.trajectories)} trajectories are equal")
            await self._drop(outcome.group, reason, segments=outcome.num_segments, tokens=outcome.num_tokens)
            return
        self._queued[outcome.group] = self._trace.start("queue", group=outcome.group)
        self._contents.add(outcome.group, content)
        expired = await self._queue.call(TrajectoryQueue.put, outcome)
        if expired is not None:
            self._end_queued([outcome.group], dropped=str(expired))
            await self._contents.drop([outcome.group])

    async def _drop(self, group: int, reason: Drop, *, segments: int, tokens: int) -> None:
        await self._queue.call(TrajectoryQueue.drop, group, reason=reason, segments=segments, tokens=tokens)
        await self._contents.drop([group])

    def _drops_without_spread(self, head: GroupHead) -> bool:
        """Whether a group is dropped because its rewards are equal; of a long row one is trained."""
        spread = any(has_spread(np.array(rewards)) for rewards in head.rewards_by_agent().values())
        if spread or self._num_without_spread == self._config.rollout.drop_without_spread:
            self._num_without_spread = 0
            return False
        self._num_without_spread += 1
        if (count := self._num_without_spread) >= 8 and count.bit_count() == 1:  # 8, 16, 32, ...
            self._recorder.warn(
                f"{count} groups in a row were dropped because all rewards of each are equal, and training waits; look "
                "at the rewards and at how hard the prompts are, or set rollout.drop_without_spread (it is "
                f"{self._config.rollout.drop_without_spread}) lower"
            )
        return True

    def _count_failed(self, prompt: Prompt) -> bool:
        """Whether its group is the one that stops the run. Others may fail until it has stopped."""
        self._failed_row.append(prompt.index)
        if len(self._failed_row) >= self._config.rollout.max_failed_groups:
            self._prompts.keep_failed(self._failed_row)
        return len(self._failed_row) == self._config.rollout.max_failed_groups

    async def _expire(self) -> None:
        known: set[int] = set()
        while True:
            expired = set(await self._queue.call(TrajectoryQueue.wait_expired, known=known))
            for group in sorted(expired - known):
                self._rollouts.cancel(group, reason=NO_BATCH_LEFT)
            known = expired

    async def _train(self) -> None:
        try:
            while self._train_step < self._config.total_train_steps:
                started, busy = _now(), await self._replicas.busy_seconds()
                step = self._train_step + self._per_batch
                with self._trace.span("wait", track="train", step=step):
                    batch = await self._take_or_stop()
                if batch is None:
                    return
                await self._step(batch, waited=_now() - started, started=started, busy=busy)
                self._validations.request(self._train_step)
                if is_due(self._train_step, every=self._checkpoints.every, per_batch=self._per_batch):
                    await self._save()
        finally:
            self._rollouts.end_soon()

    async def _publish(self) -> None:
        while True:
            update = await self._updates.get()
            await self._validations.first_done.wait()  # that round is of the start weights alone
            if self._schedule_replay is not None:
                await self._schedule_replay.may_load(self._version_updates[update.weights.version])
            await self._load(update)
            self._updates.task_done()

    # ---- parts of the train stage

    async def _take_or_stop(self) -> Batch | None:
        """The next batch, or None when a stop was requested first."""
        if self._stop.is_set():  # a take that needs no waiting would win each time
            return None
        take = asyncio.create_task(self._queue.call(TrajectoryQueue.take), name="take")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait((take, stop), return_when=asyncio.FIRST_COMPLETED)
            return take.result() if take.done() else None
        finally:
            for task in (take, stop):
                task.cancel()

    async def _step(self, batch: Batch, *, waited: float, started: float, busy: float) -> None:
        """Train on a batch, publish the weights if due, and record the step and the wait for the batch."""
        groups = [head.group for head in batch.groups]
        self._end_queued(groups)
        await self._start_probe(batch)
        with self._trace.span("train", step=self._train_step + self._per_batch, groups=groups):
            prepared, metrics = await self._train_on(batch)
        self._unpublished += groups
        due = is_due(self._train_step, every=self._config.sync.every, per_batch=self._per_batch)
        if due and self._train_step > self._replayed:
            await self._compare(wait=math.isnan(self._k3_probe))
            await self._export()
        seconds = max(1e-9, _now() - started)  # in virtual time a step may take none
        metrics["step/seconds"] = seconds
        metrics["idle/trainer"] = waited / seconds
        metrics["idle/rollout"] = max(0.0, 1.0 - (await self._replicas.busy_seconds() - busy) / seconds)
        drafts = self._replicas.drafts
        metrics |= draft_metrics(proposed=drafts.proposed, accepted=drafts.accepted)
        metrics["throughput/tokens_per_s"] = sum(prepared.gradient_tokens) / seconds
        self._recorder.lengths.trained(prepared.lengths)
        await self._record(prepared, metrics)

    async def _train_on(self, batch: Batch) -> tuple[PreparedBatch, dict[str, float]]:
        config, groups = self._config, [head.group for head in batch.groups]
        record, values = config.rollout.record, self._values
        keys = [] if values is None else [self._key_of(head.prompt) for head in batch.groups]
        prepared = await asyncio.to_thread(
            prepare,
            batch,
            self._contents.of(groups),
            config,
            version_updates=self._version_updates,
            expected=None if values is None else values.expected(batch.groups, keys),
        )
        recorded = recorded_groups(
            batch.groups,
            trajectories=record.trajectories if record.steps else 0,
            seed=config.seed,
            train_step=batch.update + self._per_batch,
        )
        metrics = await self._trainer.train(replace(prepared.batch, recorded=recorded))
        self._train_step += self._per_batch
        if values is not None:
            values.observe(batch.groups, keys, update=batch.update)
        await self._queue.call(
            TrajectoryQueue.trained, groups, train_step=self._train_step, tokens=prepared.gradient_tokens
        )
        self._contents.trained(groups, train_step=self._train_step)
        return prepared, metrics | dict(prepared.metrics)

    async def _export(self) -> None:
        self._version += 1
        self._version_updates[self._version] = self._train_step
        update = await self._write_weights()
        await self._queue.call(TrajectoryQueue.publish, self._version, update=self._train_step)
        await self._snapshot_weights(update)
        await self._updates.put(update)

    async def _write_weights(self) -> WeightUpdate:
        """Have the trainer write its weights as the newest version."""
        self._groups_of[self._version], self._unpublished = self._unpublished, []
        with self._trace.span("export", track="train", version=self._version):
            directory, keep = self._weights_directory, self._loaded_version
            update = await self._trainer.call(TrainerRank.export, directory, version=self._version, keep_version=keep)
        assert update is not None  # of rank 0
        return update

    async def _start_probe(self, batch: Batch) -> None:
        """With the first batch: take its prompts, and ask about the version that is served and that the trainer has."""
        if self._probe is None or self._probe.has_prompts or self._train_step < self._replayed:
            return
        groups = [head.group for head in batch.groups]
        self._probe.take_prompts(await fetched(self._contents.of(groups[: self._probe.num_prompts])))
        await self._trainer.call(TrainerRank.snapshot_weights)
        self._unscored = self._loaded_version
        self._probe.ask_all(version=self._loaded_version)

    async def _snapshot_weights(self, update: WeightUpdate) -> None:
        """Have the trainer keep the exported weights for a probe, unless it still keeps those of an earlier version."""
        if self._probe is not None and self._unscored is None:
            await self._trainer.call(TrainerRank.snapshot_weights)
            self._unscored = update.weights.version

    def _ask_about(self, update: WeightUpdate) -> Callable[[Member], None] | None:
        if self._probe is None or (version := update.weights.version) != self._unscored:
            return None
        return partial(self._probe.ask, version=version)

    async def _compare(self, *, wait: bool = False) -> None:
        """Compare engines and trainer by the version that the trainer keeps, if all answers are there or `wait`."""
        if self._probe is None or (version := self._unscored) is None:
            return
        if not (wait or (self._loaded_version >= version and self._probe.has_answers(version))):
            return
        with self._trace.span("probe", track="train", version=version):
            while self._loaded_version < version:
                await self._served.wait()
            self._k3_probe = await self._probe.compare(version, self._trainer)
        self._unscored = None

    async def _load(self, update: WeightUpdate) -> None:
        """Load a version on every replica, then let groups start on it."""
        version, digest = update.weights.version, update.weights.digest
        with self._trace.span("publish", version=version, digest=digest, groups=self._groups_of.pop(version)):
            self._last_publish = await self._publisher.publish(update, probe=self._ask_about(update))
        self._loaded_version = version
        await self._queue.call(TrajectoryQueue.loaded, version)
        self._served.notify_all()
        metrics = {"param_version": float(version), **self._last_publish.metrics()}
        self._recorder.published(self._version_updates[version], metrics)

    def _end_queued(self, groups: Iterable[int], **args: str) -> None:
        """End the spans of groups that leave the queue."""
        for group in groups:
            if (span := self._queued.pop(group, None)) is not None:
                span.args |= args
                self._trace.end(span)

    async def _record(self, prepared: PreparedBatch, metrics: dict[str, float]) -> None:
        snapshot = await self._queue.call(TrajectoryQueue.snapshot)
        metrics |= {"train_step": self._train_step, "param_version": self._version}
        metrics["optimizer_steps"] = self._per_batch
        metrics["mismatch/k3_probe"] = self._k3_probe
        metrics |= queue_metrics(snapshot) | self._last_publish.metrics() | self._rollouts.take_scoring()
        schedule = prepared.schedule if self._schedule_replay is None else None
        self._recorder.step(StepRecord(metrics=metrics, staleness_tokens=prepared.staleness_tokens, schedule=schedule))
        records = await self._drain_records()
        self._recorder.ledger(records)
        dropped = {record["group"]: record["reason"] or "" for record in records if record["outcome"] == "dropped"}
        for group, reason in dropped.items():
            self._end_queued([group], dropped=reason)
        await self._contents.drop(list(dropped))
        require_closed(snapshot.ledger, wrong=self._rollouts.tokens.settle(records))

    async def _save(self) -> None:
        """Begin a checkpoint between two batches, when the one before is written; nothing is taken meanwhile."""
        with self._trace.span("checkpoint", track="train", step=self._train_step):
            await self._saves.join()
            cursor, waiting = self._prompts.cursor, self._prompts.unfinished  # first: the snapshot has later ones
            await self._queue.call(TrajectoryQueue.sync)
            snapshot = await self._queue.call(TrajectoryQueue.snapshot)
            await self._checkpoints.begin(self._train_step, trainer=self._trainer)
        version = self._version
        state = RunState(
            train_step=self._train_step,
            param_version=version,
            version_updates=dict(self._version_updates),
            prompt_cursor=max([cursor, *(prompt + 1 for prompt in snapshot.prompts)]),
            unfinished_prompts=sorted({*snapshot.prompts, *waiting}),
            prompt_values={} if self._values is None else dict(self._values.state),
            queue=replace(snapshot, version=version, update=self._version_updates[version], closed=False),
        )
        self._saves.put_nowait(state)

    async def _finish_saves(self) -> None:
        """Complete checkpoints while the trainer continues."""
        while True:
            state = await self._saves.get()
            with self._trace.span("save", step=state.train_step):
                await self._checkpoints.finish(state, trainer=self._trainer, records=self._recorder)
            await self._queue.call(TrajectoryQueue.checkpointed, state.train_step)
            await self._contents.checkpointed(state.train_step)
            self._recorder.checkpointed.set()
            self._saves.task_done()


def _now() -> float:
    """Seconds on the clock of the event loop; the clock is virtual in a simulation."""
    return asyncio.get_running_loop().time()
