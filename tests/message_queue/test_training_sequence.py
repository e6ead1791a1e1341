"""Compact rows of a training sequence."""

import numpy as np

from message_queue.training_sequence import RowRun, TrajectoryRows
from tests.helpers.groups import SPEC, routed


def test_compact_rows_of_one_forward_pass_are_a_view():
    rows, given = TrajectoryRows(SPEC), routed(0, 5)
    assert rows.compact(4)[0].shape == (0, *SPEC.row_shape)
    rows.add(given, version=3)
    for length in (5, 4):
        compact, runs = rows.compact(length)
        assert np.array_equal(compact, given.experts[:length]) and np.shares_memory(compact, given.experts)
        assert runs == (RowRun(length, 3),)
