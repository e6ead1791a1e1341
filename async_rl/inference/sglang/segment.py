"""Converts a request to the body of SGLang's /generate, and the answer to checked segments."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from agent_loop.engine import GenerateRequest
from async_rl.inference.checks import (
    check_request,
    check_segments,
    kept_tokens,
    moe_rows,
    numbers,
    rows_shape,
    sampled_tokens,
)
from async_rl.inference.sglang.config import MAX_KEPT
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

STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
FORCED = "async_rl_forced"  # key of the forced rows in SGLang's custom_params; the plugin reads it


def check_generate(
    request: GenerateRequest, *, info: ModelInfo, routing: RoutingSpec | None, max_model_len: int
) -> None:
    """Refuse a request that no engine can serve, or that the server would truncate or misread.

    Raises:
        ContractError: the message names the field and the value.
    """
    check_request(request, info=info, routing=routing)
    tokens = len(request.token_ids)
    if tokens + request.max_new_tokens > max_model_len:
        raise ContractError(
            f"GenerateRequest has {tokens} tokens and max_new_tokens={request.max_new_tokens}; together more than "
            f"engine.max_model_len={max_model_len}"
        )
    if MAX_KEPT <= request.sampling.top_k < info.vocab_size:
        raise ContractError(
            f"GenerateRequest.sampling.top_k is {request.sampling.top_k}; SGLang returns fewer than {MAX_KEPT} kept "
            "tokens, so lower it, or set it to -1"
        )


def generate_body(request: GenerateRequest, *, info: ModelInfo, routing: RoutingSpec | None) -> dict[str, Any]:
    """Body of /generate for a checked request."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": _top_k(request, info) if sampling.is_cut else -1,
        "min_p": sampling.min_p,
        "stop_token_ids": list(request.stop_token_ids),
    }
    salt = request.cache_salt
    if request.forced_experts is not None and len(request.forced_experts.experts) and routing is not None:
        params["custom_params"] = {FORCED: _forced(request.forced_experts, info, routing)}
        salt = f"{salt}|forced|{request.session or request.request_id}"  # the whole session forces these rows
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "extra_key": salt or None,
    }
    if sampling.is_cut:  # otherwise logprobs are over the whole distribution
        body["return_sampling_mask"] = True
    if routing is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.existing_rows}
    return body


def to_segments(
    answer: Any,
    *,
    request: GenerateRequest,
    info: ModelInfo,
    routing: RoutingSpec | None,
    weights: WeightVersion,
    loaded: Mapping[str, WeightVersion],
    replica: str,
) -> list[TokenOutput]:
    """Check an answer of /generate and convert it to segments, one per weight version that sampled.

    Args:
        routing: shape of the captured rows; None if no rows are captured.
        weights: the loaded version, for an answer without tokens.
        loaded: all versions that may have sampled tokens of this answer, by `weight_label`.
        replica: name of the replica.

    Raises:
        ContractError: the answer does not fit the request or the model; names the field and the value.
    """
    meta: Any = _field(answer, "meta_info", dict)
    stop_reason = _stop_reason(meta)
    token_ids = sampled_tokens(_field(answer, "output_ids", list), "output_ids", request=request, info=info)
    if stop_reason is StopReason.LENGTH and len(token_ids) != request.max_new_tokens:
        raise ContractError(
            f"the engine's finish_reason is 'length' after {len(token_ids)} tokens; "
            f"the request is for {request.max_new_tokens}"
        )
    if not len(token_ids) and stop_reason is not StopReason.ABORT:
        raise ContractError(f"the engine's output_ids is empty with finish_reason {stop_reason.value!r}")
    segments = cut_into_segments(
        request,
        token_ids=token_ids,
        logprobs=_logprobs(meta, request, token_ids),
        routed_experts=None
        if routing is None or not len(token_ids)
        else _rows(meta, request, info, routing, token_ids),
        spans=_spans(meta, loaded, len(token_ids)) if len(token_ids) else [(weights, 0)],
        stop_reason=stop_reason,
        replica=replica,
        support=_support(meta, token_ids) if request.sampling.is_cut else None,
    )
    return check_segments(segments, request=request, info=info, routing=routing)


def _top_k(request: GenerateRequest, info: ModelInfo) -> int:
    """SGLang returns kept tokens for a top_k of at most MAX_KEPT; the plugin treats MAX_KEPT as no top_k."""
    return request.sampling.top_k if 0 < request.sampling.top_k < info.vocab_size else MAX_KEPT


def _forced(forced: RoutedExperts, info: ModelInfo, routing: RoutingSpec) -> dict[str, Any]:
    rows = np.ascontiguousarray(forced.experts, dtype=np.uint8 if routing.num_experts <= 256 else np.int16)
    return {
        "start": forced.first_position,
        "rows": base64.b64encode(rows.tobytes()).decode(),
        "dtype": rows.dtype.name,
        "shape": list(rows.shape),
        "layers": list(routing.layers),
        "num_layers": info.num_layers,
    }


def _field(container: Any, name: str, kind: type) -> Any:
    value = container.get(name) if isinstance(container, dict) else None
    if not isinstance(value, kind):
        raise ContractError(f"the engine's {name} is {value!r:.100}; need a {kind.__name__}")
    return value


def _stop_reason(meta: dict[str, Any]) -> StopReason:
    reason = _field(meta, "finish_reason", dict).get("type")
    if reason not in STOP_REASONS:
        raise ContractError(f"the engine's finish_reason is {reason!r}; known are {', '.join(STOP_REASONS)}")
    return STOP_REASONS[reason]


def _logprobs(meta: dict[str, Any], request: GenerateRequest, token_ids: Int32Array) -> Float32Array:
    """The logprobs float32 [n] of the sampled tokens."""
    if not len(token_ids):
        return np.zeros(0, np.float32)
    entries = _field(meta, "output_token_logprobs", list)
    of_tokens = [entry[1] if isinstance(entry, list) and len(entry) > 1 else None for entry in entries]
    if of_tokens != token_ids.tolist():
        raise ContractError(
            f"the engine's output_token_logprobs are not of its {len(token_ids)} sampled tokens: "
            f"{len(entries)} entries, for {of_tokens[:5]}..."
        )
    if not request.sampling.is_cut:
        return numbers([entry[0] for entry in entries], np.float32, "output_token_logprobs")
    cut = numbers(_field(meta, "output_token_sampling_logprobs", list), np.float32, "output_token_sampling_logprobs")
    if len(cut) != len(token_ids):
        raise ContractError(
            f"the engine's output_token_sampling_logprobs has {len(cut)} entries for {len(token_ids)} sampled tokens"
        )
    return np.minimum(cut, np.float32(0))  # rounding may lift a single token's logprob above 0


def _support(meta: dict[str, Any], token_ids: Int32Array) -> SamplingSupport:
    """The kept tokens of n positions."""
    if not len(token_ids):
        return SamplingSupport.whole(0)
    return kept_tokens(_field(meta, "output_token_sampling_mask", list), "output_token_sampling_mask")


def _rows(
    meta: dict[str, Any], request: GenerateRequest, info: ModelInfo, routing: RoutingSpec, token_ids: Int32Array
) -> RoutedExperts:
    """Rows existing_rows .. tokens + n - 2 of the MoE layers; the engine also returns dense layers, as zeros."""
    encoded = _field(meta, "routed_experts", str)
    expected = rows_shape(request, len(token_ids), info=info, routing=routing)
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ContractError(f"the engine's routed_experts is not base64 of int32: {error}") from error
    if flat.size != np.prod(expected):
        raise ContractError(
            f"the engine's routed_experts has {flat.size} ids; need {int(np.prod(expected))} for {list(expected)} "
            f"(rows from position {request.existing_rows}, layers, top_k)"
        )
    layers = flat.reshape(expected)
    dense = sorted(set(range(info.num_layers)) - set(routing.layers))
    if layers[:, dense].any():
        raise ContractError(
            f"the engine's routed_experts names experts in the dense layers {dense}, where rows are zero; "
            f"its layout is not {list(expected)} (rows, layers, top_k)"
        )
    return moe_rows(layers, request=request, routing=routing, in_order=False)


def _spans(meta: dict[str, Any], loaded: Mapping[str, WeightVersion], tokens: int) -> list[tuple[WeightVersion, int]]:
    """(weights, number of tokens that they sampled) in order."""
    spans: list[tuple[WeightVersion, int]] = []
    at = 0
    for span in _field(meta, "weight_versions", list):
        label = _field(span, "version", str)
        start, end = span.get("start"), span.get("end")
        if label not in loaded:
            raise ContractError(f"the engine's weight_versions has {label!r}; loaded were {', '.join(loaded)}")
        if not isinstance(end, int) or start != at or end <= at:
            raise ContractError(f"the engine's weight_versions has a span {start}..{end} after {at} tokens")
        spans.append((loaded[label], end - at))
        at = end
    if at != tokens:
        raise ContractError(f"the engine's weight_versions covers {at} tokens; {tokens} were sampled")
    return spans
