"""Defects of a restart that the simulator found in the real code."""

import errno
import json
from types import SimpleNamespace

import numpy as np
import pytest

from async_rl.handles import TrainerLostError
from async_rl.lives import _lost_part
from async_rl.observe.rewind import rewind
from async_rl.rollout.recorded import QueueRolloutLog, RolloutLogError
from async_rl.rollout.rollouter import Rollouter
from message_queue.client import QueueUnavailable
from message_queue.journal import JournalBroken, JournalFull
from message_queue.policies import build_policy
from message_queue.staleness import StalenessConfig
from message_queue.start import start_of_journal
from tests.fakes import SPEC
from tests.unit.groups import group_for
from tests.unit.journal_calls import admission, finish, open_journal, prompt
from tests.unit.journal_disk import FakeDisk
from tests.unit.journal_model import opened


def test_a_lost_queue_that_only_the_rollouts_noticed_is_a_lost_part():
    stage = RuntimeError("stage rollout failed")
    stage.__cause__ = ExceptionGroup("rollouts", [QueueUnavailable("the queue is dead")])
    assert str(_lost_part(ExceptionGroup("stages", [stage]))) == "the queue is dead"
    stage.__cause__ = ExceptionGroup("rollouts", [ValueError("something else")])
    assert _lost_part(ExceptionGroup("stages", [stage])) is None
    assert str(_lost_part(TrainerLostError("rank 0 is dead"))) == "rank 0 is dead"


async def test_a_rollout_that_cannot_be_written_down_is_no_failed_rollout():
    class Full:
        async def append(self, records):
            raise JournalFull("no room")

    class Loop:
        async def run(self, prompt, *, trajectory, session, cache_salt):
            trajectory.observe(np.zeros(2, np.int32))
            await trajectory.begin_call("lookup")

    rollouter = Rollouter(loop=Loop(), routing=SPEC, trajectories_per_group=2, log=QueueRolloutLog(Full()))
    with pytest.raises(ExceptionGroup) as caught:
        await rollouter.roll(SimpleNamespace(index=0), admission(0))
    assert caught.group_contains(RolloutLogError, match="written down any more: no room")


async def test_a_disk_that_cannot_be_read_is_a_broken_journal():
    class Unreadable(FakeDisk):
        def open(self, name):
            file = self.files[name]
            file.duplicate = lambda: SimpleNamespace(read=self.fail, close=lambda: None)
            return file

        def create(self, name):
            super().create(name)
            return self.open(name)

        def fail(self, offset, size):
            raise OSError(errno.EIO, "Input/output error")

    journal, _ = await open_journal(None, disk=Unreadable())
    await prompt(journal, 0)
    with pytest.raises(JournalBroken, match=r"could not read group 0 from the journal .Input/output error"):
        await journal.read(0, routing=None)
    await journal.close()


def test_an_attempt_that_fails_hides_nothing_from_the_next():
    disk = FakeDisk()
    opened(disk)
    left = disk.after_kill()
    (name, file), *_ = left.files.items()
    file.data += b"half a record"
    left.capacity = sum(len(f.data) for f in left.files.values())
    with pytest.raises(JournalFull):
        opened(left)
    assert len(file.data) == left.capacity, "what could not be read was cut before the journal was open"
    left.capacity = None
    _, recovered = opened(left)
    assert [cut.size for cut in recovered.report.cut] == [len(b"half a record")]
    assert bytes(left.files[name].data[-4:]) != b"cord"


async def test_weights_that_are_not_made_again_have_a_version_of_their_own():
    disk = FakeDisk()
    journal, _ = await open_journal(None, disk=disk)
    await finish(journal, 0)
    await journal.taken([0], update=0)
    await journal.trained([0], train_step=1)
    await journal.published(1, update=1)
    await journal.close()
    for size, diverged in ((1, False), (2, True)):  # batches of another size are not those that were trained
        policy = build_policy(StalenessConfig(max_staleness=3), batch_groups=size)
        journal, recovered = await open_journal(None, disk=disk.after_kill())
        groups = {0: group_for(admission(0))}
        start = start_of_journal(recovered, groups, next_update=0, policy=policy)
        assert (start.served, start.diverged, len(start.replay)) == (1, diverged, 1 - diverged)
        await journal.close()


async def test_a_version_of_which_only_tokens_are_left_is_not_used_again():
    journal, recovered = await open_journal(None, disk=FakeDisk())
    await journal.close()
    groups = {0: group_for(admission(0), versions=[4])}
    policy = build_policy(StalenessConfig(max_staleness=3), batch_groups=1)
    start = start_of_journal(recovered, groups, next_update=0, policy=policy)
    assert start.served == 4 and start.versions[4] == 0 and start.diverged


def test_a_group_that_goes_on_or_was_never_there_has_not_ended(tmp_path):
    lines = [{"group": group, "outcome": "dropped", "train_step": None} for group in range(5)]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewind(tmp_path, train_step=0, next_group=3, live={1})
    assert [json.loads(line)["group"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [0, 2]
