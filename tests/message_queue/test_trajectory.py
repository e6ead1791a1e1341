"""Kept sets, refusals and compact rows of trajectories by example; test_fork_trees.py has random schedules."""

from dataclasses import replace

import numpy as np
import pytest

from message_queue.errors import ContractError
from message_queue.heads import head_of
from message_queue.tokens import RoutingSpec, StopReason
from message_queue.training_sequence import RowRun, TrajectoryRows
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.groups import SPEC, routed, segment, sets_of, support_of, trajectory

MODES = ("append", "force", "replace", "split")


def prompt(count=2):
    return np.arange(count, dtype=np.int32)


def opened(count=2, *, routing=SPEC, mode="append"):
    made = Trajectory(routing=routing, resume_routing=mode)
    made.observe(prompt(count))
    return made


def segment_with(rows, *, tokens, version):
    return replace(segment(tokens, version=version), routed_experts=rows)


def test_kept_sets_are_at_the_positions_of_their_sampled_tokens():
    made = opened(2, routing=None)
    made.extend(replace(segment(2), support=support_of([[5, 9], [7]])))
    made.extend(segment(0))
    made.observe(prompt(1))
    made.extend(segment(1))
    made.extend(replace(segment(1), support=support_of([[5, 6, 7]])))
    assert sets_of(made.sequences()[-1].support) == [[], [], [5, 9], [7], [], [], [5, 6, 7]]


def spec(**changes):
    return RoutingSpec(**{"layers": (1, 3), "num_experts": 8, "top_k": 2} | changes)


@pytest.mark.parametrize(
    "rows",
    [
        None,
        routed(4, 5),
        routed(3, 6),
        routed(3, 4),
        routed(0, 4),
        routed(3, 5, spec=spec(layers=(1,))),
        routed(3, 5, spec=spec(top_k=3)),
        routed(3, 5, spec=spec(num_experts=400)),
        routed(3, 5, spec=spec(num_experts=200), version=3),
    ],
    ids=["none", "gap", "too many", "too few", "too few, all", "layers", "top_k", "dtype", "expert id"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_segment_with_wrong_rows_is_refused_and_changes_nothing(rows, mode):
    made = opened(2, mode=mode)
    made.extend(segment(2, rows=(0, 3)))
    with pytest.raises(ContractError):
        made.extend(segment_with(rows, tokens=2, version=1))
    assert (len(made), made.num_rows, len(made.segments), len(made.sequences())) == (4, 3, 1, 1)
    assert np.array_equal(made.sequences()[-1].routed_experts[:3], routed(0, 3).experts)
    made.extend(segment(2, version=1, rows=(3, 5)))
    assert made.num_rows == 5


def test_trajectory_refuses_calls_that_do_not_follow():
    started = opened(2, routing=None)
    closed = trajectory(segment())
    calls = [
        ("resume_routing", lambda: Trajectory(routing=SPEC, resume_routing="newest")),
        ("prompt", lambda: Trajectory(routing=None).observe(np.zeros(0, np.int32))),
        ("prompt", lambda: Trajectory(routing=None).extend(segment())),
        ("int32", lambda: started.observe(np.arange(2))),
        ("routed_experts", lambda: started.extend(segment(2, rows=(0, 3)))),
        ("position 1", lambda: opened(2).extend(segment_with(routed(0, 2), tokens=0, version=0))),
        ("reward", lambda: started.close(stop_reason=StopReason.STOP, reward=float("nan"))),
        ("closed", lambda: closed.observe(prompt())),
        ("closed", lambda: closed.extend(segment())),
    ]
    for named, call in calls:
        with pytest.raises(ContractError, match=named):
            call()


def test_a_group_sums_over_its_trajectories():
    made = [trajectory(segment(2, version=1), segment(0, version=2)), trajectory(segment(3, version=2))]
    group = PromptGroup(group=0, prompt=0, admitted_version=1, admitted_update=1, trajectories=made)
    assert (group.num_tokens, group.closed) == (5, True)
    head = head_of(group)
    assert (head.num_segments, head.num_tokens, head.tokens_per_version()) == (3, 5, {1: 2, 2: 3})
    group.trajectories.append(opened(routing=None))
    assert not group.closed


def test_compact_rows_of_one_forward_pass_are_a_view():
    rows, given = TrajectoryRows(SPEC), routed(0, 5)
    assert rows.compact(4)[0].shape == (0, *SPEC.row_shape)
    rows.add(given, version=3)
    for length in (5, 4):
        compact, runs = rows.compact(length)
        assert np.array_equal(compact, given.experts[:length]) and np.shares_memory(compact, given.experts)
        assert runs == (RowRun(length, 3),)
