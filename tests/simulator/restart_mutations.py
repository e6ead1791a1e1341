"""Defects planted in the journal, in the content files, and in recovery from both."""

import asyncio
import contextlib
from dataclasses import replace

import msgspec

from async_rl.controller import recovery as controller_recovery
from async_rl.controller.resume import Resume
from async_rl.inference import publisher
from async_rl.inference.publisher import Publisher
from async_rl.inference.supervisor import RestartLimit
from async_rl.rollout import group_contents
from async_rl.rollout.group_contents import GroupContents
from async_rl.rollout.prompts import PromptSource
from async_rl.rollout.recorded import RecordedTrajectory, StoredRolloutLog
from message_queue import content, content_reader, journal, recovery
from message_queue.content import ContentWriter
from message_queue.journal import EventJournal
from message_queue.state import QueueState
from message_queue.trajectory import Trajectory


def a_queue_that_answers_before_it_writes(patch):
    whole = EventJournal.record

    def record(self, events):
        whole(self, events)
        return asyncio.sleep(0)

    patch.setattr(EventJournal, "record", record)


def content_that_counts_as_stored_before_it_is_written(patch):
    whole = ContentWriter.append

    async def append(self, records):
        self.__dict__.setdefault("tasks", set()).add(asyncio.create_task(whole(self, records)))

    patch.setattr(ContentWriter, "append", append)


def a_group_that_is_ready_before_its_content_is_stored(patch):
    async def flush(self):
        return

    patch.setattr(StoredRolloutLog, "flush", flush)


def content_of_a_trained_group_that_is_removed_before_the_checkpoint(patch):
    whole = GroupContents.trained

    def trained(self, groups, *, train_step):
        whole(self, groups, train_step=train_step)
        self.__dict__.setdefault("tasks", set()).add(asyncio.create_task(self.drop(groups)))

    patch.setattr(GroupContents, "trained", trained)


def a_recovery_that_skips_a_ready_group(patch):
    def edit(groups):
        ready = [group for group in groups if group.life == "ready"]
        return [group for group in groups if group not in ready[-1:]]

    _patch_restarted(patch, edit=edit)


def _patch_restarted(patch, *, edit=list, after=lambda state: None):
    whole = recovery._restarted

    def restarted(stored, place, **of):
        made = whole(msgspec.structs.replace(stored, groups=tuple(edit(stored.groups))), place, **of)
        after(made[0])
        return made

    patch.setattr(recovery, "_restarted", restarted)


def a_recovery_that_forgets_what_was_generated(patch):
    whole = group_contents.read_groups

    def read(directory, groups, **of):
        found = whole(directory, groups, **of)
        for group in found.groups.values():
            if not group.closed:
                group.trajectories = [Trajectory(routing=of["routing"]) for _ in group.trajectories]
        return found

    patch.setattr(group_contents, "read_groups", read)


def a_bad_checksum_of_an_event_that_is_ignored(patch):
    patch.setattr(journal, "checksum", lambda *parts: b"")


def a_bad_checksum_of_content_that_is_ignored(patch):
    for module in (content, content_reader):
        patch.setattr(module, "row_checksum", lambda *of: b"")


def damage_that_is_not_reported(patch):
    whole = content_reader.read_groups
    patch.setattr(group_contents, "read_groups", lambda *args, **of: whole(*args, **of)._replace(notes=[]))


def a_restart_that_trains_again_what_the_checkpoint_holds(patch):
    def settle(self, train_step):
        self.settled_step = train_step

    patch.setattr(QueueState, "_settle", settle)


def batches_that_are_not_trained_again_as_they_were(patch):
    patch.setattr(recovery, "_replayed", lambda *of, **by: ())


def _patch_restored(patch, edit):
    recover = recovery.recover

    def edited(*args, **of):
        state, restored = recover(*args, **of)
        return state, edit(restored)

    patch.setattr(recovery, "recover", edited)


def a_version_that_goes_back_at_a_restart(patch):
    _patch_restored(patch, lambda made: replace(made, version=max(0, made.version - 1)))


def weights_that_are_not_made_again_under_their_old_version(patch):
    _patch_restored(patch, lambda made: replace(made, diverged=False))


def prompts_that_wait_for_their_turn_and_are_forgotten(patch):
    def prompts(self, order, restored):
        again = restored.waiting if restored.began else ()
        return PromptSource(order, cursor=restored.prompt_cursor, unfinished=again)

    patch.setattr(Resume, "prompts", prompts)


def a_tool_that_runs_before_that_is_written_down(patch):
    async def begin_call(self, call):
        return

    patch.setattr(RecordedTrajectory, "begin_call", begin_call)


def replicas_that_are_left_on_hold(patch):
    async def resume(self):
        return

    patch.setattr(Publisher, "resume", resume)


def a_journal_that_fails_and_costs_a_group(patch):
    async def flush(self):
        wanted = self._num_appended
        while self._failure is None and self._num_written < wanted:
            await self._progress.wait()
        if self._failure is not None:
            raise self._failure

    patch.setattr(StoredRolloutLog, "flush", flush)


def a_queue_that_is_lost_at_the_end_and_nobody_notices(patch):
    whole = controller_recovery.RecoveryLoop._close

    async def close(self, queue):
        with contextlib.suppress(Exception):
            await whole(self, queue)

    patch.setattr(controller_recovery.RecoveryLoop, "_close", close)


def a_lost_trainer_that_ends_the_run(patch):
    patch.setattr(RestartLimit, "allows_one_more", lambda self: False)


def a_publish_that_is_cut_off_with_its_stage(patch):
    async def to_its_end(work):
        return await work

    patch.setattr(publisher, "_to_its_end", to_its_end)


RESTART_MUTATIONS = (
    (a_publish_that_is_cut_off_with_its_stage, ("failure",), "queue dies"),
    (a_queue_that_answers_before_it_writes, ("exactly once",)),
    (content_that_counts_as_stored_before_it_is_written, ("exactly once",)),
    (a_group_that_is_ready_before_its_content_is_stored, ("exactly once",)),
    (content_of_a_trained_group_that_is_removed_before_the_checkpoint, ("exactly once", "failure")),
    (a_recovery_that_skips_a_ready_group, ("exactly once",)),
    (a_recovery_that_forgets_what_was_generated, ("exactly once",)),
    (a_bad_checksum_of_an_event_that_is_ignored, ("exactly once", "failure"), "events are damaged"),
    (a_bad_checksum_of_content_that_is_ignored, ("provenance", "rows", "failure"), "bits flip"),
    (damage_that_is_not_reported, ("exactly once",), "bits flip"),
    (a_restart_that_trains_again_what_the_checkpoint_holds, ("exactly once",)),
    (batches_that_are_not_trained_again_as_they_were, ("exactly once", "versions")),
    (a_version_that_goes_back_at_a_restart, ("versions", "failure")),
    (weights_that_are_not_made_again_under_their_old_version, ("versions",), "bits flip"),
    (prompts_that_wait_for_their_turn_and_are_forgotten, ("exactly once",)),
    (a_tool_that_runs_before_that_is_written_down, ("exactly once",)),
    (replicas_that_are_left_on_hold, ("failure", "progress"), "queue dies"),
    (a_journal_that_fails_and_costs_a_group, ("failure",), "disk fails", "disk is full", "disk stays full"),
    (a_queue_that_is_lost_at_the_end_and_nobody_notices, ("ledger",), "queue dies", "queue hangs"),
    (a_lost_trainer_that_ends_the_run, ("failure",), "trainer dies"),
)
