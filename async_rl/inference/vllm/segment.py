"""Converts a request to vLLM's sampling parameters, and vLLM's final output to checked segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.engine import GenerateRequest
from async_rl.compat import FORCED_EXPERTS
from async_rl.inference.checks import Answer, checked_segments
from async_rl.inference.gate import DraftCounts
from async_rl.inference.scores import ScoreRequest, checked_scores
from async_rl.weights.model_info import ModelInfo
from message_queue.errors import ContractError
from message_queue.tokens import RoutedExperts, RoutingSpec, TokenOutput
from message_queue.training_sequence import TeacherScores

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


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


def to_segments(output: RequestOutput, **context: Any) -> list[TokenOutput]:
    """Check a finished output and convert it to segments; for the other arguments see `checked_segments`."""
    if len(output.outputs) != 1:
        raise ContractError(f"the engine returned {len(output.outputs)} completions for a request of one")
    completion: Any = output.outputs[0]
    scored, mask = completion.logprobs, completion.sampling_mask
    answer = Answer(
        names=("token_ids", "logprobs", "sampling_mask"),
        reason=completion.finish_reason,
        token_ids=completion.token_ids,
        scored=None if scored is None else scored.token_ids,
        logprobs=None if scored is None else scored.logprobs,
        experts=completion.routed_experts,
        in_order=True,
        versions=[(span.version, span.start, span.end) for span in completion.weight_versions or ()],
        kept=None if mask is None else mask.token_ids,
    )
    return checked_segments(answer, **context)


def draft_counts(output: RequestOutput) -> DraftCounts:
    """Draft tokens of a finished output; none without drafts, and none if it was aborted."""
    found: Any = output.outputs[0].spec_decode_metrics if output.outputs else None
    if found is None:
        return DraftCounts()
    return DraftCounts(found.num_draft_tokens, sum(number * steps for number, steps in enumerate(found.histogram)))


def score_params(request: ScoreRequest) -> SamplingParams:
    """vLLM's parameters for the logprobs of a prompt; they are over the whole vocabulary at temperature 1."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=request.top_k,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def to_scores(output: RequestOutput, *, request: ScoreRequest) -> TeacherScores:
    """Check the prompt logprobs of a finished output; of each position the token itself, then the most likely ones.

    Raises:
        ContractError: the request was aborted, or the answer does not fit it.
    """
    found: Any = output.prompt_logprobs
    tokens, width = len(request.token_ids), request.top_k + 1
    if found is None or len(found) != tokens or len(found.token_ids) != (tokens - 1) * width:
        raise ContractError(f"the engine's prompt_logprobs are not of {tokens} tokens with {width} entries each")
    ids, logprobs = (
        np.asarray(column).reshape(-1, width)[request.first - 1 :] for column in (found.token_ids, found.logprobs)
    )
    top = (ids[:, 1:], logprobs[:, 1:]) if request.top_k else None
    return checked_scores(ids[:, 0], logprobs[:, 0], top=top, request=request)


def _top_k(request: GenerateRequest, info: ModelInfo) -> int:
    """vLLM returns kept tokens only for requests with a top_k; a top_k of the whole vocabulary cuts nothing."""
    return info.vocab_size if request.sampling.is_cut and request.sampling.top_k < 0 else request.sampling.top_k
