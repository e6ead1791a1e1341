"""Compact rows of a training sequence."""

import numpy as np

from message_queue.routing_rows import RowRun, TrajectoryRows
from message_queue.tokens import RoutedExperts, RoutingSpec

SPEC = RoutingSpec(layers=(0, 1), num_experts=8, top_k=2)


def rows_of(count, *, first=0, seed=0):
    experts = np.argsort(np.random.default_rng(seed).random((count, 2, 8)), axis=-1)[..., :2]
    return RoutedExperts(first_position=first, experts=experts.astype(np.uint8))


def test_compact_rows_of_one_forward_pass_are_a_view():
    held, given = TrajectoryRows(SPEC), rows_of(5)
    held.add(given, version=3)
    for length in (5, 4):
        rows, runs = held.compact(length)
        assert (rows == given.experts[:length]).all() and len(rows) == length
        assert np.shares_memory(rows, given.experts)
        assert runs == (RowRun(length, 3),)


def test_compact_rows_join_runs_of_a_version_and_end_at_the_length():
    held = TrajectoryRows(SPEC)
    parts = [rows_of(2, first=0, seed=1), rows_of(3, first=2, seed=2), rows_of(4, first=7, seed=3)]
    for part, version in zip(parts, (3, 3, 4), strict=True):
        held.add(part, version=version)
    rows, runs = held.compact(10)
    assert (len(held), len(rows)) == (11, 10)
    assert runs == (RowRun(5, 3), RowRun(2, -1), RowRun(3, 4))
    assert (rows[:5] == np.concatenate([part.experts for part in parts[:2]])).all()
    assert not rows[5:7].any(), "no engine could give them"
    assert (rows[7:] == parts[2].experts[:3]).all()


def test_compact_rows_of_nothing_have_the_shape_of_a_row():
    rows, runs = TrajectoryRows(SPEC).compact(4)
    assert (rows.shape, rows.dtype, runs) == ((0, 2, 2), np.dtype(np.uint8), ())
