"""The benchmark of row coding: its rows are whole, its trajectory carries each row once, its figures are ratios."""

import numpy as np
import pytest

from benchmarks.row_coding import Figures, measure, random_rows, resumed_trajectory, speed_lines
from message_queue.tokens import RoutedExperts, RoutingSpec
from message_queue.wire import encode_trajectory, encoded_size

SPEC = RoutingSpec(layers=(0, 1), num_experts=16, top_k=4)


def test_random_rows_fit_the_model():
    rows = random_rows(SPEC, 50)
    assert rows.shape == (50, 2, 4)
    RoutedExperts(first_position=0, experts=rows).check(SPEC)
    assert set(np.unique(rows).tolist()) == set(range(16))


def test_the_resumed_trajectory_carries_one_row_less_than_tokens():
    made = resumed_trajectory(SPEC)
    assert (len(made.turns), len(made.segments)) == (10, 15)
    assert encoded_size(encode_trajectory(made, rank_coded=True)).num_rows == len(made) - 1


def test_every_way_is_timed_in_every_round():
    figures = measure(SPEC, rows=20, rounds=3)
    assert {len(seconds) for seconds in figures.seconds.values()} == {3}
    assert figures.raw == 20 * 2 * 4
    assert figures.floor <= figures.sizes["rank"] < figures.raw
    assert len(speed_lines("tiny", figures)) == 3


def test_ratios_are_taken_round_by_round():
    figures = Figures({"a": [1.0, 2.0, 8.0], "b": [2.0, 4.0, 4.0]}, {}, floor=1.0, raw=10_000_000)
    assert figures.ratio("a", "b") == 2.0
    assert figures.rate("b") == pytest.approx(2.5)
