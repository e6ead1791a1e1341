"""Splits the tokens of one answer into segments, one per weight version. All engines use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agent_loop.engine import GenerateRequest
from message_queue.errors import ContractError
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import Float32Array, Int32Array, RoutedExperts, StopReason, TokenOutput, WeightVersion


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
    """One segment per span; exactly one if no token was sampled.

    A row belongs to the forward pass that computed it. The last token that the old weights sampled is forwarded by the
    new weights, so its row is the first row of the next segment. For a request of 4 tokens without existing rows and
    spans of 2 and 3 tokens, the segments have rows 0..4 and 5..7.

    Args:
        token_ids: int32 [n], the sampled tokens.
        logprobs: float32 [n], their logprobs.
        routed_experts: rows `request.existing_rows` .. len(request.token_ids) + n - 2; None if no rows are captured.
        spans: (weights, number of tokens that they sampled) in order, n tokens in total; [(weights, 0)] if n is 0.
        stop_reason: stop reason of the last segment; earlier segments end with ABORT.
        replica: name of the replica.
        support: kept tokens of n positions; None if tokens were sampled from the whole vocabulary.

    Raises:
        ContractError: the spans or the support do not cover n tokens.
    """
    if support is not None and len(support) != len(token_ids):
        raise ContractError(f"the support has {len(support)} positions; {len(token_ids)} tokens were sampled")
    counts = [count for _, count in spans]
    if sum(counts) != len(token_ids) or (len(counts) > 1 and min(counts) < 1):
        raise ContractError(f"the weight versions cover {counts} tokens; {len(token_ids)} were sampled")
    segments: list[TokenOutput] = []
    start, row = 0, 0
    for number, (weights, count) in enumerate(spans):
        last = number == len(spans) - 1
        rows = None
        if routed_experts is not None and count:
            end = len(request.token_ids) + start + count - 1 - request.existing_rows
            rows = RoutedExperts(
                first_position=request.existing_rows + row,
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
    """The request that continues after `segments`, the answer to `request`; unchanged if they have no tokens."""
    sampled = [s for s in segments if len(s)]
    if not sampled:
        return request
    token_ids = np.concatenate([request.token_ids, *(s.token_ids for s in sampled)])
    captured = any(s.routed_experts is not None for s in sampled)
    return replace(
        request,
        token_ids=token_ids,
        max_new_tokens=request.max_new_tokens - sum(map(len, sampled)),
        existing_rows=len(token_ids) - 1 if captured else request.existing_rows,
    )


def joined(segments: Sequence[TokenOutput]) -> list[TokenOutput]:
    """Merge the segments of several answers to one request.

    Empty segments are removed. An empty last segment stays if its stop reason is not ABORT or if no other is left.
    """
    *before, last = segments
    sampled = [s for s in before if len(s)]
    return sampled if sampled and not len(last) and last.stop_reason is StopReason.ABORT else [*sampled, last]
