"""Converts a request to the body of SGLang's /generate, and the answer to checked segments."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from async_rl.inference.checks import Answer, check_request, checked_segments, numbers
from async_rl.inference.scores import ScoreRequest, checked_scores
from async_rl.inference.sglang.config import MAX_KEPT
from async_rl.weights.model_info import ModelInfo
from message_queue.errors import ContractError
from message_queue.tokens import Float32Array, RoutedExperts, RoutingSpec, TokenOutput
from message_queue.training_sequence import TeacherScores

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
    answer: Any, *, request: GenerateRequest, info: ModelInfo, routing: RoutingSpec | None, **context: Any
) -> list[TokenOutput]:
    """Check an answer of /generate and convert it to segments; for the other arguments see `checked_segments`."""
    meta: Any = _field(answer, "meta_info", dict)
    reason = _field(meta, "finish_reason", dict).get("type")
    token_ids = _field(answer, "output_ids", list)
    if reason == "length" and len(token_ids) != request.max_new_tokens:
        raise ContractError(
            f"the engine's finish_reason is 'length' after {len(token_ids)} tokens; "
            f"the request is for {request.max_new_tokens}"
        )
    if not token_ids and reason != "abort":
        raise ContractError(f"the engine's output_ids is empty with finish_reason {reason!r}")
    scored = _field(meta, "output_token_logprobs", list) if token_ids else []
    cut, spans = request.sampling.is_cut and token_ids, _field(meta, "weight_versions", list) if token_ids else []
    whole = Answer(
        names=("output_ids", "output_token_logprobs", "output_token_sampling_mask"),
        reason=reason,
        token_ids=token_ids,
        scored=[entry[1] if isinstance(entry, list) and len(entry) > 1 else None for entry in scored],
        logprobs=_cut_logprobs(meta, len(token_ids)) if cut else [entry[0] for entry in scored if entry],
        experts=_experts(meta, info, routing) if routing is not None and token_ids else None,
        in_order=False,
        versions=[(_field(span, "version", str), span.get("start"), span.get("end")) for span in spans],
        kept=_field(meta, "output_token_sampling_mask", list) if cut else None,
    )
    return checked_segments(whole, request=request, info=info, routing=routing, **context)


def score_body(request: ScoreRequest) -> dict[str, Any]:
    """Body of /generate for the logprobs of a prompt, without a sampled token."""
    return {
        "input_ids": request.token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": request.first - 1,  # the first entry has no logprob
        "top_logprobs_num": request.top_k,
    }


def to_scores(answer: Any, *, request: ScoreRequest, info: ModelInfo) -> TeacherScores:
    """Check the input logprobs of an answer of /generate. SGLang names the last id of the vocabulary 0 in them.

    Raises:
        ContractError: the request was aborted, or the answer does not fit it.
    """
    meta: Any = _field(answer, "meta_info", dict)
    entries = _field(meta, "input_token_logprobs", list)[1:]
    logprobs, ids = _columns(entries, "input_token_logprobs")
    if len(ids) == len(wanted := request.token_ids[request.first :]):
        ids = np.where((ids == 0) & (wanted == info.vocab_size - 1), wanted, ids)
    top = None
    if request.top_k:
        rows = _field(meta, "input_top_logprobs", list)[1:]
        columns = _columns([entry for row in rows for entry in row or ()], "input_top_logprobs")
        if len(columns[0]) == len(rows) * request.top_k:  # else checked_scores refuses it
            columns = tuple(column.reshape(-1, request.top_k) for column in columns)
        top = columns[1], columns[0]
    return checked_scores(ids, logprobs, top=top, request=request)


def _columns(entries: list[Any], field: str) -> tuple[NDArray[Any], ...]:
    """Logprobs [n] and ids [n] of n entries (logprob, id, text)."""
    return tuple(numbers([entry[i] for entry in entries], dtype, field) for i, dtype in enumerate((float, np.int32)))


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


def _cut_logprobs(meta: dict[str, Any], sampled: int) -> Float32Array:
    """The logprobs float32 [n] of the tokens in the cut distribution."""
    cut = numbers(_field(meta, "output_token_sampling_logprobs", list), np.float32, "output_token_sampling_logprobs")
    if len(cut) != sampled:
        raise ContractError(
            f"the engine's output_token_sampling_logprobs has {len(cut)} entries for {sampled} sampled tokens"
        )
    return np.minimum(cut, np.float32(0))  # rounding may lift a single token's logprob above 0


def _experts(meta: dict[str, Any], info: ModelInfo, routing: RoutingSpec) -> NDArray[Any]:
    """Expert ids [rows, layers, top_k]; [n] if there are not as many for each row."""
    try:
        flat = np.frombuffer(base64.b64decode(_field(meta, "routed_experts", str), validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ContractError(f"the engine's routed_experts is not base64 of int32: {error}") from error
    if flat.size % (info.num_layers * routing.top_k):
        return flat
    layers = flat.reshape(-1, info.num_layers, routing.top_k)
    dense = sorted(set(range(info.num_layers)) - set(routing.layers))
    if layers[:, dense].any():
        raise ContractError(
            f"the engine's routed_experts names experts in the dense layers {dense}, where rows are zero; "
            f"its layout is not {list(layers.shape)} (rows, layers, top_k)"
        )
    return layers
