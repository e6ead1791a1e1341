"""Recorded trajectories: paths, records and counted tokens, also after a restart."""

from dataclasses import replace

import numpy as np
import pytest

from agent_loop.loop import Message, Prompt
from async_rl.rollout.content.format import CallStarted, Forked, RolloutRecord, TrajectoryClosed
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


def recorded(existing=None):
    records, counted = [], []
    made = RecordedTrajectory(
        existing or Trajectory(routing=None), record=lambda *record: records.append(record), count=counted.append
    )
    return made, records, counted


async def test_agents_and_their_rewards_come_back_after_a_restart(tmp_path):
    root, records, _ = recorded()
    for number, agent in enumerate(("planner", "critic", "policy")):
        path = root.fork(turns=0) if number else root
        path.agent = agent
        path.observe(tokens(2))
        path.extend(segment(1 + number))
    root.close(stop_reason=StopReason.STOP, reward=1.5, rewards={"planner": 1.0, "policy": 0.5})
    writer = await ContentWriter.open(tmp_path, name="a", run=RUN, fsync=False)
    await writer.append(
        [RolloutRecord(group=0, trajectory=0, handout=0, at=at, what=what, path=path) for at, what, path in records]
    )
    await writer.close()
    (group,) = read(tmp_path, 0).groups.values()
    found = head_of(group).trajectories[0]
    assert found == head_of(replace(group, trajectories=[root])).trajectories[0]
    assert (found.trained, found.rewards) == ({"planner": [0], "policy": [2]}, {"planner": 1.0, "policy": 0.5})


async def test_names_that_utf8_cannot_hold_are_stored_in_safe_text(tmp_path):
    root, records, _ = recorded()
    root.observe(tokens(2))
    root.extend(segment(1))
    await root.start_call("\udc00, add")
    root.close(stop_reason=StopReason.STOP, reward=1.0, info={"reward/\ud83d": 1.0})
    writer = await ContentWriter.open(tmp_path, name="a", run=RUN, fsync=False)
    await writer.append(
        [RolloutRecord(group=0, trajectory=0, handout=0, at=at, what=what, path=path) for at, what, path in records]
    )
    await writer.close()
    (group,) = read(tmp_path, 0).groups.values()
    assert head_of(group).trajectories[0].info == {"reward/\ufffd": 1.0}
    assert records[2][1] == CallStarted("\ufffd, add")


async def test_forks_are_recorded_and_their_tokens_counted_once():
    root, records, counted = recorded()
    root.observe(tokens(3))
    root.extend(segment(2))
    fork = root.fork(turns=1)
    fork.observe(tokens(1))
    fork.extend(segment(4))
    await fork.start_call("deploy")
    fork.fork(turns=0)
    root.close(stop_reason=StopReason.STOP, reward=1.0)
    assert [(at, path) for at, _, path in records] == [(0, 0), (3, 0), (5, 1), (5, 1), (6, 1), (10, 1), (0, 2), (5, 0)]
    of = [what for _, what, _ in records]
    assert (of[2], of[5], of[6]) == (Forked(parent=0, turns=1), CallStarted("deploy"), Forked(parent=1, turns=0))
    assert of[-1] == TrajectoryClosed(stop_reason=StopReason.STOP, reward=1.0, forks={1: 10, 2: 0})
    assert sum(counted) == root.num_sampled == 6


def test_an_existing_tree_is_recorded_on_all_its_paths():
    before, _, _ = recorded()
    before.observe(tokens(3))
    before.extend(segment(2))
    before.fork(turns=1).fork(turns=1)
    root, records, counted = recorded(before)
    assert [path.path for path in root.paths[2].paths] == [0, 1, 2]
    assert root.paths[2].paths[0] is root
    root.paths[2].observe(tokens(1))
    root.paths[2].extend(segment(3))
    root.paths[1].fork(turns=0)
    assert [(at, path) for at, _, path in records] == [(5, 2), (6, 2), (0, 3)]
    assert counted == [3]
    root.close(stop_reason=StopReason.STOP, reward=1.0)
    assert all(path.closed for path in root.paths)


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
