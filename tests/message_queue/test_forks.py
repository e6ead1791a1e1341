"""Paths of a trajectory by example; test_fork_trees.py has random trees."""

import pickle
import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from async_rl.rollout.content.format import Forked, RolloutRecord
from message_queue.errors import ContractError
from message_queue.heads import head_of
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup, Trajectory
from tests.async_rl.rollout.test_content import flipped, same_trajectory, write
from tests.helpers.dense import loss_mask
from tests.helpers.groups import SPEC, routed, segment, sets_of, support_of
from tests.helpers.stored import read, records_of


def tokens(count, first=0):
    return np.arange(first, first + count, dtype=np.int32)


def two_turns(mode="append", *, routing=SPEC):
    """The root of the worked example of `message_queue.trajectory`; requests bring the rows that their mode needs."""
    made, keeps_held = Trajectory(routing=routing, resume_routing=mode), mode in ("append", "force")
    made.observe(tokens(3, 10))
    made.extend(segment(2, version=4, rows=(0, 4) if routing else None))
    made.observe(tokens(1, 20))
    made.extend(segment(2, version=4, rows=(4 if keeps_held else 0, 7) if routing else None))
    return made


def forked(mode="append", *, routing=SPEC):
    """The tree of the worked example."""
    root, keeps_held = two_turns(mode, routing=routing), mode in ("append", "force")
    fork = root.fork(turns=1)
    fork.observe(tokens(2, 30))
    fork.extend(segment(3, version=5, rows=(fork.num_rows if keeps_held else 0, 9) if routing else None))
    return root, fork


def in_loss(sequence):
    return np.flatnonzero(loss_mask(sequence)).tolist()


def group_of(*trajectories):
    return PromptGroup(group=0, prompt=0, admitted_version=4, admitted_update=4, trajectories=list(trajectories))


def test_a_fork_shares_turns_and_a_token_is_in_the_loss_of_the_path_that_sampled_it():
    root, fork = forked()
    assert fork.token_ids().tolist() == [10, 11, 12, 0, 1, 30, 31, 0, 1, 2]
    assert fork.turns[0].observation is root.turns[0].observation, "shared, not copied"
    assert fork.turns[0].segments[0] is root.turns[0].segments[0]
    assert (root.num_sampled, len(root.segments), fork.num_sampled, len(fork.segments)) == (7, 3, 3, 1)
    assert [in_loss(s) for s in root.sequences()] == [[3, 4, 6, 7], [7, 8, 9]]
    assert [[tuple(run[:3]) for run in s.shared] for s in root.sequences()] == [[], [(3, 2, 4)]]
    assert [len(s) for s in fork.sequences()] == [10]
    same_tree(root, pickle.loads(pickle.dumps(root)))


def test_kept_sets_of_a_fork_are_those_of_its_own_tokens():
    root = Trajectory(routing=None)
    root.observe(tokens(1))
    root.extend(replace(segment(2), support=support_of([[0, 4], [1]])))
    fork = root.fork(turns=1)
    fork.observe(tokens(1))
    fork.extend(replace(segment(1), support=support_of([[0, 9]])))
    assert [sets_of(s.support) for s in root.sequences()] == [[[], [0, 4], [1]], [[], [], [], [], [0, 9]]]


def test_the_root_closes_all_paths():
    root, fork = forked()
    with pytest.raises(ContractError, match="close of path 1"):
        fork.close(stop_reason=StopReason.STOP, reward=1.0)
    root.close(stop_reason=StopReason.STOP, reward=1.0)
    assert root.closed and fork.closed
    for refused in (
        lambda: fork.observe(tokens(1)),
        lambda: fork.extend(segment(1, rows=(9, 10))),
        lambda: root.fork(turns=1),
        lambda: fork.fork(turns=1),
    ):
        with pytest.raises(ContractError, match="closed"):
            refused()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: two_turns().fork(turns=-1), r"fork\.turns is -1"),
        (lambda: two_turns().fork(turns=3), r"fork\.turns is 3"),
        (lambda: Trajectory(routing=None).fork(turns=0), "prompt"),
        (lambda: two_turns().fork(turns=0).observe(tokens(0)), "prompt"),
        (lambda: two_turns().fork(turns=1).extend(segment(1, rows=(4, 5))), "observe"),
        (lambda: two_turns().fork(turns=0).extend(segment(1, rows=(0, 0))), "observe"),
    ],
)
def test_a_fork_that_does_not_follow_is_refused(call, named):
    with pytest.raises(ContractError, match=named):
        call()


def test_a_head_counts_the_tree_once():
    root, fork = forked()
    for path in (root, fork):
        path.observe(tokens(4, 40))  # of a call that was not answered
    root.close(stop_reason=StopReason.STOP, reward=1.0)
    (head,) = head_of(group_of(root)).trajectories
    assert (head.length, head.num_sampled, head.num_segments, head.missing_rows) == (13 + 4 + 4, 7, 3, 0)
    assert [(s.length, s.spans) for s in head.sequences] == [(8, ((4, 4),)), (10, ((5, 3),))]
    assert head.row_bytes == sum(s.routed_experts.experts.nbytes for s in root.segments)
    assert group_of(root).num_tokens == 7


def test_a_head_counts_aborts_and_missing_rows_of_each_path_once():
    root = Trajectory(routing=SPEC)
    root.observe(tokens(3))
    root.extend(replace(segment(2, stop_reason=StopReason.ABORT), routed_experts=routed(2, 4, unavailable=2)))
    for version in (1, 2):
        fork = root.fork(turns=1)
        fork.observe(tokens(2))
        rows = routed(6, 8, version=version, unavailable=2)
        fork.extend(replace(segment(2, version=version, stop_reason=StopReason.ABORT), routed_experts=rows))
    root.fork(turns=0)
    root.close(stop_reason=StopReason.STOP, reward=1.0)
    (head,) = head_of(group_of(root)).trajectories
    assert (head.num_aborts, head.num_segments, head.length) == (3, 3, 5 + 4 + 4)
    assert head.missing_rows == 2 + 2 + 2, "rows 0 and 1, and rows 4 and 5 of both forks"


# ---- through the content store


def same_tree(one, other):
    """Fails if any field or array of two trajectories or of their paths differs."""
    for a, b in zip(one.paths, other.paths, strict=True):
        same_trajectory(a, b)
        for name in ("path", "parent", "shared_turns", "shared_tokens"):
            assert getattr(a, name) == getattr(b, name)
        assert [s.path for s in a.sequences()] == [s.path for s in b.sequences()]


def read_tree(folder, *, notes=0):
    """The only trajectory, and as many notes as expected."""
    found = read(folder, 0, routing=SPEC)
    assert len(found.notes) == notes, found.notes
    return found.groups[0].trajectories[0]


def record(at, what, *, path=0, handout=1):
    return RolloutRecord(group=0, trajectory=0, path=path, handout=handout, at=at, what=what)


def closed_tree():
    root, _ = forked()
    root.close(stop_reason=StopReason.STOP, reward=1.0)
    return root


async def test_a_hand_out_that_replaces_shared_tokens_removes_their_forks(tmp_path):
    root = two_turns()
    on_first, on_second = root.fork(turns=1), root.fork(turns=2)
    child = on_second.fork(turns=2)
    for path in (on_first, on_second, child):
        path.observe(tokens(1, 30))
    await write(tmp_path, records_of(root), "a")
    await write(tmp_path, [record(5, tokens(4, 60))], "b")
    found = read_tree(tmp_path)
    assert [path.path for path in found.paths] == [0, 1]
    assert found.token_ids().tolist() == [10, 11, 12, 0, 1, 60, 61, 62, 63]
    again = found.fork(turns=2)
    assert again.path == 2, "the number is free"
    await write(tmp_path, [record(9, Forked(parent=0, turns=2), path=2), record(9, tokens(1, 70), path=2)], "c")
    again.observe(tokens(1, 70))
    same_tree(found, read_tree(tmp_path))


async def test_an_end_that_a_later_hand_out_did_not_know_is_left_out(tmp_path):
    root = closed_tree()
    await write(tmp_path, records_of(root), "a")
    await write(tmp_path, [record(10, tokens(2), path=1)], "b")
    found = read_tree(tmp_path)
    assert ([len(path) for path in found.paths], found.closed) == ([8, 12], False)


async def test_a_record_whose_path_is_damaged_is_left_out(tmp_path):
    await write(tmp_path, records_of(forked()[0]), "a")
    with sqlite3.connect(tmp_path / "a.sqlite") as index:
        index.execute("UPDATE records SET path = 0 WHERE at = 7")
    assert [len(path) for path in read_tree(tmp_path, notes=1).paths] == [8, 7]


async def test_damage_to_a_path_leaves_out_later_records_and_an_end_of_other_paths(tmp_path):
    root = closed_tree()
    *first, end = records_of(root)
    await write(tmp_path, first, "a")
    await write(tmp_path, [replace(end, handout=1)], "b")
    with flipped(tmp_path / "a-000001.data", (tmp_path / "a-000001.data").stat().st_size - 1, 1):
        found = read_tree(tmp_path, notes=2)
    assert ([len(path) for path in found.paths], found.closed) == ([8, 7], False)
    same_tree(root, read_tree(tmp_path))


async def test_damage_to_shared_tokens_leaves_out_the_forks_that_another_writer_made(tmp_path):
    root = two_turns()
    await write(tmp_path, records_of(root), "a")
    fork = root.fork(turns=2)
    fork.observe(tokens(1))
    child = fork.fork(turns=3)
    child.observe(tokens(1))
    await write(tmp_path, records_of(root, handout=1)[4:], "b")
    same_tree(root, read_tree(tmp_path))
    with flipped(tmp_path / "a-000001.data", (tmp_path / "a-000001.data").stat().st_size - 1, 1):
        found = read_tree(tmp_path, notes=2)
    assert [len(path) for path in found.paths] == [6]
