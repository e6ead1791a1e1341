"""Tokens in, tokens and logprobs out: the part of vLLM's `/inference/v1/generate` that fits a run.

The request has `token_ids` and `sampling_params`. Of the latter `max_tokens`, `stop_token_ids` and `logprobs` apply;
temperature, top_p, top_k, min_p, seed and penalties are those of the run, and those of the request are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agent_loop.programs.conversation import ChatAnswer, EndpointError, TokenRequest
from agent_loop.programs.endpoint import chat_completions
from agent_loop.programs.endpoint.body import LIST, OBJECT, Call, Fields, WireFormat

RUN = "tokens are sampled as the run is configured"
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
    "min_tokens": RUN,
    "ignore_eos": RUN,
    "logit_bias": RUN,
    "allowed_token_ids": RUN,
    "bad_words": RUN,
    "structured_outputs": RUN,
    "trace_decode_token_ids": RUN,
}
INT32 = 2**31  # token ids are int32 inside


def read(call: Call) -> TokenRequest:
    """Body -> request. RequestError: the body is wrong or asks for something else than one answer in tokens."""
    body = Fields(call.body)
    body.refuse(REFUSED)
    if body.optional("output_mode", str) not in (None, "tokens"):
        raise body.wrong("output_mode", 'only "tokens" is supported')
    body.optional("request_id", str)
    chat_completions.wants_usage(call)
    body.required("sampling_params", OBJECT)
    sampling = body.inner("sampling_params")
    sampling.refuse(REFUSED_SAMPLING)
    if sampling.optional("n", int) not in (None, 1):
        raise sampling.wrong("n", "send one request for each answer")
    if sampling.optional("logprobs", int) not in (None, 0, 1):
        raise sampling.wrong("logprobs", "give 1: only sampled tokens have logprobs")
    prompt = _ids(body, "token_ids")
    if not prompt:
        raise body.wrong("token_ids", "give at least one token")
    return TokenRequest(
        token_ids=prompt,
        agent=body.optional("model", str) or "",
        max_tokens=sampling.positive("max_tokens"),
        stop_token_ids=_ids(sampling, "stop_token_ids"),
    )


def _ids(fields: Fields, name: str) -> tuple[int, ...]:
    found = fields.optional(name, LIST) or []
    if not all(type(each) is int and 0 <= each < INT32 for each in found):
        raise fields.wrong(name, "give token ids, which are whole numbers of at least 0")
    return tuple(found)


def write(answer: ChatAnswer, call: Call) -> dict[str, Any]:
    """Answer -> response."""
    body, usage = call.body, chat_completions.usage(answer)
    prompt = {"prompt_token_ids": body["token_ids"]} if body.get("return_token_ids") else {}
    more = {"model": body.get("model"), "created": call.created, "usage": usage}
    return {**_head(call), **more, "choices": [_choice(answer, call)], **prompt}


def events(answer: ChatAnswer, call: Call) -> Iterator[dict[str, Any]]:
    """Answer -> one chunk with all tokens, and one with usage if it was asked for."""
    whole = write(answer, call)
    usage = whole.pop("usage")
    yield {name: value for name, value in whole.items() if name not in ("model", "created")}
    if chat_completions.wants_usage(call):
        yield {**_head(call), "choices": [], "usage": usage}


def error(error: EndpointError) -> dict[str, Any]:
    """Error -> response; its `code` is the status, as in vLLM."""
    shape = chat_completions.error(error)["error"]
    return {"error": {**shape, "code": error.status.value}}


def _head(call: Call) -> dict[str, Any]:
    return {"request_id": call.body.get("request_id") or call.id, "output_mode": "tokens"}


def _choice(answer: ChatAnswer, call: Call) -> dict[str, Any]:
    sampling, logprobs, last = call.body["sampling_params"], None, answer.token_ids[-1]
    if sampling.get("logprobs") is not None:
        sampled = zip(answer.token_ids, answer.logprobs, strict=True)
        # vLLM's field is `token_id`; clients of its earlier releases, such as `renderers`, read `token`.
        each = [{"token_id": i, "token": f"token_id:{i}", "logprob": p, "rank": None} for i, p in sampled]
        logprobs = {"content": [{**token, "top_logprobs": [token]} for token in each]}
    return {
        "index": 0,
        "finish_reason": answer.finish,
        "stop_reason": last if last in (sampling.get("stop_token_ids") or ()) else None,
        "token_ids": list(answer.token_ids),
        "logprobs": logprobs,
    }


FORMAT = WireFormat(read=read, write=write, events=events, error=error, end=chat_completions.DONE)
