"""Tools: their interface, the parser of calls in a turn, and the execution of the calls, exactly once.

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
from typing import Any, NamedTuple, Protocol, cast

from agent_loop.boundary import boundary
from agent_loop.text import safe_text, safe_value
from agent_loop.timeline import timed
from agent_loop.user_errors import Failure, describe_error, failure_of
from message_queue.errors import OvertimeError, RolloutError, StateLostError, ToolError

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
MARKERS = frozenset((CALL_OPEN, CALL_CLOSE, THINK, END_THINK))
MAX_DEPTH = 100  # of arguments: more than tools take, and less than JSON and pydantic can
_MARKER = re.compile(f"{CALL_OPEN}[ \t\r\n]*|{THINK}|{END_THINK}")
_CLOSED = re.compile(f"[ \t\r\n]*{CALL_CLOSE}")
_CALL_END = re.compile(f"{CALL_CLOSE}|(?={CALL_OPEN})")


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
    error: Failure | None = None
    """Error of the tool's own code with its file and line, for the user; None if there is none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", safe_text(self.text))


def describe_tool(tool: Tool) -> dict[str, Any]:
    """The description that chat templates take (OpenAI function format)."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


class TurnParts(NamedTuple):
    """The parts of a sampled turn."""

    reasoning: str | None
    """Text between `<think>` and `</think>` at the start; None without reasoning."""
    content: str
    """Text from there to the first call."""
    calls: list[tuple[ToolCall | MalformedCall, str]]
    """Calls after the reasoning in order, each with its text."""


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """Calls in Hermes / Qwen format, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, in order.

    Calls in reasoning are left out; see `split_turn`. Never raises: text that cannot be read is a MalformedCall.
    Without an opening marker there are no calls.
    """
    return [call for call, _ in split_turn(text).calls]


def split_turn(text: str) -> TurnParts:
    """Reasoning, text and calls of a sampled turn.

    Text between `<think>` and `</think>`, or up to the end without the second, has no calls. If only `</think>` is
    there, the prompt opened the reasoning, and it starts with the turn (see also `opened_reasoning`). Markers in the
    JSON of a call are text:

        <think>or <tool_call>...</tool_call></think> So: <tool_call>{"name": "say", "arguments": {"a": "</think>"}}...
        reasoning "or <tool_call>...</tool_call>", content " So: ", one call of `say`
    """
    reasoning, start, at, starts_with_it = None, 0, 0, text.lstrip().startswith(THINK)
    calls = list[tuple[ToolCall | MalformedCall, int, int]]()
    while (marker := _MARKER.search(text, at)) is not None:
        begin, at = marker.span()
        if marker[0] == THINK:
            close = text.find(END_THINK, at)
            close = len(text) if close < 0 else close
            inner, at = text[at:close], close + len(END_THINK)
            if starts_with_it and start == 0:
                reasoning, start = inner, at
        elif marker[0] != END_THINK:
            call, at = _read_call(text, at)
            calls.append((call, begin, at))
        elif start == 0:  # a later one is text
            reasoning, start = text[:begin], at
            calls.clear()
    content = text[start : calls[0][1] if calls else len(text)]
    return TurnParts(reasoning, content, [(call, text[begin:end]) for call, begin, end in calls])


def opened_reasoning(before: str) -> str:
    """`<think>` if the text before a sampled turn ends with it, so that the turn lacks it; else ""."""
    return THINK if before.rstrip().endswith(THINK) else ""


def _read_call(text: str, start: int) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose JSON starts at `start`, and the end of its text."""
    end = start
    try:
        call, end = json.JSONDecoder().raw_decode(text, start)
        if closed := _CLOSED.match(text, end):
            return checked_call(call), closed.end()
        cause = "Extra data"
    except (ValueError, RecursionError) as error:
        cause = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
    found = _CALL_END.search(text, end)
    why = f"is not valid JSON ({cause})" if found and found[0] else f"has no {CALL_CLOSE}"
    return MalformedCall(f"the tool call {why}"), found.end() if found else len(text)


def checked_call(call: object) -> ToolCall | MalformedCall:
    """The call that a JSON value is, with safe texts."""
    if not isinstance(call, dict):
        return MalformedCall("the tool call is not a JSON object")
    fields = cast(dict[str, object], call)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return MalformedCall('the tool call needs a string "name" and an object "arguments"')
    if _is_deep(cast(Any, arguments), levels=MAX_DEPTH):
        return MalformedCall(f"the arguments of the tool call are nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:  # Python reads NaN and 1e400; other parsers of JSON, such as an HTTP agent's, take neither
        return MalformedCall("the arguments of the tool call have NaN or an infinite number, which JSON does not have")
    return ToolCall(safe_text(name), safe_value(arguments))


def _is_deep(value: object, *, levels: int) -> bool:
    """Whether a JSON value has more than `levels` levels of lists and objects."""
    if not isinstance(value, list | dict):
        return False
    parts = cast(Any, value).values() if isinstance(value, dict) else cast(list[Any], value)
    return levels == 0 or any(_is_deep(part, levels=levels - 1) for part in parts)


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
        error_text: Callable[[str], str] = "error: {}".format,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"tools are named {[tool.name for tool in tools]}; give each a different name")
        self._repeatable: Mapping[str, bool] = {}
        self._timeout_s = timeout_s
        self._gate = gate or PauseGate()
        self._error_text = error_text

    def with_tools(self, tools: Sequence[Tool], *, repeatable: Mapping[str, bool]) -> ToolRunner:
        """A runner with the tools of a rollout too; `tools` replace those of the same name.

        Args:
            repeatable: tool with a state -> whether its calls may be repeated.
        """
        runner = copy(self)
        runner._tools = {**self._tools, **{tool.name: tool for tool in tools}}
        runner._repeatable = repeatable
        return runner

    async def rebuild(self, turns: Sequence[str], *, unsure: str = "") -> None:
        """Give tools their state by repeating the calls of earlier turns.

        Args:
            turns: texts of the turns whose calls were made.
            unsure: text of the last turn if its calls may have been made.

        Raises:
            StateLostError: a tool with a state was called, and its calls cannot be repeated.
        """
        for text in (*turns, unsure):
            for call in parse_tool_calls(text):
                if isinstance(call, ToolCall) and not self._repeatable.get(call.name, True):
                    raise StateLostError(f"the state of tool {call.name} is lost, and its class is not repeatable")
        for text in turns:
            await self.run([call for call in parse_tool_calls(text) if self._is_repeated(call)])

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolReply]:
        """One reply per call, in order. A failure of any kind is a reply; only RolloutError passes through."""
        failure: BaseException | None = None
        replies: list[asyncio.Task[ToolReply]] = []
        try:
            async with asyncio.TaskGroup() as group:
                replies = [group.create_task(self._reply(call)) for call in calls]
        except* RolloutError as errors:  # Python 3.11.2 would put an error that is raised here into a group
            failure = errors.exceptions[0]
        if failure is not None:
            raise failure from None
        return [reply.result() for reply in replies]

    async def run_interrupted(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolReply]:
        """Replies to calls that were started before a restart; only calls that may be repeated are made."""
        made = iter(await self.run([call for call in calls if self._is_repeated(call)]))
        unknown = self._failure("the call was interrupted; it may have happened or not")
        return [next(made) if self._is_repeated(call) else unknown for call in calls]

    def _is_repeated(self, call: ToolCall | MalformedCall) -> bool:
        return isinstance(call, ToolCall) and self._repeatable.get(call.name, False)

    async def _reply(self, call: ToolCall | MalformedCall) -> ToolReply:
        if isinstance(call, MalformedCall):
            return self._failure(call.cause)
        tool = self._tools.get(call.name)
        if tool is None:
            return self._failure(f"there is no such tool; the tools are {', '.join(sorted(self._tools)) or 'none'}")
        await self._gate.passed()
        try:
            with timed("tool", name=tool.name):
                text = await boundary(lambda: tool(call.arguments), name=tool.name, timeout_s=self._timeout_s)
            return ToolReply(text, failed=False)
        except RolloutError:
            raise
        except (ToolError, OvertimeError) as error:
            return self._failure(str(error))
        except Exception as error:  # noqa: BLE001 - a tool is foreign code: a bad call is data, not a crash
            told = self._failure(f"{tool.name} failed ({describe_error(error, with_line=False)})")
            failure = failure_of(error)
            return replace(told, error=replace(failure, text=f"{tool.name} failed: {failure.text}"))

    def _failure(self, cause: str) -> ToolReply:
        return ToolReply(self._error_text(cause), failed=True)
