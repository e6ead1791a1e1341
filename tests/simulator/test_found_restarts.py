"""Defects of a restart that the simulator found in the real code."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from async_rl.cluster.clients import TrainerLostError
from async_rl.cluster.queue_host import QueueUnavailable
from async_rl.controller.recovery import _lost_part
from async_rl.metrics.truncation import truncate_records
from async_rl.rollout.recorded import RolloutLogError, StoredRolloutLog
from async_rl.rollout.rollouter import Rollouter
from message_queue.contract import Admission, QueueSnapshot
from message_queue.disk_errors import JournalFull
from message_queue.heads import GroupHead, SequenceHead, TrajectoryHead
from message_queue.journal import JournalBase
from message_queue.policies import build_policy
from message_queue.recovery import JournalPlace, recover
from message_queue.staleness import StalenessConfig
from message_queue.state import GroupState, StoredState
from message_queue.tokens import StopReason
from tests.helpers.fakes import SPEC


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

    rollouter = Rollouter(loop=Loop(), routing=SPEC, trajectories_per_group=2, log=StoredRolloutLog(Full()))
    with pytest.raises(ExceptionGroup) as caught:
        await rollouter.roll(
            SimpleNamespace(index=0), Admission(group=0, prompt=0, admitted_version=0, admitted_update=0)
        )
    assert caught.group_contains(RolloutLogError, match="written down any more: no room")


def recovered(*groups, batch_groups, published, policy="wait", next_update=0):
    state = StoredState(next_group=len(groups), train_step=1, versions={0: 0, **published}, groups=groups)
    policy = build_policy(StalenessConfig(max_staleness=3, policy=policy), batch_groups=batch_groups)
    stored = (JournalBase(run="run", settings={}, next_seq=0, state=state), ())
    snapshot = QueueSnapshot(next_group=len(groups), next_update=next_update)
    place = JournalPlace(directory=Path("journal"), run="run", checkpoint=snapshot, train_step=min(next_update, 1))
    return recover(stored, place, policy=policy)[1]


def finished(*, version, **of):
    sequence = SequenceHead(length=4, spans=((version, 2),))
    trajectory = TrajectoryHead(
        length=4,
        sequences=(sequence,),
        num_segments=1,
        num_aborts=0,
        row_bytes=0,
        missing_rows=0,
        reward=1.0,
        stop_reason=StopReason.STOP,
    )
    head = GroupHead(group=0, prompt=0, admitted_version=0, admitted_update=0, trajectories=(trajectory,))
    admission = Admission(group=0, prompt=0, admitted_version=0, admitted_update=0)
    return GroupState(admission=admission, head=head, **of)


def test_weights_that_are_not_made_again_have_a_version_of_their_own():
    trained = finished(version=0, life="trained", taken_update=0, train_step=1, replay_update=0, trained_tokens=2)
    for size, diverged in ((1, False), (2, True)):  # batches of another size are not those that were trained
        restored = recovered(trained, batch_groups=size, published={1: 1})
        assert (restored.version, restored.diverged, restored.replay) == (1, diverged, 1 - diverged)


@pytest.mark.parametrize("policy", ["drop", "recycle"])
def test_a_ready_group_too_old_at_a_restart_is_given_up(policy):
    ready = finished(version=0, life="ready")
    for next_update, given_up in ((3, set()), (4, {0})):
        restored = recovered(ready, batch_groups=1, published={}, policy=policy, next_update=next_update)
        assert restored.given_up == given_up and len(restored.ready) == 1 - len(given_up)
        assert restored.waiting == ((0,) if given_up and policy == "recycle" else ())


def test_a_group_that_goes_on_or_was_never_there_has_not_ended(tmp_path):
    lines = [{"group": group, "outcome": "dropped", "train_step": None} for group in range(5)]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    truncate_records(tmp_path, train_step=0, next_group=3, live={1})
    assert [json.loads(line)["group"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [0, 2]
