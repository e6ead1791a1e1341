"""Defects planted in the real code, each with the invariant that is broken by it. None may go unnoticed."""

from dataclasses import dataclass, replace

from agent_loop.decoder import SegmentDecoder
from agent_loop.tools import PauseGate, ToolRunner
from async_rl.cluster.rpc import BatchingClient
from async_rl.controller.checkpoints import RunState
from async_rl.controller.controller import Controller
from async_rl.inference.publisher import Publisher
from async_rl.metrics.recorder import Recorder
from async_rl.rollout.validator import Validator
from async_rl.simulator import engine
from message_queue.events import Loaded
from message_queue.policies import DropPolicy
from message_queue.queue import TrajectoryQueue
from message_queue.routing_rows import TrajectoryRows
from message_queue.sampling_support import SamplingSupport
from message_queue.state import QueueState
from message_queue.trajectory import Trajectory
from tests.simulator.restart_mutations import RESTART_MUTATIONS
from tests.simulator.staleness_mutations import STALENESS_MUTATIONS
from tests.simulator.worker_mutations import WORKER_MUTATIONS


@dataclass(frozen=True)
class Mutation:
    """plant: called with monkeypatch. broken: invariants, one of which is found broken.

    kinds: faults without one of which the defect cannot show, so that seeds without them need not be run.
    """

    plant: object
    broken: tuple[str, ...]
    kinds: tuple[str, ...] = ()

    def may_show(self, scenario):
        return not self.kinds or any(fault.kind in self.kinds for fault in scenario.faults)


def a_bound_that_is_one_too_large(patch):
    def is_expired(self, admitted_update, *, next_update):
        return self.staleness(admitted_update, next_update=next_update) > self.max_staleness + 1

    patch.setattr(DropPolicy, "is_expired", is_expired)


def a_lag_that_is_told_too_small(patch):
    whole = Controller._train_on

    async def train_on(self, batch):
        newest = max(self._version_updates[version] for group in batch.groups for version in group.tokens_per_version())
        return await whole(self, replace(batch, update=max(newest, batch.update - 1)))

    patch.setattr(Controller, "_train_on", train_on)


def rows_that_a_resumed_request_brings_again_are_appended(patch):
    whole = SegmentDecoder._request

    def request(self, trajectory, left):
        asked = whole(self, trajectory, left)
        return replace(asked, existing_rows=max(0, asked.existing_rows - 1))

    def add(self, rows, *, version):
        count = len(rows.experts) - max(0, self._count - rows.first_position)
        fresh = rows.experts[: max(0, count)]
        block = next(iter(_blocks_of(fresh, version)), None)
        if block is not None:
            self._append(block)

    patch.setattr(SegmentDecoder, "_request", request)
    patch.setattr(TrajectoryRows, "add", add)


def _blocks_of(experts, version):
    from message_queue.routing_rows import _Block

    if len(experts):
        yield _Block(len(experts), version, experts)


def rows_that_are_held_are_replaced_on_a_resume(patch):
    whole = Trajectory.__init__

    def init(self, *, routing, resume_routing="append"):
        whole(self, routing=routing, resume_routing="replace" if resume_routing == "append" else resume_routing)

    patch.setattr(Trajectory, "__init__", init)


def a_drop_that_is_not_counted(patch):
    whole = QueueState._drop

    def drop(self, event):
        whole(self, event)
        self._counts["dropped"] -= 1

    patch.setattr(QueueState, "_drop", drop)


def a_group_that_is_trained_without_a_record(patch):
    whole = Recorder.ledger

    def ledger(self, records):
        whole(self, [r for r in records if not (r["outcome"] == "trained" and r["group"] % 3 == 1)])

    patch.setattr(Recorder, "ledger", ledger)


def a_version_that_goes_back(patch):
    def load(self, version):
        self.served = max(0, version - 1) if version > 1 else version

    patch.setattr(QueueState, "_load", load)


def a_replica_that_is_left_out_of_a_publish(patch):
    whole = Publisher._load

    async def load(self, replica, update, **options):
        if replica.name == "replica-1":
            await replica.stats()
            return publisher_load(
                replica=replica.name, checksum=update.weights.digest, pause_seconds=0.0, aborted=0, frozen=0
            )
        return await whole(self, replica, update, **options)

    from async_rl.inference.publisher import _Load as publisher_load

    patch.setattr(Publisher, "_load", load)


def tokens_that_are_all_stamped_with_the_newest_version(patch):
    whole = engine.cut_into_segments

    def cut(request, *, spans, **of):
        return whole(request, spans=[(spans[-1][0], sum(count for _, count in spans))], **of)

    patch.setattr(engine, "cut_into_segments", cut)


def kept_tokens_that_move_by_one_token(patch):
    whole = SamplingSupport.part

    def part(self, start, stop):
        return whole(self, start - 1, stop - 1) if start else whole(self, start, stop)

    patch.setattr(SamplingSupport, "part", part)
    patch.setattr(SamplingSupport, "check", lambda self, token_ids, *, vocab_size: None)


def a_group_that_is_handed_out_twice(patch):
    whole = QueueState._take

    def take(self, event):
        first = self.find(event.groups[0], "ready")
        whole(self, event)
        if event.update == 1:
            self._insert(first)

    patch.setattr(QueueState, "_take", take)


def a_tool_that_runs_twice(patch):
    whole = ToolRunner.run

    async def run(self, calls):
        await whole(self, calls[:1])
        return await whole(self, calls)

    patch.setattr(ToolRunner, "run", run)


def a_resumed_request_that_gets_its_whole_budget_again(patch):
    whole = SegmentDecoder._request

    def request(self, trajectory, left):
        asked = whole(self, trajectory, left)
        return replace(asked, max_new_tokens=left + trajectory.turns[-1].num_sampled)

    patch.setattr(SegmentDecoder, "_request", request)


def a_new_version_that_wakes_nobody(patch):
    async def loaded(self, version):
        async with self._changed:
            written = self._commit(Loaded(version=version))
        await written

    patch.setattr(TrajectoryQueue, "loaded", loaded)


def tools_that_stay_paused(patch):
    patch.setattr(PauseGate, "resume", lambda self: None)


def a_put_that_wakes_nobody(patch):
    whole = TrajectoryQueue.put

    async def put(self, head):
        notify, self._changed.notify_all = self._changed.notify_all, lambda: None
        try:
            return await whole(self, head)
        finally:
            self._changed.notify_all = notify

    patch.setattr(TrajectoryQueue, "put", put)


def replies_that_come_later_and_are_never_collected(patch):
    patch.setattr(BatchingClient, "_received", lambda self, task: self._messages.discard(task))


def a_failed_validation_rollout_that_ends_the_run(patch):
    async def roll(self, prompt, trajectory, session):
        await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=session)

    patch.setattr(Validator, "_roll", roll)


def a_checkpoint_that_repeats_the_prompt_being_admitted(patch):
    async def save(self):
        snapshot = await self._queue.snapshot()
        await _save(self, _state(self, snapshot, self._prompts.cursor))

    patch.setattr(Controller, "_save", save)


def a_checkpoint_that_skips_the_prompt_being_admitted(patch):
    async def save(self):
        snapshot = await self._queue.snapshot()
        unfinished = [p for p in snapshot.prompts if p < self._prompts.cursor]
        await _save(self, replace(_state(self, snapshot, self._prompts.cursor), unfinished_prompts=unfinished))

    patch.setattr(Controller, "_save", save)


async def _save(pipeline, state):
    await pipeline._queue.sync()
    await pipeline._checkpoints.save(state, trainer=pipeline._trainer, records=pipeline._recorder)
    await pipeline._queue.checkpointed(pipeline._train_step)
    await pipeline._contents.checkpointed(pipeline._train_step)


def _state(pipeline, snapshot, cursor):
    version = pipeline._version
    return RunState(
        train_step=pipeline._train_step,
        param_version=version,
        version_updates=pipeline._version_updates,
        prompt_cursor=cursor,
        unfinished_prompts=sorted({*snapshot.prompts, *pipeline._prompts.unfinished}),
        queue=replace(snapshot, version=version, update=pipeline._version_updates[version], closed=False),
    )


MUTATIONS = {
    plant.__name__: Mutation(plant, broken, tuple(kinds))
    for plant, broken, *kinds in (
        (a_bound_that_is_one_too_large, ("staleness",)),
        (a_lag_that_is_told_too_small, ("staleness",)),
        (rows_that_a_resumed_request_brings_again_are_appended, ("rows",)),
        (rows_that_are_held_are_replaced_on_a_resume, ("rows",)),
        (a_drop_that_is_not_counted, ("ledger",)),
        (a_group_that_is_trained_without_a_record, ("ledger", "failure")),
        (a_version_that_goes_back, ("versions",)),
        (a_replica_that_is_left_out_of_a_publish, ("versions",)),
        (tokens_that_are_all_stamped_with_the_newest_version, ("provenance",)),
        (kept_tokens_that_move_by_one_token, ("provenance",)),
        (a_group_that_is_handed_out_twice, ("exactly once", "ledger")),
        (a_tool_that_runs_twice, ("exactly once",)),
        (a_resumed_request_that_gets_its_whole_budget_again, ("exactly once",)),
        (a_checkpoint_that_repeats_the_prompt_being_admitted, ("exactly once",)),
        (a_checkpoint_that_skips_the_prompt_being_admitted, ("exactly once",)),
        (replies_that_come_later_and_are_never_collected, ("progress", "failure")),
        (a_new_version_that_wakes_nobody, ("progress",)),
        (a_put_that_wakes_nobody, ("progress",)),
        (tools_that_stay_paused, ("progress",)),
        (a_failed_validation_rollout_that_ends_the_run, ("failure",), "reward fails", "tool is broken", "gives up"),
        *RESTART_MUTATIONS,
        *STALENESS_MUTATIONS,
        *WORKER_MUTATIONS,
    )
}
