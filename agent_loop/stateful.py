"""Tools of one rollout: those with a state are the public methods of an object that lives for it.

    class Board:
        def open(self, size: int): ...               optional; `size` is a column of the prompt's row
        def move(self, x: int, y: int) -> str: ...   a tool, described as any other function
        def close(self): ...                         optional; called however the rollout ends

    prompt ──> Board() ──> open ──> move, move, ... ──> reward ──> close

A rollout that is resumed has its tokens and no object: the object was in a process that died, or was closed when the
rollout failed. If the class says `repeatable = True`, the recorded calls are made again on a new object, in order, and
their replies are thrown away. Otherwise the rollout starts over.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from agent_loop.functions import FunctionTool, call_function, check_columns, named_parameters
from agent_loop.loop import Prompt, RolloutError, StateLostError
from agent_loop.mcp import McpServer
from agent_loop.timeline import timed
from agent_loop.tools import MalformedCall, Tool, ToolCall, ToolReply, ToolRunner, parse_tool_calls
from agent_loop.user_errors import describe_error

HOOKS = ("open", "close")


class ToolClass:
    """A class whose public methods are tools of one object for each rollout.

    Args:
        factory: the class, or a `functools.partial` of it; called without arguments for each rollout.

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
                raise ValueError(f"tool {self.name} has the static method {name}; give it as a function of its own")
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
            timeout_s: of each hook.

        Raises:
            RolloutError: the object cannot be made or opened. An error of `close` is only logged.
        """
        available = {**prompt.target, "prompt": prompt}
        arguments = {name: available[name] for name in self._open if name in available}
        owner: Any = None
        try:
            try:
                owner = self._factory()
                if hasattr(owner, "open"):
                    async with asyncio.timeout(timeout_s):
                        with timed("tool", name=f"{self.name}.open"):
                            await call_function(owner.open, arguments)
            except RolloutError:
                raise
            except Exception as error:
                text = f"tool {self.name} of prompt {prompt.index} cannot be opened: {describe_error(error)}"
                raise RolloutError(text) from error
            turn = asyncio.Lock()
            yield [_MethodTool(tool.of(owner), turn) for tool in self.tools]
        finally:
            if hasattr(owner, "close"):
                await self._close(owner, timeout_s)

    async def _close(self, owner: Any, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await call_function(owner.close, {})
        except Exception as error:  # noqa: BLE001 - the rollout has ended, and its end stays
            logging.getLogger(__name__).warning("close of tool %s failed: %s", self.name, describe_error(error))


class _MethodTool:
    """A Tool: a method of an object whose calls are made one after the other, in the order of the turn."""

    def __init__(self, tool: FunctionTool, turn: asyncio.Lock) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self._tool = tool
        self._turn = turn

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        await self._turn.acquire()
        call = asyncio.ensure_future(self._tool(arguments))
        call.add_done_callback(self._ended)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if self._tool.is_async:
                call.cancel()  # one in a thread cannot be stopped, and keeps the others out until it ends
            raise

    def _ended(self, call: asyncio.Future[str]) -> None:
        self._turn.release()
        if not call.cancelled():
            call.exception()


class RolloutTools:
    """The tools of one rollout, some of which may have a state.

    Args:
        runner: of all tools.
        repeatable: tool with a state -> whether its calls may be repeated.
    """

    def __init__(self, runner: ToolRunner, *, repeatable: Mapping[str, bool]) -> None:
        self._runner = runner
        self._repeatable = repeatable

    async def rebuild(self, turns: Sequence[str], *, unsure: str = "") -> None:
        """Make the calls of earlier turns again on new objects.

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
"""Tools that are opened for each rollout. `repeatable` is None if they have no state, so that no call is made again."""


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
