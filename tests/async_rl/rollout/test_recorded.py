"""Recorded trajectories: paths, records and counted tokens, also after a restart."""

import numpy as np
import pytest

from agent_loop.loop import Message, Prompt
from async_rl.rollout.content.format import CallStarted, RolloutRecord
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.recorded import RecordedTrajectory, RolloutLog
from async_rl.rollout.rollouter import DroppedGroup, FailureConfig, Rollouter
from message_queue.errors import RolloutError, StateLostError
from message_queue.heads import head_of
from message_queue.tokens import StopReason
from message_queue.trajectory import Admission, Trajectory
from tests.helpers.groups import segment
from tests.helpers.stored import RUN, admission, read
from tests.message_queue.test_forks import same_tree

PROMPT = Prompt(index=1, messages=(Message(role="user", content="question"),))


def tokens(count, first=0):
    return np.arange(first, first + count, dtype=np.int32)


async def test_names_that_utf8_cannot_hold_are_stored_in_safe_text(tmp_path):
    records = []
    root = RecordedTrajectory(Trajectory(routing=None), record=lambda *record: records.append(record))
    root.observe(tokens(2))
    root.extend(segment(1))
    await root.start_call("\udc00, add")
    root.close(stop_reason=StopReason.STOP, reward=1.0, info={"reward/\ud83d": 1.0})
    writer = await ContentWriter.open(tmp_path, name="a", run=RUN, fsync=False)
    await writer.append(
        [RolloutRecord(group=0, trajectory=0, handout=0, at=at, what=what, path=path) for at, what, path in records]
    )
    await writer.close()
    assert head_of(read(tmp_path, 0).groups[0]).trajectories[0].info == {"reward/\ufffd": 1.0}
    assert records[2][1] == CallStarted("\ufffd, add")


class Compacting:
    """Two turns, and a fork of the first; fails where it is told to, and continues from the paths that there are."""

    def __init__(self, *failures):
        self.failures = list(failures)

    async def run(self, prompt, *, trajectory, session, cache_salt):
        if not trajectory.turns:
            trajectory.observe(tokens(3))
            trajectory.extend(segment(2))
            trajectory.observe(tokens(1))
            trajectory.extend(segment(2))
        if len(trajectory.paths) == 1:
            trajectory.fork(turns=1)
        if self.failures:
            raise self.failures.pop(0)
        fork = trajectory.paths[1]
        fork.observe(tokens(2))
        fork.extend(segment(4))
        trajectory.close(stop_reason=StopReason.STOP, reward=1.0)


AGAIN, OVER = RolloutError("again"), StateLostError("over")


@pytest.mark.parametrize(("failures", "started_over"), [([AGAIN], []), ([OVER], ["over"]), ([AGAIN, OVER], [])])
async def test_a_rollout_with_forks_is_retried_counted_and_stored(tmp_path, failures, started_over):
    notes, failed = [], []
    store = await ContentWriter.open(tmp_path, name="rollout-0000", run=RUN, fsync=False)
    rollouter = Rollouter(
        loop=Compacting(*failures),
        routing=None,
        trajectories_per_group=1,
        log=RolloutLog(store),
        failure=FailureConfig(max_retries=1),
        note=notes.append,
        failed=failed.append,
        decode=str,
    )
    group = await rollouter.roll(PROMPT, admission(0))
    assert not isinstance(group, DroppedGroup) and len(notes) == len(failures)
    assert [(r.group, r.error) for r in failed] == [(0, f"StateLostError: {text}") for text in started_over]
    (made,) = group.trajectories
    assert [len(path) for path in made.paths] == [8, 11]
    assert rollouter.tokens.pop(0) == head_of(group).num_tokens == 8
    await store.close()
    found = read(tmp_path, 0)
    assert found.notes == []
    same_tree(made, found.groups[0].trajectories[0])


async def test_a_hand_out_continues_the_paths_of_the_one_before(tmp_path):
    async def roll(name, handout, loop, existing=()):
        store = await ContentWriter.open(tmp_path, name=name, run=RUN, fsync=False)
        made = Rollouter(loop=loop, routing=None, trajectories_per_group=1, log=RolloutLog(store))
        given = Admission(group=0, prompt=1, admitted_version=0, admitted_update=0)
        group = await made.roll(PROMPT, given, existing=existing, handout=handout)
        await made.flush()
        await store.close()
        return group, made.tokens.pop(0)

    dropped, counted = await roll("rollout-0000", 0, Compacting(RolloutError("dies")))
    assert (dropped.segments, dropped.tokens, counted) == (2, 4, 4)
    held = read(tmp_path, 0).groups[0].trajectories
    assert [path.path for path in held[0].paths] == [0, 1]
    group, counted = await roll("rollout-0001", 1, Compacting(), existing=held)
    assert counted == head_of(group).num_tokens == 8
    found = read(tmp_path, 0)
    assert found.notes == []
    same_tree(group.trajectories[0], found.groups[0].trajectories[0])
