"""Scores of given tokens: the request to an engine, and the check of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_rl.weights.model_info import ModelInfo
from message_queue.errors import ContractError
from message_queue.tokens import Int32Array
from message_queue.training_sequence import TeacherScores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """Tokens whose logprobs an engine returns, over the whole vocabulary and at temperature 1."""

    request_id: str
    """Unique while in flight."""
    token_ids: Int32Array
    """int32 [t], at least 2."""
    first: int = 1
    """Position of the first token whose logprob is returned, at least 1."""
    top_k: int = 0
    """Most likely tokens that are returned for each of these positions; 0 for none."""


def check_score(request: ScoreRequest, *, info: ModelInfo, max_model_len: int) -> None:
    """Refuse a request that no engine can serve.

    Raises:
        ContractError: the message names the field and the value.
    """
    tokens = len(request.token_ids)
    if not 1 <= request.first < tokens:
        raise ContractError(
            f"ScoreRequest.first is {request.first} for {tokens} tokens; the first token has no logprob, so choose 1 "
            "to the last position"
        )
    if tokens >= max_model_len:  # engines keep a place for a sampled token
        raise ContractError(
            f"ScoreRequest has {tokens} tokens; must be fewer than engine.max_model_len={max_model_len}; raise it"
        )
    if not 0 <= request.top_k <= info.vocab_size:
        raise ContractError(f"ScoreRequest.top_k is {request.top_k}; must be 0 to {info.vocab_size}")
    low, high = int(request.token_ids.min()), int(request.token_ids.max())
    if low < 0 or high >= info.vocab_size:
        raise ContractError(f"ScoreRequest.token_ids has {low}..{high}, and the vocabulary {info.vocab_size} ids")


def checked_scores(
    ids: NDArray[Any], logprobs: NDArray[Any], *, top: tuple[Any, Any] | None, request: ScoreRequest
) -> TeacherScores:
    """The scores of an answer.

    Args:
        ids: the engine's id of each of the n positions from `request.first` on.
        logprobs: n logprobs of these.
        top: ids and logprobs [n, top_k] of the most likely tokens; None without them.

    Raises:
        ContractError: the answer does not fit the request.
    """
    wanted = request.token_ids[request.first :]
    if not np.array_equal(ids, wanted):
        raise ContractError(f"the engine scored {len(ids)} tokens {list(ids)[:8]}...; asked were {wanted[:8]}...")
    found = np.asarray(logprobs, np.float32)
    if found.shape != wanted.shape or not (found <= 0).all():  # NaN is not <= 0 either
        raise ContractError("the engine's logprobs of given tokens are not one number <= 0 for each token")
    given_ids, given_logprobs = top or np.zeros((2, len(wanted), 0))
    top_ids, top_logprobs = np.asarray(given_ids, np.int32), np.asarray(given_logprobs, np.float32)
    if not top_ids.shape == top_logprobs.shape == (len(wanted), request.top_k):
        raise ContractError(
            f"the engine's most likely tokens have the shapes {top_ids.shape} and {top_logprobs.shape}; asked were "
            f"{(len(wanted), request.top_k)}"
        )
    if not (top_logprobs <= 0).all() or (np.diff(np.sort(top_ids, 1), axis=1) == 0).any():
        raise ContractError("the engine's most likely tokens are not distinct with logprobs <= 0")
    return TeacherScores(logprobs=found, ids=top_ids, top_logprobs=top_logprobs)
