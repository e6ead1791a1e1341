"""Tokens in, tokens and logprobs out: the part of vLLM's `/inference/v1/generate` that fits a run.

The request has `token_ids` and `sampling_params`. Of the latter `max_tokens`, `stop_token_ids` and `logprobs` apply;
temperature, top_p, top_k, min_p, seed and penalties are those of the run, and those of the request are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agent_loop.programs.conversation import TokenAnswer, TokenRequest
from agent_loop.programs.endpoint import chat_completions
from agent_loop.programs.endpoint.body import LIST, OBJECT, Body, optional, positive, refuse, required, wrong
from agent_loop.programs.endpoint.errors import EndpointError
from agent_loop.programs.endpoint.wire import Call, WireFormat, sse

REFUSED = {
    "features": "only text is supported",
    "content_parts": "only text is supported",
    "kv_transfer_params": "leave it out",
    "ec_transfer_params": "leave it out",
    "reasoning_parser_kwargs": "leave it out: tokens are not parsed",
}
REFUSED_SAMPLING = {
    "stop": "give stop_token_ids: the answer is not decoded",
    "prompt_logprobs": "only sampled tokens have logprobs",
    "prompt_logprob_token_ids": "only sampled tokens have logprobs",
    "logprob_token_ids": "only sampled tokens have logprobs",
    "min_tokens": "tokens are sampled as the run is configured",
    "ignore_eos": "tokens are sampled as the run is configured",
    "logit_bias": "tokens are sampled as the run is configured",
    "allowed_token_ids": "tokens are sampled as the run is configured",
    "bad_words": "tokens are sampled as the run is configured",
    "structured_outputs": "tokens are sampled as the run is configured",
    "trace_decode_token_ids": "tokens are sampled as the run is configured",
}
INT32 = 2**31  # token ids are int32 inside


def read(call: Call) -> TokenRequest:
    """Body -> request.

    Raises:
        RequestError: the body is wrong or asks for something else than one answer in tokens.
    """
    body = call.body
    refuse(body, REFUSED)
    if optional(body, "output_mode", str) not in (None, "tokens"):
        raise wrong("output_mode", body["output_mode"], 'only "tokens" is supported')
    optional(body, "request_id", str)
    chat_completions.wants_usage(body)
    sampling = required(body, "sampling_params", OBJECT)
    refuse(sampling, REFUSED_SAMPLING, at="sampling_params.")
    if optional(sampling, "n", int, at="sampling_params.") not in (None, 1):
        raise wrong("sampling_params.n", sampling["n"], "send one request for each answer")
    if optional(sampling, "logprobs", int, at="sampling_params.") not in (None, 0, 1):
        raise wrong("sampling_params.logprobs", sampling["logprobs"], "give 1: only sampled tokens have logprobs")
    prompt = _ids(body, "token_ids")
    if not prompt:
        raise wrong("token_ids", body.get("token_ids"), "give at least one token")
    return TokenRequest(
        token_ids=prompt,
        agent=optional(body, "model", str) or "",
        max_tokens=positive(sampling, "max_tokens", at="sampling_params."),
        stop_token_ids=_ids(sampling, "stop_token_ids", at="sampling_params."),
        is_retry=call.is_retry,
        idempotency_key=call.idempotency_key,
    )


def _ids(body: Body, name: str, *, at: str = "") -> tuple[int, ...]:
    found = optional(body, name, LIST, at=at) or []
    if not all(type(each) is int and 0 <= each < INT32 for each in found):
        raise wrong(at + name, found, "give token ids, which are whole numbers of at least 0")
    return tuple(found)


def write(answer: TokenAnswer, call: Call) -> dict[str, Any]:
    """Answer -> response."""
    head = {
        "request_id": _request_id(call),
        "output_mode": "tokens",
        "model": call.body.get("model"),
        "created": call.created,
        "usage": _usage(answer, call),
    }
    return {**head, "choices": [_choice(answer, call)], **_prompt(call)}


def events(answer: TokenAnswer, call: Call) -> Iterator[str]:
    """Answer -> one chunk with all tokens, and one with usage if it was asked for."""
    head = {"request_id": _request_id(call), "output_mode": "tokens"}
    yield sse({**head, "choices": [_choice(answer, call)], **_prompt(call)})
    if chat_completions.wants_usage(call.body):
        yield sse({**head, "choices": [], "usage": _usage(answer, call)})
    yield chat_completions.DONE


def error(error: EndpointError) -> dict[str, Any]:
    """Error -> response; its `code` is the status, as in vLLM."""
    shape = chat_completions.error(error)["error"]
    return {"error": {**shape, "code": error.status.value}}


def error_event(found: EndpointError) -> str:
    """Error -> last event of a stream."""
    return sse(error(found))


def _request_id(call: Call) -> str:
    return optional(call.body, "request_id", str) or call.id


def _prompt(call: Call) -> dict[str, Any]:
    return {"prompt_token_ids": call.body["token_ids"]} if call.body.get("return_token_ids") else {}


def _choice(answer: TokenAnswer, call: Call) -> dict[str, Any]:
    logprobs = None
    if call.body["sampling_params"].get("logprobs") is not None:
        sampled = zip(answer.token_ids, answer.logprobs, strict=True)
        # vLLM's field is `token_id`; clients of its earlier releases, such as `renderers`, read `token`.
        each = [{"token_id": i, "token": f"token_id:{i}", "logprob": p, "rank": None} for i, p in sampled]
        logprobs = {"content": [{**token, "top_logprobs": [token]} for token in each]}
    return {
        "index": 0,
        "finish_reason": answer.finish,
        "stop_reason": answer.stop_token_id,
        "token_ids": list(answer.token_ids),
        "logprobs": logprobs,
    }


def _usage(answer: TokenAnswer, call: Call) -> dict[str, Any]:
    prompt, completion = len(call.body["token_ids"]), len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


FORMAT = WireFormat(read=read, write=write, events=events, error=error, error_event=error_event)
