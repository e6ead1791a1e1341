"""Converts a request to vLLM's sampling parameters, and vLLM's final output to checked segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from async_rl.compat import FORCED_EXPERTS
from async_rl.inference.checks import check_segments, kept_tokens, moe_rows, numbers, rows_shape, sampled_tokens
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

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

STOP_REASONS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
    "error": StopReason.ERROR,
}


def sampling_params(
    request: GenerateRequest, *, info: ModelInfo, capture_routing: bool, forced: Sequence[RoutedExperts] = ()
) -> SamplingParams:
    """vLLM's parameters for one decode of a checked request.

    Args:
        capture_routing: whether the engine returns routing rows.
        forced: rows that the engine must use if it forwards their positions.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=_top_k(request, info),
        min_p=request.sampling.min_p,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # only the request's stop tokens end it
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=request.existing_rows if capture_routing else 0,
        extra_args=forced_args(forced, info.routing),
        skip_clone=True,
    )


def forced_args(forced: Sequence[RoutedExperts], routing: RoutingSpec | None) -> dict[str, Any] | None:
    """vLLM's `extra_args` with the forced rows in blocks of consecutive positions; they reach every worker."""
    if not forced or routing is None:
        return None
    return {FORCED_EXPERTS: [encode_rows(rows.experts, start=rows.first_position, routing=routing) for rows in forced]}


def encode_rows(experts: NDArray[Any], *, start: int, routing: RoutingSpec) -> dict[str, Any]:
    """Encode rows [n, moe_layers, top_k] of the positions from `start` on, for a call to the engine."""
    rows = np.ascontiguousarray(experts, dtype=routing.dtype)
    return {"start": start, "shape": list(rows.shape), "dtype": rows.dtype.name, "rows": rows.tobytes()}


def recorded_rows(engine: AsyncLLM, routing: RoutingSpec) -> dict[str, dict[str, Any]]:
    """`encode_rows` of all rows that the engine returned for requests in flight, by the request's id in the engine."""
    rows: dict[str, dict[str, Any]] = {}
    states: Any = engine.output_processor.request_states
    for request_id, state in states.items():
        if state.routed_experts_chunks:
            experts = np.concatenate(state.routed_experts_chunks)[:, list(routing.layers)]
            forwarded = state.prompt_len + state.detokenizer.num_output_tokens() - 1
            rows[request_id] = encode_rows(experts, start=forwarded - len(experts), routing=routing)
    return rows


def cache_salt(request: GenerateRequest, *, forced: Sequence[RoutedExperts]) -> str:
    """Prefix-cache salt. K/V under forced experts is cached only for its session, as this forces the same experts."""
    return f"{request.cache_salt}|forced|{request.session or request.request_id}" if forced else request.cache_salt


def to_segments(
    output: RequestOutput,
    *,
    request: GenerateRequest,
    info: ModelInfo,
    routing: RoutingSpec | None,
    weights: WeightVersion,
    loaded: Mapping[str, WeightVersion],
    replica: str,
) -> list[TokenOutput]:
    """Check a finished output and convert it to segments, one per weight version that sampled.

    Args:
        routing: shape of the captured rows; None if no rows are captured.
        weights: the loaded version, for an output without tokens.
        loaded: all versions that may have sampled tokens of this output, by `weight_label`.
        replica: name of the replica.

    Raises:
        ContractError: the engine's answer does not fit the request or the model; names the field and the value.
    """
    if len(output.outputs) != 1:
        raise ContractError(f"the engine returned {len(output.outputs)} completions for a request of one")
    completion = output.outputs[0]
    if completion.finish_reason not in STOP_REASONS:
        raise ContractError(
            f"the engine's finish_reason is {completion.finish_reason!r}; known are {', '.join(STOP_REASONS)}"
        )
    token_ids = sampled_tokens(completion.token_ids, "token_ids", request=request, info=info)
    segments = cut_into_segments(
        request,
        token_ids=token_ids,
        logprobs=_logprobs(completion, token_ids),
        routed_experts=None if routing is None or not len(token_ids) else _rows(completion, request, info, routing),
        spans=_spans(completion, loaded) if len(token_ids) else [(weights, 0)],
        stop_reason=STOP_REASONS[completion.finish_reason],
        replica=replica,
        support=_support(completion, token_ids) if request.sampling.is_cut else None,
    )
    return check_segments(segments, request=request, info=info, routing=routing)


def _top_k(request: GenerateRequest, info: ModelInfo) -> int:
    """vLLM returns kept tokens only for requests with a top_k; a top_k of the whole vocabulary cuts nothing."""
    return info.vocab_size if request.sampling.is_cut and request.sampling.top_k < 0 else request.sampling.top_k


def _support(completion: CompletionOutput, token_ids: Int32Array) -> SamplingSupport:
    """The kept tokens of n positions."""
    if not len(token_ids):
        return SamplingSupport.whole(0)
    if completion.sampling_mask is None:
        raise ContractError(f"the engine's sampling_mask is None for {len(token_ids)} tokens of a cut distribution")
    return kept_tokens(completion.sampling_mask.token_ids, "sampling_mask")


def _logprobs(completion: CompletionOutput, token_ids: Int32Array) -> Float32Array:
    """The logprobs float32 [n] of the sampled tokens."""
    flat: Any = completion.logprobs
    if not len(token_ids):
        return np.zeros(0, np.float32)
    if flat is None or list(flat.token_ids) != token_ids.tolist():
        raise ContractError(
            f"the engine's logprobs are not of its {len(token_ids)} sampled tokens: "
            f"{None if flat is None else len(flat.token_ids)} entries"
        )
    return numbers(flat.logprobs, np.float32, "logprobs")


def _rows(
    completion: CompletionOutput, request: GenerateRequest, info: ModelInfo, routing: RoutingSpec
) -> RoutedExperts:
    """Rows existing_rows .. tokens + n - 2 of the MoE layers; the engine also returns dense layers, as zeros."""
    experts: Any = completion.routed_experts
    expected = rows_shape(request, len(completion.token_ids), info=info, routing=routing)
    if experts is None or experts.shape != expected:
        raise ContractError(
            f"the engine's routed_experts has shape {None if experts is None else list(experts.shape)}; "
            f"need {list(expected)} (rows from position {request.existing_rows}, layers, top_k)"
        )
    return moe_rows(experts, request=request, routing=routing, in_order=True)


def _spans(completion: CompletionOutput, loaded: Mapping[str, WeightVersion]) -> list[tuple[WeightVersion, int]]:
    """(weights, number of tokens that they sampled) in order."""
    spans: list[tuple[WeightVersion, int]] = []
    at = 0
    for span in completion.weight_versions or ():
        if span.version not in loaded or span.start != at:
            raise ContractError(
                f"the engine's weight_versions are {completion.weight_versions}; need spans without gaps of "
                f"{', '.join(loaded)}"
            )
        spans.append((loaded[span.version], span.end - span.start))
        at = span.end
    return spans
