"""Tools: their interface, the parser of calls in a turn, and the execution of these calls, exactly once.

A tool phase sits between two decodes. Aborts and weight updates happen inside decodes, so they cannot repeat it; a
cancelled rollout cancels the running tool, and the trajectory takes the replies only when all are complete.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from agent_loop.loop import RolloutError
from agent_loop.timeline import timed
from agent_loop.user_errors import describe_error

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{CALL_OPEN}(.*?)(?:{CALL_CLOSE}|(?={CALL_OPEN})|$)", re.DOTALL)


class ToolError(Exception):
    """Raised by a tool; the text explains to the model why its call is wrong."""


class Tool(Protocol):
    """A function the model can call."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments object."""
        ...

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The reply shown to the model.

        Raises:
            ToolError: the call is wrong; its text is shown to the model.
            RolloutError: the tool itself is out of order; the rollout ends and its group is dropped.
        """
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments object, decoded from JSON."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text between call markers that is no call."""

    cause: str
    """Why it is no call; shown to the model."""


@dataclass(frozen=True, slots=True)
class ToolReply:
    """The reply to one call, as the model sees it."""

    text: str
    """Reply, or the explanation of a failure."""
    failed: bool
    """Whether the call failed."""
    error: str | None = None
    """Error of the tool's own code with its file and line, for the user; None if there is none."""


def describe_tool(tool: Tool) -> dict[str, Any]:
    """The description that chat templates take (OpenAI function format)."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """Calls in Hermes / Qwen format, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, in order.

    Never raises: text that cannot be read is a MalformedCall. Without an opening marker there are no calls.
    """
    return [_parse_call(match) for match in _CALL.finditer(text)]


def _parse_call(match: re.Match[str]) -> ToolCall | MalformedCall:
    if not match.group(0).endswith(CALL_CLOSE):
        return MalformedCall(f"the tool call has no {CALL_CLOSE}")
    try:
        call: object = json.loads(match.group(1))
    except (ValueError, RecursionError) as error:
        cause = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return MalformedCall(f"the tool call is not valid JSON ({cause})")
    if not isinstance(call, dict):
        return MalformedCall("the tool call is not a JSON object")
    fields = cast(dict[str, object], call)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return MalformedCall('the tool call needs a string "name" and an object "arguments"')
    return ToolCall(name, cast(dict[str, Any], arguments))


class PauseGate:
    """Makes a pause cover tools too: no tool starts between `pause` and `resume`; running ones finish."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    def pause(self) -> None:
        """Shut the gate."""
        self._open.clear()

    def resume(self) -> None:
        """Open the gate for all who wait."""
        self._open.set()

    async def passed(self) -> None:
        """Return once the gate is open."""
        await self._open.wait()


def explain_error(cause: str) -> str:
    """Default reply to a failed call."""
    return f"error: {cause}"


def truncate(text: str, *, max_chars: int | None) -> str:
    """The first `max_chars` characters of a reply, and how many were left out; a shorter reply is unchanged."""
    if max_chars is None or len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}... ({len(text) - max_chars} more characters left out)"


class ToolRunner:
    """Executes the calls of a turn side by side, each once.

    Args:
        timeout_s: of one call, not counting the wait at the gate.
        gate: waited at before each call.
        error_text: cause of a failure -> text shown to the model.

    Raises:
        ValueError: two tools of one name.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        timeout_s: float,
        gate: PauseGate | None = None,
        error_text: Callable[[str], str] = explain_error,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"tools are named {[tool.name for tool in tools]}; give each a name of its own")
        self._timeout_s = timeout_s
        self._gate = gate or PauseGate()
        self._error_text = error_text

    def with_tools(self, tools: Sequence[Tool]) -> ToolRunner:
        """A runner of these tools too; `tools` replace those of the same name."""
        runner = copy(self)
        runner._tools = {**self._tools, **{tool.name: tool for tool in tools}}
        return runner

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolReply]:
        """One reply per call, in order. A failure of any kind is a reply; only RolloutError passes through."""
        try:
            async with asyncio.TaskGroup() as group:
                replies = [group.create_task(self._reply(call)) for call in calls]
        except* RolloutError as errors:
            raise errors.exceptions[0] from None
        return [reply.result() for reply in replies]

    def interrupted(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolReply]:
        """Replies to calls that were started before a restart and are not made again: they may have happened."""
        return [self._failure("the call was interrupted; it may have happened or not") for _ in calls]

    async def _reply(self, call: ToolCall | MalformedCall) -> ToolReply:
        if isinstance(call, MalformedCall):
            return self._failure(call.cause)
        tool = self._tools.get(call.name)
        if tool is None:
            return self._failure(f"there is no such tool; the tools are {', '.join(sorted(self._tools)) or 'none'}")
        await self._gate.passed()
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                with timed("tool", name=tool.name):
                    return ToolReply(await tool(call.arguments), failed=False)
        except RolloutError:
            raise
        except ToolError as error:
            return self._failure(str(error))
        except TimeoutError as error:
            if deadline.expired():
                return self._failure(f"{tool.name} gave no answer in {self._timeout_s:g} s")
            return self._failure(f"{tool.name} failed ({type(error).__name__})")
        except Exception as error:  # noqa: BLE001 - a tool is foreign code: a bad call is data, not a crash
            told = self._failure(f"{tool.name} failed ({type(error).__name__}: {error})")
            return replace(told, error=f"{tool.name} failed: {describe_error(error)}")

    def _failure(self, cause: str) -> ToolReply:
        return ToolReply(self._error_text(cause), failed=True)
