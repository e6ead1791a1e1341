"""Errors of the endpoint. Only their texts reach a client; each wire format has a shape for them."""

from __future__ import annotations

from http import HTTPStatus


class EndpointError(Exception):
    """A request that is answered with an error.

    Args:
        message: text for the client.
        status: HTTP status.
        field: field of the body that is wrong; None if it is none.
        code: short name for programs, in the style of OpenAI; None if there is none.
        retry_after_s: seconds until a retry may succeed; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code
        self.retry_after_s = retry_after_s


class RequestError(EndpointError):
    """The request asks for something that the endpoint cannot give; names field, value and way out."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=HTTPStatus.BAD_REQUEST, field=field, code=code)


class ContextFull(RequestError):
    """The prompt leaves no room for an answer.

    Args:
        prompt_tokens: tokens of the prompt.
        max_tokens: tokens that prompt and answer may have together.
    """

    def __init__(self, *, prompt_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_tokens} tokens, and the prompt has {prompt_tokens}; "
            "shorten the messages.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


class SessionEnded(EndpointError):
    """The session has ended, so that no call can change it."""

    def __init__(self, session: str) -> None:
        super().__init__(
            f"session {session} has ended; open another one with POST /sessions",
            status=HTTPStatus.CONFLICT,
            code="session_ended",
        )


class SessionFailed(EndpointError):
    """The call failed through no fault of the client, and a retry may succeed.

    Args:
        message: text for the client, without details of the machine.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(
            message, status=HTTPStatus.SERVICE_UNAVAILABLE, code="service_unavailable", retry_after_s=retry_after_s
        )


class NoRolloutWaiting(EndpointError):
    """No rollout waits for an agent, so that no session can be opened now."""

    def __init__(self, *, retry_after_s: float) -> None:
        super().__init__(
            f"no rollout waits for an agent; try again in {retry_after_s:g} s",
            status=HTTPStatus.TOO_MANY_REQUESTS,
            code="no_rollout_waiting",
            retry_after_s=retry_after_s,
        )
