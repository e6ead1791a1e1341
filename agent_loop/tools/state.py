"""Tools of one rollout: those with a state are the public methods of an object that lives for it.

    class Board:
        def open(self, size: int): ...               optional; `size` is a column of the prompt's row
        def move(self, x: int, y: int) -> str: ...   a tool, described as any other function
        def close(self): ...                         optional; called however the rollout ends

    prompt ──> Board() ──> open ──> move, move, ... ──> reward ──> close

A rollout that is resumed has its tokens and no object: the object was in a process that died, or was closed when the
rollout failed. If the class says `repeatable = True`, the recorded calls are repeated on a new object, in order, and
their replies are thrown away. Otherwise the rollout starts over.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from agent_loop.boundary import UserObject
from agent_loop.loop import Prompt
from agent_loop.tools.functions import FunctionTool, check_columns, named_parameters
from agent_loop.tools.mcp import McpServer
from agent_loop.tools.tool import MalformedCall, Tool, ToolCall, ToolReply, ToolRunner, parse_tool_calls
from message_queue.errors import StateLostError

HOOKS = ("open", "close")


class ToolClass:
    """A class whose public methods are tools of one object for each rollout.

    Args:
        factory: the class, or its `functools.partial`; called without arguments for each rollout.

    Attributes:
        tools: descriptions of the methods.
        repeatable: whether the same calls on a new object make the same state.

    Raises:
        ValueError: no public method, or one that cannot be described; see `FunctionTool`.
    """

    def __init__(self, factory: Callable[[], object]) -> None:
        made: Any = cast(Any, factory).func if isinstance(factory, functools.partial) else factory
        self.name: str = made.__name__
        self.repeatable = bool(getattr(made, "repeatable", False))
        self._factory: Callable[[], Any] = cast(Any, factory)
        methods = {name: method for name, method in inspect.getmembers(made, inspect.isfunction) if name[0] != "_"}
        for name in methods:
            if isinstance(inspect.getattr_static(made, name), staticmethod):
                raise ValueError(f"tool {self.name} has the static method {name}; give it as a separate function")
        self.tools = [FunctionTool(method, is_method=True) for name, method in methods.items() if name not in HOOKS]
        if not self.tools:
            raise ValueError(f"tool {self.name} is a class without a public method; its public methods are the tools")
        self._open: dict[str, bool] = {}
        if opens := methods.get("open"):
            bound = cast(Any, opens).__get__(object())
            self._open = named_parameters(bound, name=f"open of tool {self.name}")

    def check(self, target: Mapping[str, Any]) -> None:
        """Check that a row has the columns that `open` needs.

        Raises:
            ValueError: names the parameter and the columns.
        """
        check_columns(self._open, target, name=f"open of tool {self.name}", beside=("prompt",))

    @asynccontextmanager
    async def opened(self, prompt: Prompt, *, timeout_s: float) -> AsyncGenerator[list[Tool]]:
        """The tools of a new object, which is closed at the end.

        Args:
            timeout_s: seconds for each hook.

        Raises:
            RolloutError: the object cannot be made or opened. An error of `close` is only logged.
        """
        available = {**prompt.target, "prompt": prompt}
        async with UserObject.opened(self._factory, "tool", self.name, prompt, timeout_s=timeout_s) as owner:
            await owner.call("open", {name: available[name] for name in self._open if name in available})
            turn = asyncio.Lock()
            yield [tool.of(owner.made, turn=turn) for tool in self.tools]


class RolloutTools:
    """The tools of one rollout; some may have a state.

    Args:
        runner: of all tools.
        repeatable: tool with a state -> whether its calls may be repeated.
    """

    def __init__(self, runner: ToolRunner, *, repeatable: Mapping[str, bool]) -> None:
        self._runner = runner
        self._repeatable = repeatable

    async def rebuild(self, turns: Sequence[str], *, unsure: str = "") -> None:
        """Repeat the calls of earlier turns on new objects.

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
            await self._runner.run([call for call in parse_tool_calls(text) if self._is_repeated(call)])

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolReply]:
        """See `ToolRunner.run`."""
        return await self._runner.run(calls)

    async def run_interrupted(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolReply]:
        """Replies to calls that were started before a restart; only calls that may be repeated are made."""
        made = iter(await self._runner.run([call for call in calls if self._is_repeated(call)]))
        others = iter(self._runner.interrupted(calls))
        return [next(made if self._is_repeated(call) else others) for call in calls]

    def _is_repeated(self, call: ToolCall | MalformedCall) -> bool:
        return isinstance(call, ToolCall) and self._repeatable.get(call.name, False)


ToolSource = ToolClass | McpServer
"""Tools that are opened for each rollout. `repeatable` is None if they have no state, so that no call is repeated."""


@asynccontextmanager
async def open_tools(
    runner: ToolRunner, sources: Sequence[ToolSource], prompt: Prompt, *, timeout_s: float
) -> AsyncGenerator[RolloutTools]:
    """The tools of `runner`, and those that `sources` open, for one rollout.

    Raises:
        RolloutError: see `ToolClass.opened`.
    """
    async with AsyncExitStack() as stack:
        tools: list[Tool] = []
        for each in sources:
            tools += await stack.enter_async_context(each.opened(prompt, timeout_s=timeout_s))
        states = [(each.repeatable, each) for each in sources if each.repeatable is not None]
        repeatable = {tool.name: again for again, each in states for tool in each.tools}
        yield RolloutTools(runner.with_tools(tools), repeatable=repeatable)
