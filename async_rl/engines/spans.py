"""What one request returned, cut into segments where new weights arrived in flight; the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agent_loop.engine import GenerateRequest
from message_queue.support import SamplingSupport
from message_queue.tokens import (
    ContractError,
    Float32Array,
    Int32Array,
    RoutedExperts,
    StopReason,
    TokenOutput,
    WeightVersion,
)


def cut_into_segments(
    request: GenerateRequest,
    *,
    token_ids: Int32Array,
    logprobs: Float32Array,
    routed_experts: RoutedExperts | None,
    spans: Sequence[tuple[WeightVersion, int]],
    stop_reason: StopReason,
    replica: str,
    support: SamplingSupport | None = None,
) -> list[TokenOutput]:
    """One segment per span; exactly one when nothing was sampled.

    A row belongs to the forward pass that ran it: the last token under the old weights is forwarded by the new ones, so
    its row is the first of the next segment.

    Args:
        token_ids: int32 [n], all that was sampled. logprobs: float32 [n].
        routed_experts: rows rows_held .. len(request.token_ids) + n - 2; None where none are captured.
        spans: (weights, tokens that they sampled) in order, n tokens together; (weights, 0) alone when n is 0.
        support: of n positions; None if tokens were sampled from the whole vocabulary.

    Raises:
        ContractError: spans or a support that are not of n tokens, or rows that are not those of the request.
    """
    if support is not None and len(support) != len(token_ids):
        raise ContractError(f"the support has {len(support)} positions; {len(token_ids)} tokens were sampled")
    _check_extent(request, len(token_ids), routed_experts, spans)
    segments: list[TokenOutput] = []
    start, row = 0, 0
    for number, (weights, count) in enumerate(spans):
        last = number == len(spans) - 1
        rows = None
        if routed_experts is not None and count:
            end = len(request.token_ids) + start + count - 1 - request.rows_held
            rows = RoutedExperts(
                first_position=request.rows_held + row,
                experts=routed_experts.experts[row:end],
                unavailable=routed_experts.unavailable if number == 0 else 0,
            )
            row = end
        segments.append(
            TokenOutput(
                token_ids=token_ids[start : start + count],
                logprobs=logprobs[start : start + count],
                routed_experts=rows,
                weights=weights,
                stop_reason=stop_reason if last else StopReason.ABORT,
                replica=replica,
                support=None if support is None else support.part(start, start + count),
            )
        )
        start += count
    return segments


def continued(request: GenerateRequest, segments: Sequence[TokenOutput]) -> GenerateRequest:
    """The request that goes on where `segments`, the answer to `request`, ended; as it was when they are empty."""
    sampled = [s for s in segments if len(s)]
    if not sampled:
        return request
    token_ids = np.concatenate([request.token_ids, *(s.token_ids for s in sampled)])
    captured = any(s.routed_experts is not None for s in sampled)
    return replace(
        request,
        token_ids=token_ids,
        max_new_tokens=request.max_new_tokens - sum(map(len, sampled)),
        rows_held=len(token_ids) - 1 if captured else request.rows_held,
    )


def joined(segments: Sequence[TokenOutput]) -> list[TokenOutput]:
    """Segments of several answers to one request as one answer: less those that sampled nothing and say nothing."""
    *before, last = segments
    told = [s for s in before if len(s)]
    return told if told and not len(last) and last.stop_reason is StopReason.ABORT else [*told, last]


def _check_extent(
    request: GenerateRequest,
    sampled: int,
    routed_experts: RoutedExperts | None,
    spans: Sequence[tuple[WeightVersion, int]],
) -> None:
    counts = [count for _, count in spans]
    if sum(counts) != sampled or (len(counts) > 1 and min(counts) < 1):
        raise ContractError(f"the weight versions cover {counts} tokens; {sampled} were sampled")
    if routed_experts is None:
        return
    end = len(request.token_ids) + sampled - 1
    if (routed_experts.first_position, routed_experts.end_position) != (request.rows_held, end):
        raise ContractError(
            f"routed_experts has rows {routed_experts.first_position}..{routed_experts.end_position - 1}; "
            f"need {request.rows_held}..{end - 1}"
        )
