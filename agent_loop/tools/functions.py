"""Tools from plain Python functions, and from classes with a state for one rollout.

    def multiply(a: int, b: int) -> int:             a tool: its schema comes from the signature, its texts from the
        \"\"\"Multiplies two integers.\"\"\"               docstring
        return a * b

    class Board:
        def open(self, size: int): ...               optional; `size` is a column of the prompt's row
        def move(self, x: int, y: int) -> str: ...   a tool, described as any other function
        def close(self): ...                         optional; called however the rollout ends

    prompt ──> Board() ──> open ──> move, move, ... ──> reward ──> close

A function may be `async`. Any other runs in a thread, so that a call that blocks stops no other rollout.

A rollout that is resumed has its tokens and no object: the object was in a process that died, or was closed when the
rollout failed. If the class says `repeatable = True`, the recorded calls are repeated on a new object, in order, and
their replies are thrown away. Otherwise the rollout starts over.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from functools import partial
from typing import Any, cast

from agent_loop.boundary import UserClass, call_function, named_parameters
from agent_loop.loop import Prompt
from agent_loop.tools.mcp import McpServer
from agent_loop.tools.tool import Tool, ToolRunner
from message_queue.errors import ToolError

HOOKS = ("open", "close")


class FunctionTool:
    """A Tool from a function with type annotations.

    Arguments are checked and converted as the annotations say; the model reads what is wrong with a call. A result that
    is no text is shown as JSON.

    Args:
        function: its name, its docstring (with `Args:`) and its parameters describe the tool to the model.
        is_method: whether its first parameter is an object, given by `of`.

    Attributes:
        is_async: whether the function is `async`; any other runs in a thread.

    Raises:
        ValueError: a parameter has no annotation, one that has no JSON schema, or there is no docstring.
    """

    def __init__(self, function: Callable[..., Any], *, is_method: bool = False) -> None:
        from docstring_parser import parse  # not needed by other users of this package
        from pydantic import TypeAdapter, validate_call
        from pydantic.errors import PydanticUserError

        if not callable(function):
            raise ValueError(f"tool {function!r} is no function, class or object with the interface of Tool")
        self.name = getattr(function, "__name__", type(function).__name__)
        doc = parse(inspect.getdoc(function) or "")
        self.description = (doc.description or "").strip()
        if not self.description:
            raise ValueError(f"tool {self.name} has no docstring; describe it to the model in one")
        described = cast(Any, function).__get__(object()) if is_method else function  # without the first parameter
        named_parameters(described, name=f"tool {self.name}")
        for parameter in inspect.signature(described).parameters.values():
            if parameter.annotation is parameter.empty:
                raise ValueError(f"parameter {parameter.name} of tool {self.name} has no annotation; write its type")
        try:
            schema = TypeAdapter[Any](cast(Any, described)).json_schema()
            self._call = validate_call(function)
        except (PydanticUserError, NameError) as error:
            cause = str(error).partition(". ")[0]
            raise ValueError(
                f"tool {self.name} has an annotation without a JSON schema: {cause}; use str, int, float, bool, list, "
                "dict or a pydantic model"
            ) from error
        texts = {parameter.arg_name: parameter.description for parameter in doc.params if parameter.description}
        for name, field in schema.get("properties", {}).items():
            field.pop("title", None)
            if name in texts:
                field["description"] = texts[name]
        self.parameters: Mapping[str, Any] = schema
        self.is_async = inspect.iscoroutinefunction(function)
        self._first: tuple[Any, ...] = ()
        self._turn: asyncio.Lock | None = None

    def of(self, owner: object, *, turn: asyncio.Lock) -> FunctionTool:
        """The tool of one object, for the tool of a method. Calls with the same `turn` are made one after the other.

        One in a thread cannot be stopped, and keeps the others out until it ends, also if it was given up.
        """
        tool = copy(self)
        tool._first, tool._turn = (owner,), turn
        return tool

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """See `agent_loop.tools.tool.Tool`."""
        from pydantic import ValidationError

        function, ended = partial(self._call, *self._first), lambda: None
        if self._turn is not None:
            await self._turn.acquire()
            ended = self._turn.release
        try:
            result = await call_function(function, arguments, is_async=self.is_async, ended=ended)
        except ValidationError as error:
            if error.title != getattr(self._call, "__qualname__", error.title):
                raise
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the arguments"
            raise ToolError(f"{place}: {first['msg']}") from error
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


class ToolClass(UserClass):
    """A class whose public methods are tools of one object for each rollout.

    Args:
        factory: see `agent_loop.boundary.UserClass`.

    Attributes:
        tools: descriptions of the methods.

    Raises:
        ValueError: no public method, or one that cannot be described; see `FunctionTool`.
    """

    def __init__(self, factory: Callable[[], object]) -> None:
        super().__init__(factory, kind="tool", opening="open")
        methods = {name: each for name, each in inspect.getmembers(self.made, inspect.isfunction) if name[0] != "_"}
        for name in methods:
            if isinstance(inspect.getattr_static(self.made, name), staticmethod):
                raise ValueError(f"tool {self.name} has the static method {name}; give it as a separate function")
        self.tools = [FunctionTool(method, is_method=True) for name, method in methods.items() if name not in HOOKS]
        if not self.tools:
            raise ValueError(f"tool {self.name} is a class without a public method; its public methods are the tools")

    @asynccontextmanager
    async def opened(self, prompt: Prompt, *, timeout_s: float) -> AsyncGenerator[list[Tool]]:
        """The tools of a new object; see `UserClass.new`."""
        async with self.new(prompt, timeout_s=timeout_s) as (owner, _):
            turn = asyncio.Lock()
            yield [tool.of(owner.made, turn=turn) for tool in self.tools]


ToolSource = ToolClass | McpServer
"""Tools that are opened for each rollout. `repeatable` is None if they have no state, so that no call is repeated."""


@asynccontextmanager
async def open_tools(
    runner: ToolRunner, sources: Sequence[ToolSource], prompt: Prompt, *, timeout_s: float
) -> AsyncGenerator[ToolRunner]:
    """The tools of `runner`, and those that `sources` open, for one rollout.

    Raises:
        RolloutError: see `UserClass.new`.
    """
    async with AsyncExitStack() as stack:
        tools: list[Tool] = []
        for each in sources:
            tools += await stack.enter_async_context(each.opened(prompt, timeout_s=timeout_s))
        states = [(each.repeatable, each) for each in sources if each.repeatable is not None]
        repeatable = {tool.name: again for again, each in states for tool in each.tools}
        yield runner.with_tools(tools, repeatable=repeatable)
