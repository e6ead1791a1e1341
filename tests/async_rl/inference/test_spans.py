"""The answer to a request, cut into one segment per weight version, and rejoined."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import GenerateRequest
from async_rl.inference.spans import continued, cut_into_segments, joined
from message_queue.errors import ContractError
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, WeightVersion
from message_queue.trajectory import Trajectory
from tests.helpers.groups import sets_of, support_of

ROUTING = RoutingSpec(layers=(0, 1), num_experts=8, top_k=2)


def rows(first, end):
    """Row p says p: its experts are p and p + 1 modulo 8."""
    at = np.arange(first, end)[:, None, None]
    return RoutedExperts(
        first_position=first, experts=((at + np.arange(2) + np.zeros((2, 1), int)) % 8).astype(np.uint8)
    )


def cut(prompt, held, counts, *, captured=True, reason=StopReason.LENGTH, **fields):
    """A request and its answer with one span per count; token at position p is p, its logprob -p."""
    sampled = sum(counts)
    ids = np.arange(prompt, prompt + sampled, dtype=np.int32)
    request = GenerateRequest(
        request_id="a", token_ids=np.arange(prompt, dtype=np.int32), max_new_tokens=100, existing_rows=held
    )
    return request, cut_into_segments(
        request,
        **{
            "token_ids": ids,
            "logprobs": -ids.astype(np.float32),
            "routed_experts": rows(held, prompt + sampled - 1) if captured and sampled else None,
            "spans": [(WeightVersion(i, "d"), n) for i, n in enumerate(counts)],
            "stop_reason": reason,
            "replica": "r",
            **fields,
        },
    )


def taken(request, segments):
    """A trajectory with these segments, checked for its rows."""
    trajectory = Trajectory(routing=ROUTING)
    trajectory.observe(request.token_ids)
    for segment in segments:
        trajectory.extend(segment)
    merged = trajectory.sequences()[-1].routed_experts
    assert merged is not None
    assert (merged[:-1] == rows(0, len(trajectory) - 1).experts).all()
    return trajectory


spans = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(prompt=st.integers(1, 9), held=st.integers(0, 8), counts=spans, captured=st.booleans())
def test_segments_hold_every_token_and_row_once_and_in_order(prompt, held, counts, captured):
    held = min(held, prompt - 1)
    request, segments = cut(prompt, held, counts, captured=captured)
    assert [len(s) for s in segments] == counts
    assert [s.weights.version for s in segments] == list(range(len(counts)))
    assert [s.stop_reason for s in segments] == [StopReason.ABORT] * (len(counts) - 1) + [StopReason.LENGTH]
    ids = np.concatenate([s.token_ids for s in segments])
    assert ids.tolist() == list(range(prompt, prompt + sum(counts)))
    assert (np.concatenate([s.logprobs for s in segments]) == -ids).all()
    ends = [prompt - 1 + sum(counts[: number + 1]) for number in range(len(counts))]  # the last token has no row yet
    for segment, first, end in zip(segments, [held, *ends], ends, strict=False):
        got = segment.routed_experts
        if not captured:
            assert got is None
            continue
        assert got is not None and (got.first_position, got.end_position) == (first, end)
        assert (got.experts == rows(first, end).experts).all()
    if captured and not held:
        assert taken(request, segments).num_rows == prompt + sum(counts) - 1


@given(counts=spans)
def test_segments_have_the_kept_sets_of_their_tokens(counts):
    sets = [[token, *range(100, 100 + token % 3)] for token in range(4, 4 + sum(counts))]
    _, segments = cut(4, 0, counts, support=support_of(sets))
    assert [len(sets_of(s.support)) for s in segments] == counts
    assert [kept for s in segments for kept in sets_of(s.support)] == sets


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("support", support_of([[4], [5]])),
        *(("spans", counts) for counts in ([1, 1], [3, 1], [2, 0, 1], [0, 3])),
    ],
)
def test_spans_and_support_that_do_not_fit_the_tokens_are_refused(field, value):
    if field == "spans":
        value = [(WeightVersion(i, "d"), n) for i, n in enumerate(value)]
    with pytest.raises(ContractError):
        cut(4, 0, [3], **{field: value})


@given(prompt=st.integers(1, 9), first=spans, second=spans, captured=st.booleans())
def test_continued_request_asks_for_the_rest_alone(prompt, first, second, captured):
    request, segments = cut(prompt, 0, first, captured=captured, reason=StopReason.ABORT)
    rest = continued(request, segments)
    assert rest.token_ids.tolist() == list(range(prompt + sum(first)))
    assert rest.max_new_tokens == 100 - sum(first)
    assert rest.existing_rows == (prompt + sum(first) - 1 if captured else 0)
    _, more = cut(len(rest.token_ids), rest.existing_rows, second, captured=captured)
    both = joined([*segments, *more])
    assert [len(s) for s in both] == [*first, *second]
    if captured:
        taken(request, both)


def test_joined_leaves_out_empty_segments_without_a_reason():
    request, [empty] = cut(4, 0, [0], reason=StopReason.ABORT)
    assert continued(request, [empty]) is request
    _, [some] = cut(4, 0, [3], reason=StopReason.ABORT)
    _, [failed] = cut(4, 0, [0], reason=StopReason.ERROR)
    assert joined([empty]) == [empty]
    assert joined([empty, empty]) == [empty]
    assert joined([some, empty]) == [some]
    assert joined([empty, some]) == [some]
    assert joined([some, failed]) == [some, failed]
