"""The choice of the groups of a batch whose rollouts are written to disk."""

import pytest

from async_rl.controller.prepare import recorded_groups
from message_queue.trajectory import Admission
from tests.helpers.groups import head_for

HEADS = [head_for(Admission(group=g, prompt=g, admitted_version=0, admitted_update=0)) for g in range(20)]


def chosen(heads, *, trajectories, train_step=1):
    found = recorded_groups(heads, trajectories=trajectories, seed=0, train_step=train_step)
    assert all(heads[at] is head for at, head in found.heads.items())
    return {head.group for head in found.heads.values()}


@pytest.mark.parametrize(("trajectories", "count"), [(1, 1), (5, 5), (20, 20), (64, 20)])
def test_recorded_groups_are_bounded_and_at_least_one(trajectories, count):
    assert len(chosen(HEADS, trajectories=trajectories)) == count


def test_recorded_groups_of_a_step_are_the_same_when_it_is_repeated():
    assert chosen(HEADS, trajectories=5) == chosen(HEADS[::-1], trajectories=5)
    assert len({tuple(chosen(HEADS, trajectories=5, train_step=step)) for step in range(10)}) > 1
    assert not recorded_groups(HEADS, trajectories=0, seed=0, train_step=1).heads
