"""OpenAI's `/v1/chat/completions`.

Sampling settings (temperature, top_p, seed, penalties) are those of the run; those of the request are ignored, like
`strict` of a tool and `parallel_tool_calls`: nothing constrains the model's tokens. Requests whose answer would not be
what was asked for are refused. Reasoning is in `reasoning_content`, in answers and in histories.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from agent_loop.loop import Message, ToolUse, openai_call
from agent_loop.programs.conversation import (
    ChatAnswer,
    ChatRequest,
    EndpointError,
    RequestError,
    arguments_text,
)
from agent_loop.programs.endpoint.body import LIST, OBJECT, Body, Call, Fields, WireFormat

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of the field
NO_TEXT = ("audio", "image", "images", "video", "videos")  # fields of a message
DONE = "data: [DONE]\n\n"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
REFUSED = {
    "functions": "name the tools in `tools`",
    "function_call": "use `tools` and `tool_choice`",
    "logit_bias": "leave it out: tokens are sampled as the run is configured",
    "top_logprobs": "leave it out: only the logprobs of sampled tokens are known",
    "audio": "leave it out: answers are text",
    "prediction": "leave it out",
    "web_search_options": "leave it out: give the agent a tool that searches",
    "store": "leave it out: answers are not stored",
    "moderation": "leave it out",
}


def read(call: Call) -> ChatRequest:
    """Body -> request. RequestError: the body is wrong or asks for something else than one text answer."""
    body = Fields(call.body)
    body.refuse(REFUSED)
    if body.optional("n", int) not in (None, 1):
        raise body.wrong("n", "send one request for each answer")
    if any(kind != "text" for kind in body.optional("modalities", LIST) or []):
        raise body.wrong("modalities", 'only ["text"] is supported')
    body.refuse_structured("response_format")
    wants_usage(call)
    body.optional("logprobs", bool)
    messages = body.objects("messages")
    if not messages:
        raise RequestError("messages is missing or empty; give at least one message", field="messages")
    return ChatRequest(
        messages=tuple(map(read_message, messages)),
        tools=tuple(map(_read_tool, body.objects("tools"))) if allows_tools(call.body) else (),
        agent=body.required("model", str),
        max_tokens=body.positive("max_completion_tokens") or body.positive("max_tokens"),
        stop=body.texts("stop"),
    )


def wants_usage(call: Call) -> bool:
    """Whether a stream ends with counts of tokens."""
    return bool(Fields(call.body).inner("stream_options").optional("include_usage", bool))


def allows_tools(body: Body) -> bool:
    """Whether the model may call tools. With `tool_choice` "none" it is not shown any.

    A choice that demands a call is taken as "auto": the policy decides, and agents handle an answer without a call.
    """
    return body.get("tool_choice") != "none"


def read_message(message: Fields, *, strict: bool = True) -> Message:
    """A message in OpenAI's format. As `datasets` writes it, absent fields are null.

    Args:
        strict: whether it is as the API has it. Otherwise there are other roles, and calls may be without id and
            `function`, with an object as arguments.
    """
    role = message.required("role", str)
    if strict and role not in ROLES:
        raise message.wrong("role", f"the roles are {', '.join(ROLES)}")
    message.refuse({"function_call": "use tool_calls", **dict.fromkeys(NO_TEXT, "only text is supported")})
    calls = tuple(_read_call(call, number=n, strict=strict) for n, call in enumerate(message.objects("tool_calls")))
    reasoning = next((found for name in REASONING if (found := message.optional(name, str))), None)
    is_empty = message.body.get("content") is None and (calls or reasoning or (strict and role == "assistant"))
    of_call = message.required if strict and role == "tool" else message.optional
    return Message(
        role="system" if role == "developer" else role,
        content="" if is_empty else message.content("content", separator="" if role == "assistant" else "\n"),
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=of_call("tool_call_id", str),
        name=message.optional("name", str),
    )


def _read_call(call: Fields, *, number: int, strict: bool) -> ToolUse:
    if strict and call.body.get("type", "function") != "function":
        raise call.wrong("type", "only function is supported")
    if strict:
        call.required("function", OBJECT)
    function = call.inner("function") if call.body.get("function") else call
    arguments: Any = function.required("arguments", str) if strict else function.body.get("arguments")
    if not isinstance(arguments, str | dict):
        raise function.wrong("arguments", "give an object, or its JSON text")
    return ToolUse(
        id=call.required("id", str) if strict else call.optional("id", str) or f"call_{number}",
        name=function.required("name", str),
        arguments=arguments if isinstance(arguments, str) else arguments_text(cast(Body, arguments)),
    )


def _read_tool(tool: Fields) -> Body:
    if tool.body.get("type") != "function":
        raise tool.wrong("type", "only function is supported")
    tool.required("function", OBJECT)
    return tool.inner("function").function_tool()


def write(answer: ChatAnswer, call: Call) -> dict[str, Any]:
    """Answer -> response."""
    said = answer.message
    content = said.content or (None if said.tool_calls else "")  # null instead of an empty text with tool calls
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [openai_call(use) for use in said.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": _logprobs(answer, call), "finish_reason": answer.finish}
    return {**_head(call, "chat.completion"), "choices": [choice], "usage": usage(answer)}


def events(answer: ChatAnswer, call: Call) -> Iterator[dict[str, Any]]:
    """Answer -> chunks: role and logprobs, reasoning, text, each tool call, the end, and usage if it was asked for."""
    message = answer.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.reasoning:
        deltas.append({"reasoning_content": message.reasoning})
    if message.content:
        deltas.append({"content": message.content})
    deltas += [{"tool_calls": [{"index": n, **openai_call(use)}]} for n, use in enumerate(message.tool_calls)]
    head = _head(call, "chat.completion.chunk") | ({"usage": None} if wants_usage(call) else {})
    logprobs = _logprobs(answer, call)
    for delta in (*deltas, {}):
        end = None if delta else answer.finish
        yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": end}]}
        logprobs = None
    if wants_usage(call):
        yield {**head, "choices": [], "usage": usage(answer)}


def usage(answer: ChatAnswer) -> dict[str, Any]:
    """Counts of tokens."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def error(error: EndpointError) -> dict[str, Any]:
    """Error -> response."""
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": f"{error}", "type": kind, "param": error.field, "code": error.code}}


def _head(call: Call, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": call.created, "model": call.body["model"]}


def _logprobs(answer: ChatAnswer, call: Call) -> dict[str, Any] | None:
    """Logprobs of all sampled tokens, those of reasoning and control tokens included.

    A token is named "token_id:N", as by vLLM with `return_tokens_as_token_ids`: its text may be a part of a character.
    """
    if not call.body.get("logprobs"):
        return None
    sampled = zip(answer.token_ids, answer.logprobs, strict=True)
    token: Body = {"bytes": None, "top_logprobs": []}
    return {"content": [{"token": f"token_id:{i}", "logprob": p, **token} for i, p in sampled], "refusal": None}


FORMAT = WireFormat(read=read, write=write, events=events, error=error, end=DONE)
