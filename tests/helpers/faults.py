"""Ways for an engine's answer to break the contract. Each spoils the last segment of a good answer."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from agent_loop.engine import GenerateRequest
from message_queue.tokens import RoutedExperts, TokenOutput

BadAnswer = Callable[[GenerateRequest, list[TokenOutput]], list[TokenOutput]]
"""Changes an answer on its way. Raises ContractError if the contract's types do not let the result exist."""


def on_last(spoil: Callable[[TokenOutput], TokenOutput]) -> BadAnswer:
    """A fault of the last segment that holds tokens; an answer without tokens stays good."""

    def fault(_request: GenerateRequest, answer: list[TokenOutput]) -> list[TokenOutput]:
        return [*answer[:-1], spoil(answer[-1])] if len(answer[-1]) else answer

    return fault


def on_rows(spoil: Callable[[RoutedExperts], RoutedExperts]) -> BadAnswer:
    """A fault of its rows."""

    def spoiled(segment: TokenOutput) -> TokenOutput:
        assert segment.routed_experts is not None
        return replace(segment, routed_experts=spoil(segment.routed_experts))

    return on_last(spoiled)


def _first_row(rows: RoutedExperts, value: list[int]) -> RoutedExperts:
    experts = rows.experts.copy()
    experts[:1, 0] = value
    return replace(rows, experts=experts)


def _padded(rows: RoutedExperts) -> RoutedExperts:
    return replace(rows, experts=np.concatenate([rows.experts, rows.experts[-1:]]))


FAULTS: dict[str, BadAnswer] = {
    "a row too few": on_rows(lambda rows: replace(rows, experts=rows.experts[:-1])),
    "a row too many": on_rows(_padded),
    "rows that start late": on_rows(
        lambda rows: RoutedExperts(first_position=rows.first_position + 1, experts=rows.experts[1:])
    ),
    "no rows": on_last(lambda segment: replace(segment, routed_experts=None)),
    "rows of another shape": on_rows(lambda rows: replace(rows, experts=rows.experts[:, :2])),
    "an expert twice": on_rows(lambda rows: _first_row(rows, [3, 3])),
    "an expert out of range": on_rows(lambda rows: _first_row(rows, [0, 200])),
    "a logprob that is not a number": on_last(
        lambda segment: replace(segment, logprobs=np.full_like(segment.logprobs, np.nan))
    ),
    "a positive logprob": on_last(lambda segment: replace(segment, logprobs=np.full_like(segment.logprobs, 0.5))),
    "a logprob too few": on_last(lambda segment: replace(segment, logprobs=segment.logprobs[:-1])),
    "a negative token id": on_last(lambda segment: replace(segment, token_ids=np.full_like(segment.token_ids, -1))),
}
"""Each is seen at the edge, or, if an engine has none, when the trajectory takes the segment."""
