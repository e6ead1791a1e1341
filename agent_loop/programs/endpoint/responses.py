"""OpenAI's `/v1/responses`.

Nothing is stored: each request holds the whole conversation. Sampling settings and `reasoning` are those of the run;
those of the request are ignored, like `strict` of a tool and `parallel_tool_calls`. Items of the model that follow each
other are one assistant message, in the order reasoning, text, calls. Example:

    reasoning "r", message "m", function_call f  ->  assistant(reasoning="r", content="m", tool_calls=(f,))
    message "m", message "n"                     ->  assistant(content="m"), assistant(content="n")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from agent_loop.loop import Message, ToolUse
from agent_loop.programs.conversation import ChatAnswer, ChatRequest, EndpointError, RequestError
from agent_loop.programs.endpoint import chat_completions
from agent_loop.programs.endpoint.body import LIST, Body, Call, Fields, WireFormat

NOT_STORED = "leave it out and send the whole conversation in `input`: nothing is stored"
LOGPROBS = "message.output_text.logprobs"
REFUSED = {
    "background": "leave it out and wait for the answer",
    "conversation": NOT_STORED,
    "previous_response_id": NOT_STORED,
    "prompt": "send the text of the prompt in `input`",
    "store": "give false: nothing is stored",
    "top_logprobs": "use /v1/chat/completions for logprobs",
    "moderation": "leave it out",
}
TEXTS = ("input_text", "output_text", "text")
ITEMS = "the items are message, reasoning, function_call and function_call_output"


def read(call: Call) -> ChatRequest:
    """Body -> request. RequestError: the body is wrong or asks for something else than one text answer."""
    body = Fields(call.body)
    body.refuse(REFUSED)
    body.inner("text").refuse_structured("format")
    if LOGPROBS in (body.optional("include", LIST) or []):
        raise body.wrong("include", "use /v1/chat/completions for logprobs")
    instructions = body.optional("instructions", str)
    messages = [Message(role="system", content=instructions)] if instructions else []
    if isinstance(text := call.body.get("input"), str):
        messages.append(Message(role="user", content=text))
    else:
        messages += _read_items(body.objects("input"))
    if not messages:
        raise RequestError("input is missing or empty; give a text or a list of items", field="input")
    allows_tools = chat_completions.allows_tools(call.body)
    return ChatRequest(
        messages=tuple(messages),
        tools=tuple(map(_read_tool, body.objects("tools"))) if allows_tools else (),
        agent=body.required("model", str),
        max_tokens=body.positive("max_output_tokens"),
    )


def _read_items(items: Sequence[Fields]) -> list[Message]:
    messages = list[Message]()
    for message in map(_read_item, items):
        if messages and (joined := _join(messages[-1], message)):
            messages[-1] = joined
        else:
            messages.append(message)
    return messages


def _read_item(item: Fields) -> Message:
    """An item as a separate message."""
    match item.body.get("type", "message"):
        case "message":
            return _read_message(item)
        case "reasoning":
            parts = item.objects("content") or item.objects("summary")
            reasoning = "".join(part.required("text", str) for part in parts)
            return Message(role="assistant", content="", reasoning=reasoning or None)
        case "function_call":
            name, arguments = item.required("name", str), item.required("arguments", str)
            use = ToolUse(id=item.required("call_id", str), name=name, arguments=arguments)
            return Message(role="assistant", content="", tool_calls=(use,))
        case "function_call_output":
            output = item.content("output", kinds=TEXTS)
            return Message(role="tool", content=output, tool_call_id=item.required("call_id", str))
        case _:
            raise item.wrong("type", ITEMS)


def _read_message(item: Fields) -> Message:
    role = item.required("role", str)
    content = item.content("content", kinds=TEXTS, separator="" if role == "assistant" else "\n")
    match role:
        case "system" | "developer":
            return Message(role="system", content=content)
        case "user" | "assistant":
            return Message(role=role, content=content)
        case _:
            raise item.wrong("role", "the roles are system, developer, user and assistant")


def _join(before: Message, item: Message) -> Message | None:
    """One assistant message of two, or None if the second one starts a separate message."""
    if before.role != "assistant" or item.role != "assistant" or item.reasoning:
        return None
    if item.tool_calls:
        return replace(before, tool_calls=before.tool_calls + item.tool_calls)
    if before.content or before.tool_calls:
        return None
    return replace(before, content=item.content)


def _read_tool(tool: Fields) -> Body:
    if tool.body.get("type") != "function":
        raise tool.wrong("type", "only function is supported; give the agent its own tool")
    return tool.function_tool()


def write(answer: ChatAnswer, call: Call) -> dict[str, Any]:
    """Answer -> response."""
    return _response(call, status=_status(answer), output=_output(answer, call), answer=answer)


def events(answer: ChatAnswer, call: Call) -> Iterator[dict[str, Any]]:
    """Answer -> events in the order of OpenAI's API, numbered from 0."""
    numbers = count()

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

    started = _response(call, status="in_progress", output=[], answer=None)
    yield event("created", response=started)
    yield event("in_progress", response=started)
    output = _output(answer, call)
    for index, item in enumerate(output):
        place = {"item_id": item["id"], "output_index": index}
        empty: Body = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("output_item.added", output_index=index, item={**item, "status": "in_progress", **empty})
        if item["type"] == "function_call":
            yield event("function_call_arguments.delta", **place, delta=item["arguments"])
            yield event("function_call_arguments.done", **place, arguments=item["arguments"])
        else:
            part, kind = item["content"][0], item["content"][0]["type"]
            logprobs: Body = {"logprobs": []} if kind == "output_text" else {}
            place["content_index"] = 0
            yield event("content_part.added", **place, part={**part, "text": ""})
            yield event(f"{kind}.delta", **place, delta=part["text"], **logprobs)
            yield event(f"{kind}.done", **place, text=part["text"], **logprobs)
            yield event("content_part.done", **place, part=part)
        yield event("output_item.done", output_index=index, item=item)
    status = _status(answer)
    yield event(status, response=_response(call, status=status, output=output, answer=answer))


def late_error(found: EndpointError) -> dict[str, Any]:
    """Error -> last event of a stream. SDKs raise if the event has an `error`; the documented fields are next to it."""
    shape = chat_completions.error(found)["error"]
    fields = {name: shape[name] for name in ("code", "message", "param")}
    return {"type": "error", "sequence_number": 0, **fields, "error": shape}


def _status(answer: ChatAnswer) -> str:
    return "incomplete" if answer.finish == "length" else "completed"


def _output(answer: ChatAnswer, call: Call) -> list[dict[str, Any]]:
    message, status, items = answer.message, _status(answer), list[dict[str, Any]]()
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{call.id}", "summary": [], "content": content, "status": status})
    if message.content or not message.tool_calls:
        part: Body = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{call.id}", "role": "assistant"}
        items.append({**head, "content": [part], "status": status})
    for number, use in enumerate(message.tool_calls):
        head = {"type": "function_call", "id": f"fc_{call.id}_{number}", "call_id": use.id, "name": use.name}
        items.append({**head, "arguments": use.arguments, "status": status})
    return items


def _response(call: Call, *, status: str, output: list[dict[str, Any]], answer: ChatAnswer | None) -> dict[str, Any]:
    body = call.body
    usage = None
    if answer is not None:
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
    return {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": call.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": {},
        "model": body["model"],
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": usage,
    }


FORMAT = WireFormat(read=read, write=write, events=events, error=chat_completions.error, late_error=late_error)
