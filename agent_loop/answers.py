"""Checks the answer of an engine to one request, and cuts it if a turn ends inside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from agent_loop.engine import GenerateRequest
from message_queue.errors import ContractError
from message_queue.tokens import StopReason, TokenOutput


def check_answer(segments: Sequence[TokenOutput], request: GenerateRequest) -> None:
    """Refuse an answer that `Engine.generate` does not allow. The check does not depend on the trajectory.

    Raises:
        ContractError: no segment, more tokens than asked for, a segment before the last that has no tokens or does
            not end with an abort, or tokens after a stop token.
    """
    if not segments:
        raise ContractError(f"request {request.request_id} was answered with no segment; need at least one")
    who = f"replica {segments[-1].replica}"
    count = sum(map(len, segments))
    if count > request.max_new_tokens:
        raise ContractError(
            f"{who} returned {count} tokens for request {request.request_id}, "
            f"which asked for at most {request.max_new_tokens}"
        )
    for number, segment in enumerate(segments[:-1]):
        if segment.stop_reason is not StopReason.ABORT or not len(segment):
            raise ContractError(
                f"{who} went on after segment {number} of request {request.request_id}, which has {len(segment)} "
                f"tokens and stop_reason {segment.stop_reason}; all but the last hold tokens and end with abort"
            )
    _check_stop_tokens(segments, request.stop_token_ids, who=f"{who}: request {request.request_id}")


def cut_segments(segments: Sequence[TokenOutput], *, count: int, first_position: int) -> list[TokenOutput]:
    """The first `count` (>= 1) tokens, as an engine would have returned them that stopped there.

    Args:
        first_position: absolute position of the first token.
    """
    kept: list[TokenOutput] = []
    for segment in segments:
        size = min(len(segment), count)
        rows = segment.routed_experts
        if size < len(segment) and rows is not None:
            rows = rows.before(first_position + size - 1)
        kept.append(
            replace(
                segment,
                token_ids=segment.token_ids[:size],
                logprobs=segment.logprobs[:size],
                routed_experts=rows,
                support=None if segment.support is None else segment.support.part(0, size),
            )
        )
        count, first_position = count - size, first_position + size
        if not count:
            break
    kept[-1] = replace(kept[-1], stop_reason=StopReason.STOP)
    return kept


def _check_stop_tokens(segments: Sequence[TokenOutput], stop_token_ids: Collection[int], *, who: str) -> None:
    token_ids = np.concatenate([segment.token_ids for segment in segments])
    for stop in stop_token_ids:
        early = np.flatnonzero(token_ids[:-1] == stop)
        if len(early):
            raise ContractError(
                f"{who} has stop token {stop} as token {int(early[0])} of {len(token_ids)}; "
                "a stop token ends the decode"
            )
