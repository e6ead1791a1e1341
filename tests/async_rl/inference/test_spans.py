"""What one request returned, cut where new weights arrived, and put together again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.engine import GenerateRequest
from async_rl.inference.spans import continued, cut_into_segments, joined
from message_queue.tokens import ContractError, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import Trajectory
from tests.helpers.groups import sets_of, support_of

ROUTING = RoutingSpec(layers=(0, 1), num_experts=8, top_k=2)


def rows(first: int, end: int) -> RoutedExperts:
    """Row p says p: its experts are p and p + 1 modulo 8."""
    at = np.arange(first, end)[:, None, None]
    return RoutedExperts(
        first_position=first, experts=((at + np.arange(2) + np.zeros((2, 1), int)) % 8).astype(np.uint8)
    )


def cut(
    prompt: int,
    held: int,
    counts: list[int],
    *,
    captured: bool = True,
    reason: StopReason = StopReason.LENGTH,
    **fields: Any,
) -> tuple[GenerateRequest, list[TokenOutput]]:
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


spans = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(prompt=st.integers(1, 9), held=st.integers(0, 8), counts=spans, captured=st.booleans())
def test_segments_hold_every_token_and_row_once_and_in_order(prompt: int, held: int, counts: list[int], captured: bool):
    held = min(held, prompt - 1)
    _, segments = cut(prompt, held, counts, captured=captured)
    assert [len(s) for s in segments] == counts
    assert [s.weights.version for s in segments] == list(range(len(counts)))
    assert [s.stop_reason for s in segments] == [StopReason.ABORT] * (len(counts) - 1) + [StopReason.LENGTH]
    ids = np.concatenate([s.token_ids for s in segments])
    assert ids.tolist() == list(range(prompt, prompt + sum(counts)))
    assert (np.concatenate([s.logprobs for s in segments]) == -ids).all()
    at, end = held, prompt
    for segment in segments:
        end += len(segment)
        if not captured:
            assert segment.routed_experts is None
            continue
        got = segment.routed_experts
        assert got is not None
        assert (got.first_position, got.end_position) == (at, end - 1), (
            "the last token is forwarded by the next weights"
        )
        assert (got.experts == rows(at, end - 1).experts).all()
        at = end - 1


@given(prompt=st.integers(1, 9), counts=spans)
def test_a_trajectory_takes_the_segments_as_they_are(prompt: int, counts: list[int]):
    request, segments = cut(prompt, 0, counts)
    trajectory = Trajectory(routing=ROUTING)
    trajectory.observe(request.token_ids)
    for segment in segments:
        trajectory.extend(segment)
    assert trajectory.num_rows == len(trajectory) - 1 == prompt + sum(counts) - 1
    merged = trajectory.sequences()[-1].routed_experts
    assert merged is not None
    assert (merged[:-1] == rows(0, len(trajectory) - 1).experts).all()


@given(counts=spans)
def test_each_segment_takes_the_kept_sets_of_its_tokens(counts: list[int]):
    sets = [[token, *range(100, 100 + token % 3)] for token in range(4, 4 + sum(counts))]
    _, segments = cut(4, 0, counts, support=support_of(sets))
    assert [len(sets_of(s.support)) for s in segments] == counts
    assert [kept for s in segments for kept in sets_of(s.support)] == sets


def test_a_support_that_is_not_of_the_tokens_is_refused():
    with pytest.raises(ContractError, match="support"):
        cut(4, 0, [2, 1], support=support_of([[4], [5]]))


def test_an_answer_without_tokens_is_one_empty_segment():
    _, [segment] = cut(4, 0, [0], reason=StopReason.ABORT)
    assert (len(segment), segment.routed_experts, segment.stop_reason) == (0, None, StopReason.ABORT)


@pytest.mark.parametrize("counts", [[1, 1], [3, 1], [2, 0, 1], [0, 3]])
def test_spans_that_are_not_of_the_tokens_are_refused(counts: list[int]):
    with pytest.raises(ContractError, match=r"weight versions cover \[.*\] tokens; 3 were sampled"):
        cut(4, 0, [3], spans=[(WeightVersion(i, "d"), n) for i, n in enumerate(counts)])


@pytest.mark.parametrize(("first", "end"), [(1, 6), (0, 5), (0, 7)])
def test_rows_that_are_not_those_of_the_request_are_refused(first: int, end: int):
    with pytest.raises(ContractError, match=rf"routed_experts has rows {first}\.\.{end - 1}; .* 0\.\.5"):
        cut(4, 0, [3], routed_experts=rows(first, end))


@given(prompt=st.integers(1, 9), first=spans, second=spans, captured=st.booleans())
def test_a_request_that_goes_on_asks_for_the_rest_alone(
    prompt: int, first: list[int], second: list[int], captured: bool
):
    request, segments = cut(prompt, 0, first, captured=captured, reason=StopReason.ABORT)
    rest = continued(request, segments)
    assert rest.token_ids.tolist() == list(range(prompt + sum(first)))
    assert rest.max_new_tokens == 100 - sum(first)
    assert rest.existing_rows == (prompt + sum(first) - 1 if captured else 0)
    _, more = cut(len(rest.token_ids), rest.existing_rows, second, captured=captured)
    both = joined([*segments, *more])
    assert [len(s) for s in both] == [*first, *second]
    if captured:
        trajectory = Trajectory(routing=ROUTING)
        trajectory.observe(request.token_ids)
        for segment in both:
            trajectory.extend(segment)
        assert trajectory.num_rows == len(trajectory) - 1


def test_what_sampled_nothing_and_says_nothing_is_left_out():
    request, [empty] = cut(4, 0, [0], reason=StopReason.ABORT)
    assert continued(request, [empty]) is request
    _, [some] = cut(4, 0, [3], reason=StopReason.ABORT)
    _, [failed] = cut(4, 0, [0], reason=StopReason.ERROR)
    assert joined([empty]) == [empty]
    assert joined([empty, empty]) == [empty]
    assert joined([some, empty]) == [some]
    assert joined([empty, some]) == [some]
    assert joined([some, failed]) == [some, failed]
