"""Tools and rewards from plain Python functions.

    def multiply(a: int, b: int) -> int:                        a tool: its schema comes from the signature, its texts
        \"\"\"Multiplies two integers.\"\"\"                          from the docstring
        return a * b

    def exact(completion: Completion, answer: str) -> bool:     a reward: `answer` is a column of the prompt's row
        return completion.text.strip() == answer

A function may be `async`. Any other runs in a thread, so that a call that blocks stops no other rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

from agent_loop.boundary import call_function
from agent_loop.loop import Prompt
from agent_loop.reward import Completion, RewardFunction, Score
from agent_loop.user_errors import describe_error
from message_queue.errors import RewardError, RolloutError, ToolError


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


class FunctionReward:
    """A Reward: the weighted sum of functions. Each function becomes a metric with its name.

    Args:
        functions: name -> (weight, function).

    Raises:
        ValueError: a function has parameters that are no names, such as `*args`.
    """

    def __init__(self, functions: Mapping[str, tuple[float, RewardFunction]]) -> None:
        self._functions = dict(functions)
        self._parameters = {
            name: named_parameters(function, name=f"reward {name}") for name, (_, function) in functions.items()
        }

    def check(self, target: Mapping[str, Any]) -> None:
        """Check that a row has the columns that the functions need.

        Raises:
            ValueError: names the function, its parameter and the columns.
        """
        for name, parameters in self._parameters.items():
            check_columns(parameters, target, name=f"reward {name}", beside=("prompt", "completion"))
            if parameters and not any(each in ("prompt", "completion", *target) for each in parameters):
                raise ValueError(
                    f"reward {name} uses neither the completion nor a column; its parameters are "
                    f"{', '.join(parameters)}: call it if it makes a reward, as in math_answer()"
                )

    async def score(self, prompt: Prompt, *, completion: Completion) -> Score:
        """See `agent_loop.reward.Reward`."""
        parts: dict[str, float] = {}
        available = {**prompt.target, "prompt": prompt, "completion": completion}
        for name, (_, function) in self._functions.items():
            arguments = {key: available[key] for key in self._parameters[name] if key in available}
            try:
                parts[name] = float(await call_function(function, arguments))
            except RolloutError:
                raise
            except Exception as error:
                raise RewardError(f"reward {name} of prompt {prompt.index} failed: {describe_error(error)}") from error
        value = sum(weight * parts[name] for name, (weight, _) in self._functions.items())
        return Score(value, parts if len(parts) > 1 else {})


def weighted(
    rewards: RewardFunction | Sequence[RewardFunction] | Mapping[str, Any],
) -> dict[str, tuple[float, RewardFunction]]:
    """name -> (weight, function), from the `rewards` of a task.

    `exact` and `[exact, short]` have weight 1 each; `{"exact": exact, "short": (0.2, short)}` names and weighs them.

    Raises:
        ValueError: nothing, two functions of one name, or a value that is no function.
    """
    found: dict[str, tuple[Any, Any]] = {}
    given: Any = rewards  # of a user, who may have no type checker
    if not callable(given) and (isinstance(given, str) or not isinstance(given, Mapping | Sequence)):
        raise ValueError(f"rewards is {rewards!r}; give a function, a list of functions, or a mapping of names to them")
    if isinstance(rewards, Mapping):
        for name, value in cast(Mapping[str, Any], rewards).items():
            found[name] = value if isinstance(value, tuple) else (1.0, value)
    else:
        functions = [rewards] if callable(rewards) else list(rewards)
        found = {getattr(function, "__name__", repr(function)): (1.0, function) for function in functions}
        if len(found) < len(functions):
            raise ValueError("two rewards have one name; give a mapping of names to functions")
    if not found:
        raise ValueError("rewards is empty; give a function")
    for name, (weight, function) in found.items():
        if not callable(function) or not isinstance(weight, int | float):
            raise ValueError(f"reward {name} is {(weight, function)}; give a function, or (weight, function)")
    return found


def named_parameters(function: Callable[..., Any], *, name: str) -> dict[str, bool]:
    """Parameter of a function -> whether it has no default.

    Raises:
        ValueError: a parameter is no name, such as `*args`; the text starts with `name`.
    """
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{name} has the parameter {parameter}; give it named parameters only")
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}


def check_columns(
    parameters: Mapping[str, bool], target: Mapping[str, Any], *, name: str, beside: Sequence[str]
) -> None:
    """Check that a row has the columns that a function needs.

    Args:
        parameters: the function's parameters, from `named_parameters`.
        target: columns of the row.
        beside: names that are no columns.

    Raises:
        ValueError: names the function, its parameter and the columns.
    """
    for parameter, needed in parameters.items():
        if needed and parameter not in (*beside, *target):
            raise ValueError(
                f"{name} has the parameter {parameter}, and a prompt has the columns "
                f"{', '.join(sorted(target)) or '(none)'}; name it {', '.join(beside)} or as one of them"
            )
