"""A segment or a row that breaks the contract is refused where it is made, naming field and value."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.tokens import ContractError, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from tests.helpers.groups import SPEC, routed, segment, support_of


def output(**changes):
    fields = {
        "token_ids": np.array([1, 2], np.int32),
        "logprobs": np.array([-1, -2], np.float32),
        "routed_experts": None,
        "weights": WeightVersion(0, "d"),
        "stop_reason": StopReason.STOP,
        "replica": "replica-3",
    }
    return TokenOutput(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([1, 2])}, r"TokenOutput\.token_ids is int64\[2\]; need int32\[n\]"),
        ({"token_ids": np.zeros((1, 2), np.int32)}, r"token_ids is int32\[1, 2\]"),
        ({"token_ids": np.array([1, -2], np.int32)}, "negative id -2"),
        ({"logprobs": np.array([-1], np.float32)}, r"TokenOutput\.logprobs is float32\[1\]; need float32\[2\]"),
        ({"logprobs": np.array([-1.0, -2.0])}, r"logprobs is float64\[2\]"),
        ({"logprobs": np.array([-1, np.nan], np.float32)}, r"logprobs\[1\] is nan; logprobs are finite and <= 0"),
        ({"logprobs": np.array([-np.inf, -1], np.float32)}, r"logprobs\[0\] is -inf"),
        ({"logprobs": np.array([-1, 0.5], np.float32)}, r"logprobs\[1\] is 0\.5"),
        ({"support": support_of([[1]])}, r"TokenOutput\.support"),
    ],
)
def test_misaligned_or_impossible_segments_are_refused(changes, message):
    with pytest.raises(ContractError, match=message):
        output(**changes)


@pytest.mark.parametrize(
    ("changes", "routing", "message"),
    [
        ({"token_ids": np.array([1, 9], np.int32)}, None, "id 9; the vocabulary has 9"),
        ({}, SPEC, "routed_experts is None for 2 tokens from replica replica-3; the run captures routing"),
        ({"routed_experts": routed(0, 3)}, None, "routed_experts is set, but the run captures no routing"),
        (
            {"routed_experts": routed(0, 3, spec=RoutingSpec(layers=(1,), num_experts=8, top_k=2))},
            SPEC,
            "rows of shape",
        ),
    ],
)
def test_segments_that_do_not_fit_the_model_are_refused(changes, routing, message):
    with pytest.raises(ContractError, match=message):
        output(**changes).check(vocab_size=9, routing=routing)


@pytest.mark.parametrize(
    ("support", "cut"),
    [
        (None, True),
        (support_of([[1], [2]]), False),
        (support_of([[1], []]), True),
        (support_of([[1], [1, 3]]), True),
        (support_of([[1], [2, 9]]), True),
    ],
    ids=["absent", "unasked", "no token", "without the sampled token", "outside the vocabulary"],
)
def test_a_support_that_does_not_fit_the_request_is_refused(support, cut):
    with pytest.raises(ContractError, match=r"TokenOutput\.support|SamplingSupport"):
        output(support=support).check(vocab_size=9, routing=None, cut=cut)


def test_a_support_that_holds_the_sampled_tokens_is_let_through():
    output(support=support_of([[1], [2, 8]])).check(vocab_size=9, routing=None, cut=True)
    segment(0).check(vocab_size=9, routing=None, cut=True)


def test_a_segment_that_fits_is_let_through():
    segment(3, rows=(0, 4)).check(vocab_size=9, routing=SPEC)
    segment(0).check(vocab_size=9, routing=SPEC)
    assert len(segment(3)) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": (3, 1)}, "need ascending, distinct layer numbers"),
        ({"layers": (1, 1)}, "need ascending, distinct"),
        ({"layers": (-1, 1)}, "need ascending, distinct"),
        ({"layers": ()}, r"RoutingSpec\.layers is \(\)"),
        ({"top_k": 9}, r"RoutingSpec\.top_k is 9; must be in 1\.\.num_experts=8"),
        ({"top_k": 0}, r"RoutingSpec\.top_k is 0"),
    ],
)
def test_impossible_routing_specs_are_refused(fields, message):
    with pytest.raises(ContractError, match=message):
        RoutingSpec(**{"layers": (1, 3), "num_experts": 8, "top_k": 2} | fields)


@given(st.integers(1, 60_000))
def test_expert_ids_use_the_narrowest_type_that_holds_them(num_experts):
    dtype = RoutingSpec(layers=(0,), num_experts=num_experts, top_k=1).dtype
    assert np.iinfo(dtype).max >= num_experts - 1
    assert dtype == (np.uint8 if num_experts <= 256 else np.uint16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": np.zeros((2, 2), np.uint8)}, r"RoutedExperts\.experts is uint8\[2, 2\]; need uint8 or uint16"),
        ({"experts": np.zeros((1, 1, 1), np.int16)}, "experts is int16"),
        ({"unavailable": 5}, r"unavailable is 5 with first_position 4"),
        ({"unavailable": -1}, r"unavailable is -1"),
        (
            {"experts": np.array([[[0, 1], [2, 3]], [[0, 1], [5, 5]]], np.uint8)},
            r"duplicate expert at position 5, MoE layer index 1: \[5, 5\]",
        ),
    ],
)
def test_malformed_rows_are_refused(fields, message):
    with pytest.raises(ContractError, match=message):
        RoutedExperts(**{"first_position": 4, "experts": np.array([[[0, 1]]], np.uint8)} | fields)


@given(st.data())
def test_a_duplicate_is_found_wherever_it_is(data):
    rows, layers, top_k = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 6)))
    experts = np.tile(np.arange(top_k, dtype=np.uint16), (rows, layers, 1))
    row, layer, (i, j) = data.draw(
        st.tuples(
            st.integers(0, rows - 1),
            st.integers(0, layers - 1),
            st.lists(st.integers(0, top_k - 1), min_size=2, max_size=2, unique=True),
        )
    )
    RoutedExperts(first_position=7, experts=experts)
    experts[row, layer, i] = experts[row, layer, j]
    with pytest.raises(ContractError, match=f"duplicate expert at position {7 + row}, MoE layer index {layer}: "):
        RoutedExperts(first_position=7, experts=experts)


def test_a_duplicate_behind_many_rows_is_found():
    experts = np.tile(np.arange(2, dtype=np.uint8), (40_000, 1, 1))
    experts[39_999, 0, 1] = 0
    with pytest.raises(ContractError, match="duplicate expert at position 39999"):
        RoutedExperts(first_position=0, experts=experts)


def test_parts_of_rows_keep_their_positions():
    rows = routed(3, 7, unavailable=2)
    assert (rows.before(5).first_position, rows.before(5).end_position, rows.before(5).unavailable) == (3, 5, 2)
    assert len(rows.before(2).experts) == 0


def test_rows_wider_than_the_model_needs_are_refused():
    wide = RoutedExperts(first_position=0, experts=np.array([[[0, 7], [1, 2]]], np.uint16))
    with pytest.raises(ContractError, match=r"RoutedExperts\.experts is uint16; ids of 8 experts are uint8"):
        wide.check(SPEC)


def test_rows_outside_the_model_are_refused():
    rows = RoutedExperts(first_position=0, experts=np.array([[[0, 8], [1, 2]]], np.uint8))
    with pytest.raises(ContractError, match="expert id 8; the model has 8"):
        rows.check(SPEC)
    assert routed(3, 7).end_position == 7


def test_versions_start_at_zero():
    with pytest.raises(ContractError, match=r"WeightVersion\.version is -1"):
        WeightVersion(-1, "d")
