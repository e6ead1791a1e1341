"""Defects planted in the journal, in what writes it, and in what goes on from it."""

import contextlib
from dataclasses import replace

import pytest

from async_rl import lives
from async_rl.data.prompts import PromptSource
from async_rl.handles import TrainerLostError
from async_rl.resume import Resume
from async_rl.rollout.recorded import QueueRolloutLog, RecordedTrajectory
from async_rl.rollout.supervisor import RestartLimit
from async_rl.weights import publisher
from async_rl.weights.publisher import Publisher
from message_queue import log, restart, start
from message_queue.client import QueueUnavailable
from message_queue.journal import Journal
from message_queue.journal import format as format_
from message_queue.journal.errors import disk_error
from message_queue.journal.files import JournalFiles
from message_queue.journal.state import JournalState
from message_queue.service import QueueService
from message_queue.trajectory import Trajectory


def a_queue_that_answers_before_it_writes(patch):
    patch.setattr(log._Writing, "__await__", log.Written.__await__)


def a_sync_that_does_nothing(patch):
    def sync(self):
        self.require_whole()
        self.dirty = False

    patch.setattr(JournalFiles, "sync", sync)


def a_checkpoint_that_is_ahead_of_the_disk(patch):
    async def sync(self):
        return

    patch.setattr(QueueService, "sync", sync)


def a_recovery_that_skips_a_ready_group(patch):
    whole = restart.start_of_journal

    def start(recovered, groups, **of):
        return whole(replace(recovered, ready=recovered.ready[:-1]), groups, **of)

    patch.setattr(restart, "start_of_journal", start)


def a_recovery_that_forgets_what_was_generated(patch):
    whole = Journal.read

    async def read(self, group, *, routing):
        held = await whole(self, group, routing=routing)
        if held.closed:
            return held
        return replace(held, trajectories=[Trajectory(routing=routing) for _ in held.trajectories])

    patch.setattr(Journal, "read", read)


def a_bad_checksum_that_is_ignored(patch):
    patch.setattr(format_, "zlib", _NoChecksums)


class _NoChecksums:
    @staticmethod
    def crc32(data, value=0):
        return 0


def a_restart_that_trains_again_what_the_checkpoint_holds(patch):
    def settle(self, train_step):
        self.settled_step = max(self.settled_step, train_step)
        return []

    whole = JournalState.restart
    patch.setattr(JournalState, "end_by", lambda self, start: [])

    def restart_(self, start):
        with pytest.MonkeyPatch.context() as within:
            within.setattr(JournalState, "_settle", settle)
            return whole(self, start)

    patch.setattr(JournalState, "restart", restart_)


def batches_that_are_not_trained_again_as_they_were(patch):
    patch.setattr(start, "_replayed", lambda *of, **by: ())


def a_version_that_goes_back_at_a_restart(patch):
    whole = restart.restored_of

    def restored(recovered, start, groups):
        made = whole(recovered, start, groups)
        return replace(made, version=max(0, made.version - 1))

    patch.setattr(restart, "restored_of", restored)


def weights_that_are_not_made_again_under_their_old_version(patch):
    whole = restart.restored_of
    patch.setattr(restart, "restored_of", lambda *of: replace(whole(*of), diverged=False))


def prompts_that_wait_for_their_turn_and_are_forgotten(patch):
    def prompts(self, order, restored):
        start = self.state
        again = [p for p in start.unfinished_prompts if restored.began or p not in start.queue.prompts]
        return PromptSource(order, cursor=restored.prompt_cursor, unfinished=again)

    patch.setattr(Resume, "prompts", prompts)


def a_record_that_was_cut_short_and_stays(patch):
    def take_back(self, cause, *, what, size):
        return disk_error(cause, what=what, path="")

    patch.setattr(JournalFiles, "_take_back", take_back)


def a_tool_that_runs_before_that_is_written_down(patch):
    async def begin_call(self, call):
        return

    patch.setattr(RecordedTrajectory, "begin_call", begin_call)


def a_lost_queue_that_only_the_rollouts_notice(patch):
    def lost_part(error):
        if isinstance(error, BaseExceptionGroup):
            return next(filter(None, map(lost_part, error.exceptions)), None)
        while error is not None and not isinstance(error, TrainerLostError | QueueUnavailable):
            error = error.__cause__
        return error

    patch.setattr(lives, "_lost_part", lost_part)


def replicas_that_are_left_on_hold(patch):
    async def go_on(self):
        return

    patch.setattr(Publisher, "go_on", go_on)


def a_journal_that_fails_and_costs_a_group(patch):
    async def flush(self):
        wanted = self._num_appended
        while self._failure is None and self._num_written < wanted:
            await self._progress.wait()
        if self._failure is not None:
            raise self._failure

    patch.setattr(QueueRolloutLog, "flush", flush)


def a_queue_that_is_lost_at_the_end_and_nobody_notices(patch):
    whole = lives.Lives._close

    async def close(self, queue):
        with contextlib.suppress(Exception):
            await whole(self, queue)

    patch.setattr(lives.Lives, "_close", close)


def a_lost_trainer_that_ends_the_run(patch):
    patch.setattr(RestartLimit, "allows_one_more", lambda self: False)


def a_publish_that_is_cut_off_with_its_stage(patch):
    async def to_its_end(work):
        return await work

    patch.setattr(publisher, "_to_its_end", to_its_end)


RESTART_MUTATIONS = (
    (a_publish_that_is_cut_off_with_its_stage, ("failure",), "queue dies"),
    (a_queue_that_answers_before_it_writes, ("exactly once",)),
    (a_sync_that_does_nothing, ("exactly once",), "machine dies"),
    (a_checkpoint_that_is_ahead_of_the_disk, ("exactly once",), "machine dies"),
    (a_recovery_that_skips_a_ready_group, ("exactly once",)),
    (a_recovery_that_forgets_what_was_generated, ("exactly once",)),
    (a_bad_checksum_that_is_ignored, ("provenance", "rows", "failure"), "bits flip"),
    (a_restart_that_trains_again_what_the_checkpoint_holds, ("exactly once",)),
    (batches_that_are_not_trained_again_as_they_were, ("exactly once", "versions")),
    (a_version_that_goes_back_at_a_restart, ("versions", "failure")),
    (weights_that_are_not_made_again_under_their_old_version, ("versions",), "bits flip"),
    (prompts_that_wait_for_their_turn_and_are_forgotten, ("exactly once",), "machine dies"),
    (a_record_that_was_cut_short_and_stays, ("failure", "exactly once"), "disk is full", "disk stays full"),
    (a_tool_that_runs_before_that_is_written_down, ("exactly once",)),
    (a_lost_queue_that_only_the_rollouts_notice, ("failure",), "queue dies"),
    (replicas_that_are_left_on_hold, ("failure", "progress"), "queue dies"),
    (a_journal_that_fails_and_costs_a_group, ("failure",), "disk fails", "disk is full", "disk stays full"),
    (a_queue_that_is_lost_at_the_end_and_nobody_notices, ("ledger",), "queue dies"),
    (a_lost_trainer_that_ends_the_run, ("failure",), "trainer dies"),
)
