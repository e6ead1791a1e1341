"""One prompt -> one trajectory: input, limits and contract of an agent loop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from annotated_types import Ge

from agent_loop.bounds import Count, Seconds, bounded
from agent_loop.text import safe_text
from message_queue.trajectory import Trajectory


def _make_safe(made: Any) -> None:
    for name in made.__slots__:
        if isinstance(text := getattr(made, name), str) and not text.isascii():
            object.__setattr__(made, name, safe_text(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A tool call in a message of the assistant."""

    id: str
    """Name of the call; letters, digits, "_" and "-". The reply refers to it."""
    name: str
    """Name of the tool."""
    arguments: str
    """JSON text of the arguments object; in a history, any text that the agent sent."""

    __post_init__ = _make_safe


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation. Its texts become safe (`agent_loop.text`), whoever makes it."""

    role: str
    """system, user, assistant or tool, as the chat template knows them; tool is the reply to one tool call."""
    content: str
    """Text."""
    reasoning: str | None = None
    """Reasoning of the model before the text; None if there is none."""
    tool_calls: tuple[ToolUse, ...] = ()
    """Calls of an assistant message, in order."""
    tool_call_id: str | None = None
    """Call that a tool message replies to."""
    name: str | None = None
    """Name of the author, if the agent gave one."""

    __post_init__ = _make_safe


def openai_call(call: ToolUse) -> dict[str, Any]:
    """A tool call in OpenAI's format."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def openai_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's format; absent fields are left out."""
    calls = [openai_call(call) for call in message.tool_calls]
    more = {"reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id, "name": message.name}
    fields = {"role": message.role, "content": message.content, **more, "tool_calls": calls}
    return {name: value for name, value in fields.items() if name == "content" or value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task input."""

    index: int
    """Position in the source."""
    messages: tuple[Message, ...]
    """Conversation so far, at least one message."""
    target: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Data for the reward, never shown to the model."""
    teacher: str | None = None
    """Name of the teacher that scores its rollouts; None for the only one of the run, "" for none."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"prompt {self.index} has no messages; give at least one")

    @property
    def key(self) -> str:
        """Digest of messages and target: equal prompts have one key at all places of the source."""
        content = repr((self.messages, sorted(self.target.items())))
        return hashlib.blake2b(content.encode(), digest_size=12).hexdigest()


@bounded("limits")
class TurnLimits:
    """Bounds of one trajectory."""

    max_turns: Count
    """Model calls."""
    max_tokens: Count
    """T, prompt and tool replies included; at most the context of the engine."""
    max_new_tokens_per_turn: Count | None = None
    """Sampled tokens of one turn; None leaves only `max_tokens`."""
    segment_tokens: Count = 4096
    """Sampled tokens of one request to the engine. A longer turn is several requests in a row. The death of a replica
    costs at most this many tokens of each rollout that it served."""
    tool_timeout_s: Seconds = 30.0
    """Seconds for one tool call."""
    reward_timeout_s: Seconds = 60.0
    """Seconds for the reward."""
    generate_timeout_s: Seconds = 600.0
    """Seconds for one engine call, pauses for weight updates included."""
    agent_timeout_s: Seconds = 3600.0
    """Seconds for one agent program, its model calls and tools included."""
    max_refused_answers: Annotated[int, Ge(0)] = 3
    """Times in a row that a request is repeated because the engine's answer broke the contract."""
    max_tool_reply_chars: Count | None = None
    """Characters of one tool's reply. A longer reply is cut, with a note to the model. None cuts only replies that have
    together more than 8 characters for each token that is left."""

    def turn_budget(self, existing: int) -> int:
        """Tokens that the next turn may sample when the trajectory holds `existing`; 0 or less when it is full."""
        left = self.max_tokens - existing
        return left if self.max_new_tokens_per_turn is None else min(left, self.max_new_tokens_per_turn)


class AgentLoop(Protocol):
    """Turns a prompt into a trajectory. Constructed complete: engine, chat, tools, reward, limits, sampling.

    One loop serves any number of rollouts at once; it keeps no state between or across them.
    """

    async def run(self, prompt: Prompt, *, trajectory: Trajectory, session: str, cache_salt: str) -> None:
        """Fill `trajectory` and close it with its reward and stop reason.

        The trajectory is empty or was left unfinished by an earlier call. In the second case the rollout resumes there:
        existing tokens are not resampled. Tools of the last turn are called if their replies are missing. If
        `trajectory.unsure_call` says that the calls were started, they are not repeated, and the model sees a note.

        Aborts by the engine are resumed inside, and requests whose answer breaks the contract are repeated. The
        trajectory grows as segments arrive, so that a caller sees the generated tokens even if the rollout fails. It
        never holds a turn that was half recorded. A loop that rewrites the history calls `trajectory.fork` and
        continues on that path; `trajectory.paths` has all paths when the rollout resumes.

        Args:
            session: name of this rollout, unique in the run, without "#".
            cache_salt: rollouts with different salts share no prefix cache.

        Raises:
            StateLostError: the trajectory was left unfinished, and the state of a tool of this rollout is gone.
            PromptError: the prompt does not fit.
            RolloutError: the prompt differs from the existing one, the reward failed, the engine gave up on a request,
                or its answers broke the contract too often.
            EngineError: the engine cannot serve or gave no answer in time.
            ContractError: the trajectory is closed.
        """
        ...
