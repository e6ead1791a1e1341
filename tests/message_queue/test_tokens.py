"""Segments and rows that break the contract are refused on construction, naming field and value."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.errors import ContractError
from message_queue.tokens import RoutedExperts, RoutingSpec, WeightVersion
from tests.helpers.groups import SPEC, routed, segment, support_of


def output(**changes):
    fields = {"token_ids": np.array([1, 2], np.int32), "logprobs": np.array([-1, -2], np.float32)}
    return replace(segment(2), **fields | changes)


def float32(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": np.array([1, 2])}, "token_ids"),
        ({"token_ids": np.zeros((1, 2), np.int32)}, "token_ids"),
        ({"token_ids": np.array([1, -2], np.int32)}, "-2"),
        ({"logprobs": float32(-1)}, r"TokenOutput\.logprobs"),
        ({"logprobs": np.array([-1.0, -2.0])}, "float64"),
        ({"logprobs": float32(-1, np.nan)}, r"logprobs\[1\]"),
        ({"logprobs": float32(-np.inf, -1)}, r"logprobs\[0\]"),
        ({"logprobs": float32(-1, 0.5)}, r"logprobs\[1\]"),
        ({"support": support_of([[1]])}, r"TokenOutput\.support"),
    ],
)
def test_segment_refuses_misaligned_or_impossible_values(changes, named):
    with pytest.raises(ContractError, match=named):
        output(**changes)


OTHER = RoutingSpec(layers=(1,), num_experts=8, top_k=2)


@pytest.mark.parametrize(
    ("changes", "of", "named"),
    [
        ({"token_ids": np.array([1, 9], np.int32)}, {}, "9"),
        ({}, {"routing": SPEC}, "routed_experts"),
        ({"routed_experts": routed(0, 3)}, {}, "routed_experts"),
        ({"routed_experts": routed(0, 3, spec=OTHER)}, {"routing": SPEC}, "RoutedExperts|rows"),
        ({}, {"cut": True}, "support"),
        ({"support": support_of([[1], [2]])}, {}, "support"),
        ({"support": support_of([[1], []])}, {"cut": True}, "(?i)support"),
        ({"support": support_of([[1], [1, 3]])}, {"cut": True}, "(?i)support"),
        ({"support": support_of([[1], [2, 9]])}, {"cut": True}, "(?i)support"),
    ],
)
def test_segment_check_refuses_segments_of_another_model_or_request(changes, of, named):
    with pytest.raises(ContractError, match=named):
        output(**changes).check(**{"vocab_size": 9, "routing": None, **of})


def test_segment_check_accepts_segments_of_the_model_and_request():
    segment(3, rows=(0, 4)).check(vocab_size=9, routing=SPEC)
    output(support=support_of([[1], [2, 8]])).check(vocab_size=9, routing=None, cut=True)
    segment(0).check(vocab_size=9, routing=SPEC, cut=True)


@given(st.integers(1, 60_000))
def test_expert_ids_use_the_narrowest_type(num_experts):
    dtype = RoutingSpec(layers=(0,), num_experts=num_experts, top_k=1).dtype
    assert dtype == (np.uint8 if num_experts <= 256 else np.uint16)


def spec(**changes):
    return RoutingSpec(**{"layers": (1, 3), "num_experts": 8, "top_k": 2} | changes)


def rows(**changes):
    return RoutedExperts(**{"first_position": 4, "experts": np.array([[[0, 1]]], np.uint8)} | changes)


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        *((spec, {"layers": layers}, r"RoutingSpec\.layers") for layers in ((3, 1), (1, 1), (-1, 1), ())),
        *((spec, {"top_k": top_k}, r"RoutingSpec\.top_k") for top_k in (9, 0)),
        (rows, {"experts": np.zeros((2, 2), np.uint8)}, r"RoutedExperts\.experts"),
        (rows, {"experts": np.zeros((1, 1, 1), np.int16)}, "int16"),
        *((rows, {"unavailable": count}, "unavailable") for count in (5, -1)),
        (WeightVersion, {"version": -1, "digest": "d"}, r"WeightVersion\.version"),
    ],
)
def test_specs_rows_and_versions_refuse_impossible_values(make, changes, named):
    with pytest.raises(ContractError, match=named):
        make(**changes)


@given(st.data())
def test_rows_refuse_a_duplicate_expert_anywhere(data):
    rows, layers, top_k = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 6)))
    experts = np.tile(np.arange(top_k, dtype=np.uint16), (rows, layers, 1))
    row, layer = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, layers - 1))
    i, j = data.draw(st.lists(st.integers(0, top_k - 1), min_size=2, max_size=2, unique=True))
    RoutedExperts(first_position=7, experts=experts)
    experts[row, layer, i] = experts[row, layer, j]
    with pytest.raises(ContractError, match=f"position {7 + row}, MoE layer index {layer}: "):
        RoutedExperts(first_position=7, experts=experts)


def test_rows_refuse_a_duplicate_expert_behind_many_rows():
    experts = np.tile(np.arange(2, dtype=np.uint8), (40_000, 1, 1))
    experts[39_999, 0, 1] = 0
    with pytest.raises(ContractError, match="position 39999"):
        RoutedExperts(first_position=0, experts=experts)


@pytest.mark.parametrize(("expert", "dtype", "named"), [(7, np.uint16, "uint16"), (8, np.uint8, "8")])
def test_rows_check_refuses_wider_types_and_unknown_experts(expert, dtype, named):
    rows = RoutedExperts(first_position=0, experts=np.array([[[0, expert], [1, 2]]], dtype))
    with pytest.raises(ContractError, match=named):
        rows.check(SPEC)


def test_parts_of_rows_keep_their_positions():
    rows = routed(3, 7, unavailable=2)
    assert (rows.before(5).first_position, rows.before(5).end_position, rows.before(5).unavailable) == (3, 5, 2)
    assert len(rows.before(2).experts) == 0
