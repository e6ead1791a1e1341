"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

Sampling settings and `thinking` are those of the run; those of the request are ignored, like `cache_control` and
`disable_parallel_tool_use`. A user message with tool results becomes one tool message for each, and a user message of
its texts. Example:

    user [tool_result of call_1 "4 degrees", text "And tomorrow?"]  ->  tool "4 degrees" (call_1), user "And tomorrow?"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agent_loop.loop import Message, ToolUse
from agent_loop.programs.conversation import ChatAnswer, ChatRequest, arguments_text
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
from agent_loop.programs.endpoint.chat_completions import refuse_structured
from agent_loop.programs.endpoint.errors import ContextFull, EndpointError, RequestError
from agent_loop.programs.endpoint.wire import Call, WireFormat, sse

# https://docs.anthropic.com/en/api/errors
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
REFUSED = {
    "mcp_servers": "give the agent tools of its own",
    "container": "leave it out: no code is executed here",
}
BILLING = "x-anthropic-billing-header"  # Claude Code starts a system text with it, different in each request
SIGNATURE = "unsigned"  # clients may leave out thinking with an empty signature


def read(call: Call) -> ChatRequest:
    """Body -> request.

    Raises:
        RequestError: the body is wrong or asks for something else than one text answer.
    """
    if positive(call.body, "max_tokens") is None:
        raise RequestError("max_tokens is missing; give a whole number of at least 1", field="max_tokens")
    request = read_prompt(call)
    if request.messages[-1].role == "assistant":
        last = f"messages[{len(call.body['messages']) - 1}].role"
        raise wrong(last, "assistant", "no answer can be continued; let the last message be one of the user")
    return request


def read_prompt(call: Call) -> ChatRequest:
    """As `read`, for counting tokens: `max_tokens` may be absent."""
    body = call.body
    refuse(body, REFUSED)
    output = optional(body, "output_config", OBJECT) or {}
    refuse_structured(optional(output, "format", OBJECT) or {}, at="output_config.format")
    found = objects(body, "messages")
    if not found:
        raise RequestError("messages is missing or empty; give at least one message", field="messages")
    messages = [each for path, message in found for each in _read_message(message, at=path)]
    if not messages:
        raise wrong("messages", body["messages"], "give at least one message with content")
    tools = objects(body, "tools") if _allows_tools(body) else ()
    return ChatRequest(
        messages=(*_read_system(body), *messages),
        tools=tuple(_read_tool(tool, at=path) for path, tool in tools),
        agent=required(body, "model", str),
        max_tokens=positive(body, "max_tokens"),
        stop=texts(body, "stop_sequences"),
        is_retry=call.is_retry,
        idempotency_key=call.idempotency_key,
    )


def _allows_tools(body: Body) -> bool:
    return (optional(body, "tool_choice", OBJECT) or {}).get("type") != "none"


def _read_system(body: Body) -> Iterator[Message]:
    system: Any = body.get("system")
    if isinstance(system, list):
        blocks = cast(list[Any], system)
        system = [b for b in blocks if not (isinstance(b, dict) and f"{cast(Body, b).get('text')}".startswith(BILLING))]
    if system:
        yield Message(role="system", content=text_of(system, at="system", kinds=("text",), separator="\n"))


def _read_message(message: Body, *, at: str) -> Iterator[Message]:
    role = required(message, "role", str, at=f"{at}.")
    content = message.get("content")
    blocks: Sequence[tuple[str, Body]] = [(f"{at}.content", {"type": "text", "text": content})]
    if not isinstance(content, str):
        required(message, "content", LIST, at=f"{at}.")
        blocks = objects(message, "content", at=f"{at}.")
    match role:
        case "assistant":
            yield _read_assistant(blocks)
        case "user":
            yield from _read_user(blocks)
        case "system":
            yield Message(role="system", content="\n".join(_read_text(block, at=path) for path, block in blocks))
        case _:
            raise wrong(f"{at}.role", role, "the roles are user, assistant and system")


def _read_assistant(blocks: Sequence[tuple[str, Body]]) -> Message:
    content, reasoning, calls = "", "", list[ToolUse]()
    for path, block in blocks:
        match block.get("type"):
            case "thinking":
                reasoning += required(block, "thinking", str, at=f"{path}.")
            case "tool_use":
                calls.append(
                    ToolUse(
                        id=required(block, "id", str, at=f"{path}."),
                        name=required(block, "name", str, at=f"{path}."),
                        arguments=arguments_text(required(block, "input", OBJECT, at=f"{path}.")),
                    )
                )
            case _:
                content += _read_text(block, at=path)
    return Message(role="assistant", content=content, reasoning=reasoning or None, tool_calls=tuple(calls))


def _read_user(blocks: Sequence[tuple[str, Body]]) -> Iterator[Message]:
    found = list[str]()
    for path, block in blocks:
        if block.get("type") == "tool_result":
            if found:
                yield Message(role="user", content="\n".join(found))
                found = []
            reply = block.get("content") or ""
            yield Message(
                role="tool",
                content=text_of(reply, at=f"{path}.content", kinds=("text",), separator="\n"),
                tool_call_id=required(block, "tool_use_id", str, at=f"{path}."),
            )
        else:
            found.append(_read_text(block, at=path))
    if found:
        yield Message(role="user", content="\n".join(found))


def _read_text(block: Body, *, at: str) -> str:
    if block.get("type") != "text":
        way_out = "send text; thinking and tool_use of the assistant, tool_result of the user"
        raise wrong(f"{at}.type", block.get("type"), way_out)
    return required(block, "text", str, at=f"{at}.")


def _read_tool(tool: Body, *, at: str) -> Mapping[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise wrong(f"{at}.type", tool["type"], "only tools with an input_schema are supported")
    return function_tool(tool, schema="input_schema", at=f"{at}.")


def write(answer: ChatAnswer, call: Call) -> dict[str, Any]:
    """Answer -> response."""
    return _message(answer, call, content=_blocks(answer), **_end(answer))


def events(answer: ChatAnswer, call: Call) -> Iterator[str]:
    """Answer -> events: start, each block with one delta, the end with usage."""
    start = _message(answer, call, content=[], stop_reason=None, stop_sequence=None)
    start["usage"]["output_tokens"] = 0
    yield _event({"type": "message_start", "message": start})
    for index, block in enumerate(_blocks(answer)):
        empty, deltas = _deltas(block)
        yield _event({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    yield _event({"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)})
    yield _event({"type": "message_stop"})


def error(error: EndpointError) -> dict[str, Any]:
    """Error -> response. Agents know a full context by the start of its text."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    text = f"{error}"
    if isinstance(error, ContextFull):
        text = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_tokens} maximum"
    return {"type": "error", "error": {"type": kind, "message": text}}


def error_event(found: EndpointError) -> str:
    """Error -> last event of a stream."""
    return _event(error(found))


def _event(data: Mapping[str, Any]) -> str:
    return sse(data, event=data["type"])


def _message(answer: ChatAnswer, call: Call, **fields: Any) -> dict[str, Any]:
    head = {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.body["model"]}
    return {**head, **fields, "usage": _usage(answer)}


def _end(answer: ChatAnswer) -> dict[str, Any]:
    reason = STOP_REASONS[answer.finish] if answer.stop_text is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    """Counts of tokens; `input_tokens` leaves out those that the cache served."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    message, blocks = answer.message, list[dict[str, Any]]()
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for use in message.tool_calls:
        blocks.append({"type": "tool_use", "id": use.id, "name": use.name, "input": json.loads(use.arguments)})
    return blocks


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, and the deltas that complete it."""
    match block["type"]:
        case "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]
            return {**block, "thinking": "", "signature": ""}, deltas
        case "tool_use":
            partial = {"type": "input_json_delta", "partial_json": arguments_text(block["input"])}
            return {**block, "input": {}}, [partial]
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


FORMAT = WireFormat(
    read=read,
    write=write,
    events=events,
    error=error,
    error_event=error_event,
    keep_alive=_event({"type": "ping"}),
)
