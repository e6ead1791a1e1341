"""Defects of the journal, of the content files, and of recovery from both."""

import asyncio
from dataclasses import replace

from async_rl.controller.resume import Resume
from async_rl.inference.publisher import Publisher
from async_rl.inference.supervisor import RestartLimit
from async_rl.rollout.content.format import row_checksum
from async_rl.rollout.content.reader import read_groups
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.group_contents import GroupContents
from async_rl.rollout.prompts import PromptSource
from async_rl.rollout.recorded import RecordedTrajectory, RolloutLog, RolloutLogError
from message_queue.events import Checkpointed
from message_queue.journal import EventJournal
from message_queue.recovery import recover
from message_queue.sqlite_file import checksum
from message_queue.state import QueueState
from tests.simulator.defects import defect


@defect("exactly once")
class QueueAnswersBeforeItWrites(EventJournal):
    def record(self, events):
        super().record(events)
        return asyncio.sleep(0)


@defect("exactly once")
class ContentIsStoredBeforeItIsWritten(ContentWriter):
    async def append(self, records):
        self.__dict__.setdefault("tasks", set()).add(asyncio.create_task(super().append(records)))


@defect("exactly once")
class GroupIsReadyBeforeItsContentIsStored(RolloutLog):
    async def flush(self):
        return


@defect("exactly once", "failure")
class TrainedContentIsRemovedBeforeTheCheckpoint(GroupContents):
    def trained(self, groups, *, train_step):
        super().trained(groups, train_step=train_step)
        self.__dict__.setdefault("tasks", set()).add(asyncio.create_task(self.drop(groups)))


@defect("exactly once", "failure", of=checksum, within="message_queue.journal", kinds=("events are damaged",))
def bad_checksum_of_an_event_is_ignored(*parts):
    return b""


@defect("provenance", "rows", "failure", of=row_checksum, kinds=("bits flip",))
def bad_checksum_of_content_is_ignored(*parts):
    return b""


@defect("exactly once", of=read_groups, kinds=("bits flip",))
def damage_is_not_reported(*args, **options):
    found, _ = read_groups(*args, **options)
    return found, []


@defect("exactly once")
class RestartRepeatsStepsOfTheCheckpoint(QueueState):
    def apply(self, event):
        if isinstance(event, Checkpointed):
            self.settled_step = event.train_step
        else:
            super().apply(event)


@defect("exactly once", "versions", of=recover)
def batches_are_not_repeated_unchanged(*args, **options):
    state, restored = recover(*args, **options)
    state.replay.clear()
    return state, replace(restored, replay=0)


@defect("versions", "failure", of=recover)
def version_goes_back_at_a_restart(*args, **options):
    state, restored = recover(*args, **options)
    return state, replace(restored, version=max(0, restored.version - 1))


@defect("versions", of=recover, kinds=("bits flip",))
def diverged_weights_get_their_old_version(*args, **options):
    state, restored = recover(*args, **options)
    return state, replace(restored, diverged=False)


@defect("exactly once")
class WaitingPromptsAreForgotten(Resume):
    def prompts(self, order, restored):
        again = restored.waiting if restored.began else ()
        return PromptSource(order, cursor=restored.prompt_cursor, unfinished=again)


@defect("exactly once")
class ToolRunsBeforeItsCallIsStored(RecordedTrajectory):
    async def start_call(self, call):
        return


@defect("failure", kinds=("disk fails", "disk is full", "disk stays full"))
class FailedJournalCostsAGroup(RolloutLog):
    async def flush(self):
        try:
            await super().flush()
        except RolloutLogError as error:
            raise error.__cause__ from None


@defect("failure", kinds=("trainer dies",))
class FailedTrainerEndsTheRun(RestartLimit):
    def allows_one_more(self):
        return False


@defect("failure", kinds=("queue dies",))
class PublishIsCutOffWithItsStage(Publisher):
    async def publish(self, update, *, probe=None):
        async with self._turn:
            return await self._publish(self._begun(update), self._pool.live, probe)
