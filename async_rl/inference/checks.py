"""Checks that all engines share: of a request before it is sent, and of an answer before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from async_rl.inference.spans import cut_into_segments
from async_rl.weights.model_info import ModelInfo
from message_queue.errors import ContractError
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import (
    Float32Array,
    Int32Array,
    RoutedExperts,
    RoutingSpec,
    StopReason,
    TokenOutput,
    WeightVersion,
)

STOP_REASONS = {reason.value: reason for reason in StopReason if reason is not StopReason.TOOL_CALL}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An engine's answer to a request, not checked yet."""

    names: tuple[str, str, str]
    """Names of `token_ids`, `logprobs` and `kept` in the engine's own answer, for errors."""
    reason: Any
    """Why the request ended, a key of STOP_REASONS."""
    token_ids: Any
    """The n sampled tokens."""
    scored: Any
    """The n tokens that the logprobs are of; None if there are no logprobs."""
    logprobs: Any
    """n logprobs."""
    experts: NDArray[Any] | None
    """Expert ids [rows, layers, top_k] from position `request.existing_rows` on, with zeros in dense layers."""
    in_order: bool
    """Whether the engine returns forced experts in the order that they were given in."""
    versions: Iterable[tuple[Any, Any, Any]]
    """(`weight_label`, start, end) of the tokens that each weight version sampled."""
    kept: Any
    """Lists of the n token ids that each token was sampled from, in any order; None if there are none."""


def checked_segments(
    answer: Answer,
    *,
    request: GenerateRequest,
    info: ModelInfo,
    routing: RoutingSpec | None,
    weights: WeightVersion,
    loaded: Mapping[str, WeightVersion],
    replica: str,
) -> list[TokenOutput]:
    """The segments of an answer, one per weight version that sampled.

    Args:
        routing: shape of the captured rows; None if no rows are captured.
        weights: the loaded version, for an answer without tokens.
        loaded: all versions that may have sampled tokens of this answer, by `weight_label`.
        replica: name of the replica.

    Raises:
        ContractError: the answer does not fit the request or the model; names the field and the value.
    """
    if answer.reason not in STOP_REASONS:
        raise ContractError(f"the engine's finish_reason is {answer.reason!r}; known are {', '.join(STOP_REASONS)}")
    token_ids = _sampled_tokens(answer, request, info)
    rows = support = None
    if routing is not None and len(token_ids):
        rows = _moe_rows(answer, len(token_ids), request=request, info=info, routing=routing)
    if request.sampling.is_cut:
        support = _support(answer, len(token_ids))
    segments = cut_into_segments(
        request,
        token_ids=token_ids,
        logprobs=_logprobs(answer, token_ids),
        routed_experts=rows,
        spans=_spans(answer, loaded) if len(token_ids) else [(weights, 0)],
        stop_reason=STOP_REASONS[answer.reason],
        replica=replica,
        support=support,
    )
    for segment in segments:
        segment.check(vocab_size=info.vocab_size, routing=routing, cut=request.sampling.is_cut)
    return segments


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


def _sampled_tokens(answer: Answer, request: GenerateRequest, info: ModelInfo) -> Int32Array:
    field = answer.names[0]
    token_ids = numbers(answer.token_ids, np.int64, field)
    if len(token_ids) > request.max_new_tokens:
        raise ContractError(
            f"the engine's {field} has {len(token_ids)} tokens; the request is for {request.max_new_tokens}"
        )
    if len(token_ids):
        _check_vocabulary(token_ids, f"the engine's {field}", info)
    return token_ids.astype(np.int32)


def _logprobs(answer: Answer, token_ids: Int32Array) -> Float32Array:
    if not len(token_ids):
        return np.zeros(0, np.float32)
    field, scored = answer.names[1], answer.scored
    if scored is None or list(scored) != token_ids.tolist():
        raise ContractError(
            f"the engine's {field} are not of its {len(token_ids)} sampled tokens: "
            f"{None if scored is None else f'{len(scored)} entries, for {list(scored)[:5]}...'}"
        )
    return numbers(answer.logprobs, np.float32, field)


def _support(answer: Answer, sampled: int) -> SamplingSupport:
    if not sampled:
        return SamplingSupport.whole(0)
    field = answer.names[2]
    if answer.kept is None:
        raise ContractError(f"the engine's {field} is None for {sampled} tokens of a cut distribution")
    return kept_tokens(answer.kept, field)


def _moe_rows(
    answer: Answer, sampled: int, *, request: GenerateRequest, info: ModelInfo, routing: RoutingSpec
) -> RoutedExperts:
    """The rows of the MoE layers, checked against the model and against the forced experts of the request."""
    expected = (len(request.token_ids) + sampled - 1 - request.existing_rows, info.num_layers, routing.top_k)
    if answer.experts is None or answer.experts.shape != expected:
        raise ContractError(
            f"the engine's routed_experts has shape {None if answer.experts is None else list(answer.experts.shape)}; "
            f"need {list(expected)} (rows from position {request.existing_rows}, layers, top_k)"
        )
    routed = answer.experts[:, list(routing.layers)]
    if routed.size and not 0 <= int(routed.min()) <= int(routed.max()) < routing.num_experts:
        raise ContractError(
            f"the engine's routed_experts has expert ids {int(routed.min())}..{int(routed.max())}; "
            f"the model has {routing.num_experts}"
        )
    rows = RoutedExperts(first_position=request.existing_rows, experts=routed.astype(routing.dtype, order="C"))
    if request.forced_experts is not None:
        _check_forced(rows, request.forced_experts, in_order=answer.in_order)
    return rows


def _spans(answer: Answer, loaded: Mapping[str, WeightVersion]) -> list[tuple[WeightVersion, int]]:
    """(weights, number of tokens that they sampled) in order."""
    spans: list[tuple[WeightVersion, int]] = []
    at = 0
    for label, start, end in answer.versions:
        if label not in loaded:
            raise ContractError(f"the engine's weight_versions has {label!r}; loaded were {', '.join(loaded)}")
        if not isinstance(end, int) or start != at or end <= at:
            raise ContractError(f"the engine's weight_versions has a span {start}..{end} after {at} tokens")
        spans.append((loaded[label], end - at))
        at = end
    return spans


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
