"""Requests and answers of model calls, independent of an agent's wire format.

For example, an agent asks for the weather:

    ChatRequest(messages=(Message(role="user", content="Weather in Oslo?"),), agent="planner", ...)

The model calls a tool, and the next request holds that answer and the tool's reply:

    ChatAnswer(message=Message(role="assistant", content="", tool_calls=(call,)), finish="tool_calls", ...)
        with call = ToolUse(id="call_1", name="weather", arguments='{"city": "Oslo"}')
    Message(role="tool", content="4 degrees", tool_call_id="call_1")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agent_loop.loop import Message

Finish = Literal["stop", "length", "tool_calls"]


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """The text of a tool call's arguments. Wire formats that send objects give this text back.

    `arguments_text({"city": "Ås", "days": 1.0})` is `{"city": "Ås", "days": 1.0}`.
    """
    return json.dumps(arguments, ensure_ascii=False)


def openai_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's format; absent fields are left out."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    more = {"reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    fields = {"role": message.role, "content": message.content, **more, "tool_calls": calls}
    return {name: value for name, value in fields.items() if name == "content" or value}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A model call with a conversation. Sampling settings are those of the run."""

    messages: tuple[Message, ...]
    """Conversation so far, at least one message."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of the tools, in OpenAI's function format."""
    agent: str
    """Name of the agent: the field `model` of the request."""
    max_tokens: int | None = None
    """Tokens that the answer may have; None leaves the limits of the run."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    wants_logprobs: bool = False
    """Whether the logprobs of the answer are sent."""
    is_retry: bool = False
    """Whether the client reports that it made this call before and got no answer."""
    idempotency_key: str | None = None
    """Name that the client gave this call and its retries; None if it gave none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The answer to a ChatRequest."""

    message: Message
    """Assistant message."""
    finish: Finish
    """Reason of the end: the model ended its turn, a limit cut it, or it called tools."""
    stop_text: str | None = None
    """The text of `ChatRequest.stop` that ended the answer; None for any other end."""
    prompt_tokens: int
    """Tokens of the prompt, cached ones included."""
    cached_tokens: int
    """Tokens of the prompt up to the end of the answer that the call continues, which a prefix cache may serve."""
    completion_tokens: int
    """Sampled tokens."""
    token_ids: tuple[int, ...] = ()
    """[completion_tokens], the sampled tokens."""
    logprobs: tuple[float, ...] = ()
    """[completion_tokens], their logprobs under the sampling weights, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A model call with tokens. Sampling settings are those of the run."""

    token_ids: tuple[int, ...]
    """Prompt, at least one token."""
    agent: str
    """Name of the agent: the field `model` of the request, "" if it is absent."""
    max_tokens: int | None = None
    """Tokens that the answer may have; None leaves the limits of the run."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the answer."""
    is_retry: bool = False
    """Whether the client reports that it made this call before and got no answer."""
    idempotency_key: str | None = None
    """Name that the client gave this call and its retries; None if it gave none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnswer:
    """The answer to a TokenRequest."""

    token_ids: tuple[int, ...]
    """Sampled tokens."""
    logprobs: tuple[float, ...]
    """[len(token_ids)], their logprobs under the sampling weights, in nats."""
    finish: Literal["stop", "length"]
    """Reason of the end: a stop token, or a limit."""
    stop_token_id: int | None = None
    """The token of `TokenRequest.stop_token_ids` that ended the answer; None for any other end."""
    cached_tokens: int
    """Tokens of the prompt up to the end of the answer that the call continues, which a prefix cache may serve."""
