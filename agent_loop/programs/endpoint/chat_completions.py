"""OpenAI's `/v1/chat/completions`.

Sampling settings (temperature, top_p, seed, penalties) are those of the run; those of the request are ignored, like
`strict` of a tool and `parallel_tool_calls`: nothing constrains the model's tokens. Requests whose answer would not be
what was asked for are refused. Reasoning is in `reasoning_content`, in answers and in histories.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_loop.loop import Message, ToolUse
from agent_loop.programs.conversation import ChatAnswer, ChatRequest
from agent_loop.programs.endpoint.body import (
    LIST,
    OBJECT,
    Body,
    function_tool,
    objects,
    optional,
    positive,
    refuse,
    required,
    text_of,
    texts,
    wrong,
)
from agent_loop.programs.endpoint.errors import EndpointError, RequestError
from agent_loop.programs.endpoint.wire import Call, WireFormat, sse

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
    """Body -> request.

    Raises:
        RequestError: the body is wrong or asks for something else than one text answer.
    """
    body = call.body
    refuse(body, REFUSED)
    if optional(body, "n", int) not in (None, 1):
        raise wrong("n", body["n"], "send one request for each answer")
    if any(kind != "text" for kind in optional(body, "modalities", LIST) or []):
        raise wrong("modalities", body["modalities"], 'only ["text"] is supported')
    refuse_structured(optional(body, "response_format", OBJECT) or {}, at="response_format")
    wants_usage(body)
    found = objects(body, "messages")
    if not found:
        raise RequestError("messages is missing or empty; give at least one message", field="messages")
    return ChatRequest(
        messages=tuple(_read_message(message, at=path) for path, message in found),
        tools=tuple(_read_tool(tool, at=path) for path, tool in objects(body, "tools")) if allows_tools(body) else (),
        agent=required(body, "model", str),
        max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
        stop=texts(body, "stop"),
        wants_logprobs=bool(optional(body, "logprobs", bool)),
        is_retry=call.is_retry,
        idempotency_key=call.idempotency_key,
    )


def refuse_structured(format: Body, *, at: str) -> None:
    """Refuse a format of the answer other than text."""
    if format.get("type", "text") != "text":
        raise wrong(f"{at}.type", format["type"], "only text is supported; describe the format in the prompt")


def wants_usage(body: Body) -> bool:
    """Whether a stream ends with counts of tokens."""
    options = optional(body, "stream_options", OBJECT) or {}
    return bool(optional(options, "include_usage", bool, at="stream_options."))


def allows_tools(body: Body) -> bool:
    """Whether the model may call tools. With `tool_choice` "none" it is not shown any.

    A choice that demands a call is taken as "auto": the policy decides, and agents handle an answer without a call.
    """
    return body.get("tool_choice") != "none"


def _read_message(message: Body, *, at: str) -> Message:
    role = required(message, "role", str, at=f"{at}.")
    name = optional(message, "name", str, at=f"{at}.")
    refuse(message, {"function_call": "use tool_calls", "audio": "only text is supported"}, at=f"{at}.")
    if role == "assistant":
        calls = objects(message, "tool_calls", at=f"{at}.")
        return Message(
            role="assistant",
            content=_read_content(message, at=at, separator="", absent=""),
            reasoning=_read_reasoning(message, at=at),
            tool_calls=tuple(_read_call(call, at=path) for path, call in calls),
            name=name,
        )
    content = _read_content(message, at=at, separator="\n")
    match role:
        case "system" | "developer":
            return Message(role="system", content=content, name=name)
        case "user":
            return Message(role="user", content=content, name=name)
        case "tool":
            called = required(message, "tool_call_id", str, at=f"{at}.")
            return Message(role="tool", content=content, tool_call_id=called, name=name)
        case _:
            raise wrong(f"{at}.role", role, "the roles are system, developer, user, assistant and tool")


def _read_content(message: Body, *, at: str, separator: str, absent: str | None = None) -> str:
    """Text of a message. Parts are separated by lines, but those of an assistant, which are one sampled text."""
    content = message.get("content", absent)
    if content is None and absent is not None:
        return absent
    return text_of(content, at=f"{at}.content", kinds=("text",), separator=separator)


def _read_reasoning(message: Body, *, at: str) -> str | None:
    """Reasoning under either of its names; "" is none."""
    found = [optional(message, name, str, at=f"{at}.") for name in ("reasoning_content", "reasoning")]
    return found[0] or found[1] or None


def _read_call(call: Body, *, at: str) -> ToolUse:
    if call.get("type", "function") != "function":
        raise wrong(f"{at}.type", call["type"], "only function is supported")
    function = required(call, "function", OBJECT, at=f"{at}.")
    inner = f"{at}.function."
    return ToolUse(
        id=required(call, "id", str, at=f"{at}."),
        name=required(function, "name", str, at=inner),
        arguments=required(function, "arguments", str, at=inner),
    )


def _read_tool(tool: Body, *, at: str) -> Mapping[str, Any]:
    if tool.get("type") != "function":
        raise wrong(f"{at}.type", tool.get("type"), "only function is supported")
    function = required(tool, "function", OBJECT, at=f"{at}.")
    return function_tool(function, schema="parameters", at=f"{at}.function.")


def write(answer: ChatAnswer, call: Call) -> dict[str, Any]:
    """Answer -> response."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(answer), "refusal": None}
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.message.tool_calls:
        message["tool_calls"] = [_write_call(use) for use in answer.message.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": _logprobs(answer, call), "finish_reason": answer.finish}
    return {**_head(call, "chat.completion"), "choices": [choice], "usage": usage(answer)}


def events(answer: ChatAnswer, call: Call) -> Iterator[str]:
    """Answer -> chunks: role and logprobs, reasoning, text, each tool call, the end, and usage if it was asked for."""
    message = answer.message
    with_usage = wants_usage(call.body)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.reasoning:
        deltas.append({"reasoning_content": message.reasoning})
    if message.content:
        deltas.append({"content": message.content})
    deltas += [{"tool_calls": [{"index": n, **_write_call(use)}]} for n, use in enumerate(message.tool_calls)]
    deltas.append({})
    head = _head(call, "chat.completion.chunk") | ({"usage": None} if with_usage else {})
    for number, delta in enumerate(deltas):
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(answer, call) if number == 0 else None,
            "finish_reason": None if delta else answer.finish,
        }
        yield sse({**head, "choices": [choice]})
    if with_usage:
        yield sse({**head, "choices": [], "usage": usage(answer)})
    yield DONE


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


def error_event(found: EndpointError) -> str:
    """Error -> last event of a stream."""
    return sse(error(found))


def _head(call: Call, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{call.id}", "object": kind, "created": call.created, "model": call.body["model"]}


def _content(answer: ChatAnswer) -> str | None:
    """Text of the answer; null instead of an empty text with tool calls."""
    return answer.message.content or (None if answer.message.tool_calls else "")


def _write_call(use: ToolUse) -> dict[str, Any]:
    return {"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.arguments}}


def _logprobs(answer: ChatAnswer, call: Call) -> dict[str, Any] | None:
    """Logprobs of all sampled tokens, those of reasoning and control tokens included.

    A token is named "token_id:N", as by vLLM with `return_tokens_as_token_ids`: its text may be a part of a character.
    """
    if not call.body.get("logprobs"):
        return None
    sampled = zip(answer.token_ids, answer.logprobs, strict=True)
    content: list[Body] = [
        {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []} for i, p in sampled
    ]
    return {"content": content, "refusal": None}


FORMAT = WireFormat(read=read, write=write, events=events, error=error, error_event=error_event)
