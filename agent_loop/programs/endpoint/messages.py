"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

Sampling settings and `thinking` are those of the run; those of the request are ignored, like `cache_control` and
`disable_parallel_tool_use`. A user message with tool results becomes one tool message for each, and a user message of
its texts. Example:

    user [tool_result of call_1 "4 degrees", text "And tomorrow?"]  ->  tool "4 degrees" (call_1), user "And tomorrow?"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from agent_loop.loop import Message, ToolUse
from agent_loop.programs.conversation import (
    ChatAnswer,
    ChatRequest,
    ContextFull,
    EndpointError,
    RequestError,
    arguments_text,
)
from agent_loop.programs.endpoint.body import LIST, OBJECT, Body, Call, Fields, WireFormat, sse

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
REFUSED = {"mcp_servers": "give the agent tools of its own", "container": "leave it out: no code is executed here"}
BILLING = "x-anthropic-billing-header"  # Claude Code starts a system text with it, different in each request
SIGNATURE = "unsigned"  # clients may leave out thinking with an empty signature


def read(call: Call) -> ChatRequest:
    """Body -> request. RequestError: the body is wrong or asks for something else than one text answer."""
    body = Fields(call.body)
    if body.positive("max_tokens") is None:
        raise RequestError("max_tokens is missing; give a whole number of at least 1", field="max_tokens")
    request = read_prompt(call)
    if request.messages[-1].role == "assistant":
        way_out = "no answer can be continued; let the last message be one of the user"
        raise body.objects("messages")[-1].wrong("role", way_out)
    return request


def read_prompt(call: Call) -> ChatRequest:
    """As `read`, for counting tokens: `max_tokens` may be absent."""
    body = Fields(call.body)
    body.refuse(REFUSED)
    body.inner("output_config").refuse_structured("format")
    found = body.objects("messages")
    if not found:
        raise RequestError("messages is missing or empty; give at least one message", field="messages")
    messages = [each for message in found for each in _read_message(message)]
    if not messages:
        raise body.wrong("messages", "give at least one message with content")
    allows_tools = body.inner("tool_choice").body.get("type") != "none"
    return ChatRequest(
        messages=(*_read_system(call.body.get("system")), *messages),
        tools=tuple(map(_read_tool, body.objects("tools"))) if allows_tools else (),
        agent=body.required("model", str),
        max_tokens=body.positive("max_tokens"),
        stop=body.texts("stop_sequences"),
    )


def _read_system(system: Any) -> Iterator[Message]:
    if isinstance(system, list):
        blocks = cast(list[Any], system)
        system = [b for b in blocks if not (isinstance(b, dict) and f"{cast(Body, b).get('text')}".startswith(BILLING))]
    if system:
        yield Message(role="system", content=Fields({"system": system}).content("system"))


def _read_message(message: Fields) -> Iterator[Message]:
    role, content = message.required("role", str), message.body.get("content")
    blocks: Sequence[Fields] = [Fields({"type": "text", "text": content}, message.path("content"))]
    if not isinstance(content, str):
        message.required("content", LIST)
        blocks = message.objects("content")
    match role:
        case "assistant":
            yield _read_assistant(blocks)
        case "user":
            yield from _read_user(blocks)
        case "system":
            yield Message(role="system", content="\n".join(map(_read_text, blocks)))
        case _:
            raise message.wrong("role", "the roles are user, assistant and system")


def _read_assistant(blocks: Sequence[Fields]) -> Message:
    content, reasoning, calls = "", "", list[ToolUse]()
    for block in blocks:
        match block.body.get("type"):
            case "thinking":
                reasoning += block.required("thinking", str)
            case "tool_use":
                name, arguments = block.required("name", str), arguments_text(block.required("input", OBJECT))
                calls.append(ToolUse(id=block.required("id", str), name=name, arguments=arguments))
            case _:
                content += _read_text(block)
    return Message(role="assistant", content=content, reasoning=reasoning or None, tool_calls=tuple(calls))


def _read_user(blocks: Sequence[Fields]) -> Iterator[Message]:
    found = list[str]()
    for block in blocks:
        if block.body.get("type") != "tool_result":
            found.append(_read_text(block))
            continue
        if found:
            yield Message(role="user", content="\n".join(found))
            found = []
        reply = block.content("content") if block.body.get("content") else ""
        yield Message(role="tool", content=reply, tool_call_id=block.required("tool_use_id", str))
    if found:
        yield Message(role="user", content="\n".join(found))


def _read_text(block: Fields) -> str:
    if block.body.get("type") != "text":
        raise block.wrong("type", "send text; thinking and tool_use of the assistant, tool_result of the user")
    return block.required("text", str)


def _read_tool(tool: Fields) -> Body:
    if tool.body.get("type") not in (None, "custom"):
        raise tool.wrong("type", "only tools with an input_schema are supported")
    return tool.function_tool(schema="input_schema")


def write(answer: ChatAnswer, call: Call) -> dict[str, Any]:
    """Answer -> response."""
    return _message(answer, call, content=_blocks(answer), **_end(answer))


def events(answer: ChatAnswer, call: Call) -> Iterator[dict[str, Any]]:
    """Answer -> events: start, each block with one delta, the end with usage."""
    start = _message(answer, call, content=[], stop_reason=None, stop_sequence=None)
    start["usage"]["output_tokens"] = 0
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(answer)):
        empty, deltas = _deltas(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)}
    yield {"type": "message_stop"}


def error(error: EndpointError) -> dict[str, Any]:
    """Error -> response. Agents know a full context by the start of its text."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    text = f"{error}"
    if isinstance(error, ContextFull):
        text = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_tokens} maximum"
    return {"type": "error", "error": {"type": kind, "message": text}}


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


FORMAT = WireFormat(read=read, write=write, events=events, error=error, keep_alive=sse({"type": "ping"}))
