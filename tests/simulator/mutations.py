"""Defects of decoding, advantages, the queue, versions and checkpoints; the other modules register theirs."""

from dataclasses import replace

import numpy as np
import pytest

from agent_loop.decoder import SegmentDecoder
from async_rl.cluster.batching import BatchingClient
from async_rl.cluster.replica import ReplicaClient
from async_rl.controller.checkpoints import Checkpoints
from async_rl.controller.controller import Controller
from async_rl.controller.prepare import prepare
from async_rl.inference.spans import cut_into_segments
from async_rl.metrics.recorder import Recorder
from async_rl.rollout.validator import Validator
from async_rl.trainer.batch.advantage import batch_rewards
from message_queue.events import Dropped, Loaded, Taken
from message_queue.queue import TrajectoryQueue
from message_queue.sampling_support import SamplingSupport
from message_queue.state import QueueState
from message_queue.tokens import StopReason
from message_queue.trajectory import Trajectory
from tests.simulator import restart_mutations, session_mutations, staleness_mutations, worker_mutations
from tests.simulator.defects import MUTATIONS, defect

__all__ = ["MUTATIONS", "restart_mutations", "session_mutations", "staleness_mutations", "worker_mutations"]


@defect("staleness", of=prepare)
def staleness_is_reported_too_small(batch, contents, config, *, version_updates, expected=None):
    newest = max(version_updates[version] for group in batch.groups for version in group.tokens_per_version())
    batch = replace(batch, update=max(newest, batch.update - 1))
    return prepare(batch, contents, config, version_updates=version_updates, expected=expected)


@defect("rows")
class ExistingRowsAreReplaced(Trajectory):
    def __init__(self, *, routing, resume_routing="append"):
        super().__init__(routing=routing, resume_routing="replace" if resume_routing == "append" else resume_routing)


@defect("ledger")
class DropIsNotCounted(QueueState):
    def apply(self, event):
        super().apply(event)
        if isinstance(event, Dropped):
            self._counts["dropped"] -= 1


@defect("ledger", "failure")
class TrainedGroupHasNoRecord(Recorder):
    def ledger(self, records):
        super().ledger([r for r in records if not (r["outcome"] == "trained" and r["group"] % 3 == 1)])


@defect("versions")
class VersionGoesBack(QueueState):
    def apply(self, event):
        super().apply(event)
        if isinstance(event, Loaded) and event.version > 1:
            self.served = event.version - 1


@defect("versions")
class ReplicaIsLeftOutOfPublish(ReplicaClient):
    async def call(self, method, /, *args, **options):
        name = method.__name__
        if self.name != "replica-1" or name not in ("load", "checksum"):
            return await super().call(method, *args, **options)
        if name == "load":
            self.claimed = args[0].weights
        return self.claimed if name == "load" else self.claimed.digest


@defect("provenance", of=cut_into_segments)
def tokens_are_all_of_the_newest_version(request, *, spans, **options):
    return cut_into_segments(request, spans=[(spans[-1][0], sum(count for _, count in spans))], **options)


@defect("provenance")
class KeptTokensMoveByOneToken(SamplingSupport):
    def part(self, start, stop):
        return super().part(start - 1, stop - 1) if start else super().part(start, stop)

    def check(self, token_ids, *, vocab_size):
        return


@defect("exactly once", "ledger")
class GroupIsHandedOutTwice(QueueState):
    def apply(self, event):
        first = self.ready.get(event.groups[0]) if isinstance(event, Taken) else None
        super().apply(event)
        if first is not None and event.update == 1:
            self._insert(first)


@defect("exactly once")
class ResumedRequestHasItsWholeBudgetAgain(SegmentDecoder):
    def _request(self, trajectory, left):
        request = super()._request(trajectory, left)
        return replace(request, max_new_tokens=left + trajectory.turns[-1].num_sampled)


@defect("progress")
class PutWakesNoWaiter(TrajectoryQueue):
    async def put(self, head):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._changed, "notify_all", lambda: None)
            return await super().put(head)


@defect("progress", "failure")
class LateRepliesAreNeverCollected(BatchingClient):
    def _received(self, task):
        self._messages.discard(task)


@defect("failure", kinds=staleness_mutations.FAILS[:3], seed=181)
class FailedValidationRolloutEndsTheRun(Validator):
    async def _roll(self, prompt, trajectory, *, number, place):
        session = f"validation{number}-{place}"
        await self._loop.run(prompt, trajectory=trajectory, session=session, cache_salt=session)


class SavesAnotherState(Controller):
    """edit: the state that is saved instead, from it and the prompt cursor."""

    def __init__(self, config, parts, *, prompts, **options):
        checkpoints = Checkpoints(config.output_dir / "checkpoints", config=config.checkpoint)
        finish = checkpoints.finish
        checkpoints.finish = lambda state, **of: finish(self.edit(state, prompts.cursor), **of)
        super().__init__(config, replace(parts, checkpoints=checkpoints), prompts=prompts, **options)


@defect("failure", of=Controller)
class QueueForgetsGroupsBeforeTheirCheckpointIsWritten(Controller):
    async def _save(self):
        await super()._save()
        await self._queue.call(TrajectoryQueue.checkpointed, self._train_step)


@defect("exactly once", of=Controller)
class CheckpointRepeatsThePromptBeingAdmitted(SavesAnotherState):
    def edit(self, state, cursor):
        return replace(state, prompt_cursor=cursor)


@defect("exactly once", of=Controller)
class CheckpointSkipsThePromptBeingAdmitted(SavesAnotherState):
    def edit(self, state, cursor):
        unfinished = [prompt for prompt in state.queue.prompts if prompt < cursor]
        return replace(state, prompt_cursor=cursor, unfinished_prompts=unfinished)


@defect("kept")
class AbortedPartialIsSampledAgain(SegmentDecoder):
    def _append(self, trajectory, answer):
        return answer[-1].stop_reason is not StopReason.ABORT and super()._append(trajectory, answer)


@defect("advantage", of=batch_rewards)
def advantages_are_those_of_the_next_rollout(groups, config):
    made = batch_rewards(groups, config)
    return replace(made, values=np.roll(made.values, 1))
