"""Requests, answers and errors of model calls, independent of an agent's wire format.

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
from http import HTTPStatus
from typing import Any, Literal

from agent_loop.loop import Message

Finish = Literal["stop", "length", "tool_calls"]


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """The text of a tool call's arguments. Wire formats that send objects give this text back.

    `arguments_text({"city": "Ås", "days": 1.0})` is `{"city": "Ås", "days": 1.0}`.
    """
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccess:
    """What an agent program needs to call the model."""

    base_url: str
    """For clients of OpenAI's and of Anthropic's API."""
    api_key: str
    """Key of this session alone."""
    model: str
    """Model name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A model call. Sampling settings are those of the run."""

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
class ChatRequest(ModelRequest):
    """A model call with a conversation."""

    messages: tuple[Message, ...]
    """Conversation so far, at least one message."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of the tools, in OpenAI's function format."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest(ModelRequest):
    """A model call with tokens."""

    token_ids: tuple[int, ...]
    """Prompt, at least one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The answer to a model call."""

    message: Message
    """Assistant message; without calls if the request has tokens."""
    finish: Finish
    """Reason of the end: the model ended its turn, a limit cut it, or it called tools."""
    stop_text: str | None = None
    """The text of `ChatRequest.stop` that ended the answer; None for any other end."""
    prompt_tokens: int
    """Tokens of the prompt, cached ones included."""
    cached_tokens: int
    """Tokens of the prompt up to the end of the answer that the call continues, which a prefix cache may serve."""
    token_ids: tuple[int, ...] = ()
    """Sampled tokens."""
    logprobs: tuple[float, ...] = ()
    """[len(token_ids)], their logprobs under the sampling weights, in nats."""

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids)


# ---- errors: only their texts reach a client; each wire format has a shape for them


CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    408: "request_timeout",
    413: "request_too_large",
    431: "request_too_large",
    500: "internal_error",
}


class EndpointError(Exception):
    """A request that is answered with an error. Its subclasses have an own status and code.

    Args:
        message: text for the client, without details of the machine.
        status: HTTP status.
        field: field of the body that is wrong; None if it is none.
        retry_after_s: seconds until a retry may succeed; None if unknown.

    Attributes:
        code: short name for programs, in the style of OpenAI; None if there is none.
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status or self.status
        self.code = self.code or CODES.get(self.status)
        self.field, self.retry_after_s = field, retry_after_s


class RequestError(EndpointError):
    """The call cannot be served as it is; names field, value and way out."""

    status = HTTPStatus.BAD_REQUEST


class ContextFull(RequestError):
    """The prompt leaves no room for an answer.

    Args:
        prompt_tokens: tokens of the prompt; an eighth of the characters of a text that is not tokenized.
        max_tokens: tokens that prompt and answer may have together.
    """

    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_tokens} tokens, and the prompt has {prompt_tokens}; "
            "shorten the messages."
        )
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens


class SessionEnded(EndpointError):
    """The session has ended, so that no call can change it."""

    status, code = HTTPStatus.CONFLICT, "session_ended"

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session} has ended; open another one with POST /sessions")


class SessionFailed(EndpointError):
    """The call failed through no fault of the client, and a retry may succeed."""

    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "service_unavailable"


class NoRolloutWaiting(EndpointError):
    """No rollout waits for an agent, so that no session can be opened now."""

    status, code = HTTPStatus.TOO_MANY_REQUESTS, "no_rollout_waiting"

    def __init__(self, *, retry_after_s: float) -> None:
        super().__init__(
            f"no rollout waits for an agent; try again in {retry_after_s:g} s", retry_after_s=retry_after_s
        )
