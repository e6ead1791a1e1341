"""From a request to vLLM's sampling parameters, and from vLLM's final output to a checked segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from agent_loop.engine import GenerateRequest
from async_rl.model_info import ModelInfo
from message_queue.tokens import (
    ContractError,
    ExpertArray,
    RoutedExperts,
    RoutingSpec,
    StopReason,
    TokenOutput,
    WeightVersion,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

STOP_REASONS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
    "error": StopReason.ERROR,
}


def sampling_params(request: GenerateRequest, *, info: ModelInfo, capture_routing: bool) -> SamplingParams:
    """vLLM's parameters for one decode.

    Raises:
        ContractError: a request that no engine can serve; names the field and the value.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokens = len(request.token_ids)
    if not tokens:
        raise ContractError("GenerateRequest.token_ids is empty; a decode starts from at least one token")
    if request.max_new_tokens < 1:
        raise ContractError(f"GenerateRequest.max_new_tokens is {request.max_new_tokens}; must be >= 1")
    if not 0 <= request.rows_held < tokens:
        raise ContractError(
            f"GenerateRequest.rows_held is {request.rows_held} for {tokens} tokens; the last token was never "
            f"forwarded, so at most {tokens - 1} rows exist"
        )
    if not 0 <= int(request.token_ids.min()) <= int(request.token_ids.max()) < info.vocab_size:
        raise ContractError(
            f"GenerateRequest.token_ids spans {int(request.token_ids.min())}..{int(request.token_ids.max())}; "
            f"the vocabulary has {info.vocab_size}"
        )
    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # only the request says what stops it
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=request.rows_held if capture_routing else 0,
        skip_clone=True,
    )


def to_segment(
    output: RequestOutput,
    *,
    request: GenerateRequest,
    info: ModelInfo,
    routing: RoutingSpec | None,
    weights: WeightVersion,
    replica: str,
) -> TokenOutput:
    """Check and translate a finished output.

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
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    segment = TokenOutput(
        token_ids=token_ids,
        logprobs=_logprobs(completion, token_ids),
        routed_experts=None if routing is None or not len(token_ids) else _rows(completion, request, info, routing),
        weights=weights,
        stop_reason=STOP_REASONS[completion.finish_reason],
        replica=replica,
    )
    segment.check(vocab_size=info.vocab_size, routing=routing)
    return segment


def _logprobs(completion: CompletionOutput, token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 [n], of the sampled tokens."""
    flat: Any = completion.logprobs
    if not len(token_ids):
        return np.zeros(0, np.float32)
    if flat is None or list(flat.token_ids) != token_ids.tolist():
        raise ContractError(
            f"the engine's logprobs are not of its {len(token_ids)} sampled tokens: "
            f"{None if flat is None else len(flat.token_ids)} entries"
        )
    return np.asarray(flat.logprobs, dtype=np.float32)


def _rows(
    completion: CompletionOutput, request: GenerateRequest, info: ModelInfo, routing: RoutingSpec
) -> RoutedExperts:
    """Rows rows_held .. tokens + n - 2 of the MoE layers; the engine also counts dense layers, as zeros."""
    experts: Any = completion.routed_experts
    expected = (
        len(request.token_ids) + len(completion.token_ids) - 1 - request.rows_held,
        info.num_layers,
        routing.top_k,
    )
    if experts is None or experts.shape != expected:
        raise ContractError(
            f"the engine's routed_experts has shape {None if experts is None else list(experts.shape)}; "
            f"need {list(expected)} (rows from position {request.rows_held}, layers, top_k)"
        )
    return RoutedExperts(
        first_position=request.rows_held,
        experts=cast(ExpertArray, experts[:, list(routing.layers)].astype(routing.dtype)),
    )
