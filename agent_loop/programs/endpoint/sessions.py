"""The sessions behind the endpoint, as it sees them: one session is one rollout, made by an agent outside the run."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_loop.loop import Prompt
from agent_loop.programs.conversation import ChatAnswer, ChatRequest, TokenAnswer, TokenRequest

SessionStatus = Literal["open", "ended", "failed"]


def new_key() -> str:
    """An API key with 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_digest(key: str) -> bytes:
    """Digest to look a key up by: the time of a look-up shows nothing of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def same_key(one: str, other: str) -> bool:
    """Comparison in constant time."""
    return hmac.compare_digest(key_digest(one), key_digest(other))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A new session, for the agent that asked for it."""

    id: str
    """Unique name; letters, digits, "_" and "-"."""
    api_key: str
    """Key of this session alone, from `new_key`."""
    prompt: Prompt
    """Task input; the agent sees its target, and the model only the messages that the agent sends."""


class SessionHandle(Protocol):
    """A session. Every method raises an EndpointError for the client; any other exception is an internal error.

    Calls of an ended session raise SessionEnded, and calls that may succeed on a retry SessionFailed.
    """

    @property
    def id(self) -> str:
        """Name of `OpenedSession.id`."""
        ...

    @property
    def status(self) -> SessionStatus:
        """Whether it is open, ended by the agent, or failed."""
        ...

    @property
    def agents(self) -> Sequence[str]:
        """Names for the field `model`, as `/v1/models` lists them."""
        ...

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Sample the next message.

        The call is not cancelled when its client disconnects, so that a retry can have its answer. It ends with the
        session, and is cancelled when the endpoint closes.

        Raises:
            ContextFull: the messages leave no room for an answer.
        """
        ...

    async def generate(self, request: TokenRequest) -> TokenAnswer:
        """Sample tokens after a prompt of tokens; as `answer`."""
        ...

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that `answer` would make of the messages and tools."""
        ...

    def reward(self, reward: float | Mapping[str, float]) -> None:
        """Set the reward of the agents without a separate one, or that of each named agent. A later call replaces it.

        Raises:
            RequestError: there is no such agent.
        """
        ...

    def end(self) -> None:
        """End the session. Calls in progress raise SessionEnded."""
        ...


class SessionHost(Protocol):
    """Opens sessions and finds them."""

    def open(self) -> OpenedSession:
        """Give a waiting rollout to an agent.

        Raises:
            NoRolloutWaiting: there is none.
        """
        ...

    def session_of(self, key: str) -> SessionHandle | None:
        """The session of a key, found by `key_digest`. An ended session is still found, so that late calls get 409."""
        ...
