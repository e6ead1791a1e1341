"""Checks that all engines share: of a request before it is sent, and of an answer before it is used."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from async_rl.weights.model_info import ModelInfo
from message_queue.errors import ContractError
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import Int32Array, RoutedExperts, RoutingSpec, TokenOutput, WeightVersion


def weight_label(weights: WeightVersion) -> str:
    """Label of a version inside an engine; returned with the tokens that the version sampled."""
    return f"{weights.version}:{weights.digest}"


def check_request(request: GenerateRequest, *, info: ModelInfo, routing: RoutingSpec | None) -> None:
    """Refuse a request that no engine can serve.

    Args:
        routing: shape of the captured rows; None if the replica captures none.

    Raises:
        ContractError: the message names the field and the value.
    """
    tokens = len(request.token_ids)
    if not request.request_id:
        raise ContractError("GenerateRequest.request_id is empty; an id names the request in the engine")
    if not tokens:
        raise ContractError("GenerateRequest.token_ids is empty; a decode starts from at least one token")
    if request.max_new_tokens < 1:
        raise ContractError(f"GenerateRequest.max_new_tokens is {request.max_new_tokens}; must be >= 1")
    if not 0 <= request.existing_rows < tokens:
        raise ContractError(
            f"GenerateRequest.existing_rows is {request.existing_rows} for {tokens} tokens; the last token was never "
            f"forwarded, so at most {tokens - 1} rows exist"
        )
    _check_vocabulary(request.token_ids, "GenerateRequest.token_ids", info)
    forced = request.forced_experts
    if forced is None:
        return
    if routing is None:
        raise ContractError("GenerateRequest.forced_experts is set, but the replica captures no routing")
    forced.check(routing)
    if forced.unavailable or forced.end_position > tokens - 1:
        raise ContractError(
            f"GenerateRequest.forced_experts has rows {forced.first_position}..{forced.end_position - 1} "
            f"({forced.unavailable} unavailable) for {tokens} tokens; need available rows up to {tokens - 2} at most"
        )


def numbers(values: Any, dtype: Any, field: str) -> NDArray[Any]:
    """A list in an answer as an array [n] of `dtype`.

    Args:
        field: name of the list in the engine's answer.

    Raises:
        ContractError: the list is not one-dimensional or has values that are not numbers of `dtype`.
    """
    try:
        array = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractError(
            f"the engine's {field} are no {np.dtype(dtype).name} numbers: {values!r:.100}: {error}"
        ) from error
    if array.ndim != 1:
        raise ContractError(f"the engine's {field} has shape {list(array.shape)}; need one number per token")
    return array


def sampled_tokens(values: Any, field: str, *, request: GenerateRequest, info: ModelInfo) -> Int32Array:
    """The sampled tokens of an answer, int32 [n].

    Raises:
        ContractError: there are more than `request.max_new_tokens`, or ids outside the vocabulary.
    """
    token_ids = numbers(values, np.int64, field)
    if len(token_ids) > request.max_new_tokens:
        raise ContractError(
            f"the engine's {field} has {len(token_ids)} tokens; the request is for {request.max_new_tokens}"
        )
    if len(token_ids):
        _check_vocabulary(token_ids, f"the engine's {field}", info)
    return token_ids.astype(np.int32)


def rows_shape(
    request: GenerateRequest, sampled: int, *, info: ModelInfo, routing: RoutingSpec
) -> tuple[int, int, int]:
    """Shape (rows, layers, top_k) of the routing for `sampled` tokens; layers include dense layers."""
    return (len(request.token_ids) + sampled - 1 - request.existing_rows, info.num_layers, routing.top_k)


def moe_rows(experts: NDArray[Any], *, request: GenerateRequest, routing: RoutingSpec, in_order: bool) -> RoutedExperts:
    """The rows of the MoE layers, checked against the model and against the forced experts of the request.

    Args:
        experts: integer [rows, layers, top_k] of all layers; the first row has position `request.existing_rows`.
        in_order: whether the engine returns forced experts in the order that they were given in.

    Raises:
        ContractError: expert ids are out of range, or rows differ from the forced experts.
    """
    routed = experts[:, list(routing.layers)]
    if routed.size and not 0 <= int(routed.min()) <= int(routed.max()) < routing.num_experts:
        raise ContractError(
            f"the engine's routed_experts has expert ids {int(routed.min())}..{int(routed.max())}; "
            f"the model has {routing.num_experts}"
        )
    rows = RoutedExperts(first_position=request.existing_rows, experts=routed.astype(routing.dtype, order="C"))
    if request.forced_experts is not None:
        _check_forced(rows, request.forced_experts, in_order=in_order)
    return rows


def kept_tokens(sets: Any, field: str) -> SamplingSupport:
    """The kept tokens of an answer.

    Args:
        sets: a list of token ids for each sampled token, in any order.
        field: name of the lists in the engine's answer.

    Raises:
        ContractError: `sets` is not a list of lists of ids, or a token occurs twice at one position.
    """
    try:
        counts = np.fromiter(map(len, sets), np.int64, len(sets))
        ids = np.fromiter(chain.from_iterable(sets), np.int64, int(counts.sum()))
    except (TypeError, ValueError, OverflowError) as error:
        raise ContractError(f"the engine's {field} has no lists of token ids: {sets!r:.100}: {error}") from error
    positions = np.repeat(np.arange(len(counts)), counts)
    return SamplingSupport.pack(counts, ids[np.lexsort((ids, positions))])


def check_segments(
    segments: list[TokenOutput], *, request: GenerateRequest, info: ModelInfo, routing: RoutingSpec | None
) -> list[TokenOutput]:
    """Check each segment against the contract, and return the segments.

    Raises:
        ContractError: a segment breaks the contract.
    """
    for segment in segments:
        segment.check(vocab_size=info.vocab_size, routing=routing, cut=request.sampling.is_cut)
    return segments


def _check_vocabulary(token_ids: NDArray[Any], field: str, info: ModelInfo) -> None:
    low, high = int(token_ids.min()), int(token_ids.max())
    if not 0 <= low <= high < info.vocab_size:
        raise ContractError(f"{field} spans {low}..{high}; the vocabulary has {info.vocab_size}")


def _check_forced(rows: RoutedExperts, forced: RoutedExperts, *, in_order: bool) -> None:
    start, end = max(rows.first_position, forced.first_position), min(rows.end_position, forced.end_position)
    if start >= end:
        return
    got = rows.experts[start - rows.first_position : end - rows.first_position]
    asked = forced.experts[start - forced.first_position : end - forced.first_position]
    same = got == asked if in_order else np.sort(got, -1) == np.sort(asked, -1)
    if not same.all():
        at = int(np.argmin(same.all(axis=(1, 2))))
        raise ContractError(
            f"the engine's routed_experts at position {start + at} are {got[at].tolist()}; "
            f"forced were {asked[at].tolist()}"
        )
