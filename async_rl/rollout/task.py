"""A task: prompts, an agent loop, and a warm start if the task builds its own model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from agent_loop.chat import Chat
from agent_loop.control_tokens import Tokenizer
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.functions import FunctionReward, FunctionTool, describe_error, user_line, weighted
from agent_loop.loop import AgentLoop, Prompt, TurnLimits
from agent_loop.reward import RewardFunction
from agent_loop.single_turn import SingleTurnLoop
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools import PauseGate, Tool, ToolRunner, describe_tool
from async_rl.rollout.data import CHECKED, Epochs, PromptFormat, Source, Stream, open_rows, split_rows
from message_queue.tokens import Int32Array
from message_queue.training_sequence import BoolArray

Demonstration = tuple[Int32Array, BoolArray]
"""Token ids int32 [t] and loss mask bool [t]."""


class Task:
    """A task: prompts, tools and rewards.

        task = Task(prompts=[{"prompt": "17*3", "answer": "51"}], rewards=exact, tools=[multiply])

    All results are deterministic functions of the seed of the run, so that a run can be resumed. A subclass may define
    `train_prompt`, `validation_prompts` and `build_loop` itself, and then needs no arguments.

    Args:
        prompts: rows to train on; see `async_rl.rollout.data.Source`.
        rewards: a function, several, or name -> function or (weight, function); see `agent_loop.functions`.
        validation: rows that are never trained on, as a source of their own or as a share of `prompts`.
        tools: functions, or objects with the interface of `agent_loop.tools.Tool`. Without tools a rollout is one turn.
        template: text with {column} places, the user's message; None takes the column `prompt`.
        system: first message of each prompt.
        shuffle: whether rows that are not generated are shuffled in each epoch.
        end_of_turn: text of the token that ends a turn; None is the tokenizer's end-of-sequence token.

    Raises:
        ValueError: a tool or a reward cannot be used; the message names it.
    """

    seed: int = 0
    """Seed of the run."""

    def __init__(
        self,
        *,
        prompts: Source,
        rewards: RewardFunction | Sequence[RewardFunction] | Mapping[str, Any],
        validation: Source | float | None = None,
        tools: Sequence[Any] = (),
        template: str | None = None,
        system: str | None = None,
        shuffle: bool = True,
        end_of_turn: str | None = None,
    ) -> None:
        self._prompts = prompts
        self._validation = validation
        self._reward = FunctionReward(weighted(rewards))
        self._tools: list[Tool] = [tool if _is_tool(tool) else FunctionTool(tool) for tool in tools]
        self._format = PromptFormat(template=template, system=system)
        self._shuffle = shuffle
        self._end_of_turn = end_of_turn

    def train_prompt(self, index: int) -> Prompt:
        """Prompt `index` of an endless stream, from 0."""
        return self._format.prompt(self._rows[0][index], index=index)

    def validation_prompts(self, count: int) -> Sequence[Prompt]:
        """`count` held-out prompts, which are never training prompts; fewer if there are fewer."""
        rows = self._rows[1]
        if rows is None:
            raise ValueError(
                f"validation.prompts is {count}, and the task has no held-out prompts; give Task(validation=...), or "
                "set validation.prompts=0"
            )
        count = count if isinstance(rows, Stream) else min(count, len(rows))
        return [self._format.prompt(rows[index], index=index) for index in range(count)]

    @cached_property
    def _rows(self) -> tuple[Epochs | Stream, Sequence[Any] | Stream | None]:
        """Rows to train on, and held-out rows; read when they are first needed, which is in the driver only."""
        rows = open_rows(self._prompts, seed=self.seed, name="prompts")
        held_out: Sequence[Any] | Stream | None = None
        if isinstance(self._validation, float):
            if isinstance(rows, Stream):
                raise ValueError(f"validation is {self._validation:g}, a share, and prompts are generated; give rows")
            rows, held_out = split_rows(rows, share=self._validation, name="prompts")
        elif self._validation is not None:
            held_out = open_rows(self._validation, seed=self.seed, name="validation")
        for part in (rows, held_out):
            count = 0 if part is None else 1 if isinstance(part, Stream) else min(CHECKED, len(part))
            for index in range(count):
                self.check_prompt(self._format.prompt(cast(Any, part)[index], index=index))
        if isinstance(rows, Stream):
            return rows, held_out
        return Epochs(rows, seed=self.seed if self._shuffle else None), held_out

    def build_loop(
        self, *, engine: Engine, tokenizer: Tokenizer, sampling: SamplingConfig, limits: TurnLimits, gate: PauseGate
    ) -> AgentLoop:
        """Build the agent loop, which turns one prompt into one trajectory.

        Args:
            engine: generates tokens.
            tokenizer: of the model.
            sampling: of every model call.
            limits: bounds on turns and tokens.
            gate: awaited before each tool call; closed during a publish.
        """
        end = self._end_of_turn or getattr(tokenizer, "eos_token", None)
        if end is None:
            raise ValueError("the tokenizer has no end-of-sequence token; give Task(end_of_turn=...)")
        chat = Chat(tokenizer, end_of_turn=end, tools=[describe_tool(tool) for tool in self._tools])
        if not self._tools:
            return SingleTurnLoop(engine=engine, chat=chat, reward=self._reward, limits=limits, sampling=sampling)
        tools = ToolRunner(self._tools, timeout_s=limits.tool_timeout_s, gate=gate)
        return ToolUseLoop(engine=engine, chat=chat, tools=tools, reward=self._reward, limits=limits, sampling=sampling)

    def check_prompt(self, prompt: Prompt) -> None:
        """Check that the agent loop and the reward can use a prompt of `task.prompt_file`.

        Called for every prompt of the file before any process starts.

        Raises:
            ValueError: the prompt cannot be used. The text names the message or the key of `target`, and a fix.
        """
        if hasattr(self, "_reward"):
            self._reward.check(prompt.target)

    def save_initial_checkpoint(self, path: Path) -> None:
        """Write a randomly initialised model and tokenizer. Only called if `model.checkpoint` is not set.

        Raises:
            ValueError: the task builds no model.
        """
        raise ValueError(
            f"model.checkpoint is null, and {type(self).__name__} builds no model; set model=hugging_face "
            "model.checkpoint=PATH"
        )

    def demonstrations(self, start: int, count: int) -> Sequence[Demonstration]:
        """Supervised examples `start` to `start + count - 1` for the warm start of a model that the task built.

        Raises:
            ValueError: the task has no demonstrations.
        """
        raise ValueError(f"{type(self).__name__} has no demonstrations for a warm start; set warm_start.steps=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Task of a run.

    Raises:
        ValueError: `factory` is not of this form.
    """

    factory: str
    """`module:name` or `path/of/file.py:name` of a Task, or of a function that returns one."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function, beside `seed`, the seed of the run."""
    prompt_file: Path | None = None
    """JSON lines of prompts to train on instead of the task's own stream; see `rollout.prompts.PromptFile`."""

    def __post_init__(self) -> None:
        module, _, name = self.factory.rpartition(":")
        if not module or not name:
            raise ValueError(f"task.factory is {self.factory!r}; write it as 'module:name' or 'file.py:name'")


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """Import the task, or the factory that builds it.

    Raises:
        ValueError: it cannot be imported or refuses its options; the message names the field, and file and line.
    """
    module, _, name = config.factory.rpartition(":")
    try:
        imported = _import_module(module)
    except Exception as error:
        raise ValueError(
            f"task.factory is {config.factory!r}, which cannot be imported: {describe_error(error)}"
        ) from error
    found = getattr(imported, name, None)
    if found is None:
        raise ValueError(f"task.factory is {config.factory!r}, and {module} has no {name}")
    task = found if isinstance(found, Task) else _call_factory(found, config, seed=seed)
    task.seed = seed
    return task


def _call_factory(factory: Any, config: TaskConfig, *, seed: int) -> Task:
    if not callable(factory):
        raise ValueError(f"task.factory is {config.factory!r}, a {type(factory).__name__}; name a Task or a function")
    parameters = inspect.signature(factory).parameters
    arguments: dict[str, Any] = {"options": config.options} if "options" in parameters else dict(config.options)
    if "seed" in parameters:
        arguments["seed"] = seed
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"task.options is {dict(config.options)}, which {config.factory} refuses: {error}") from error
    try:
        task = factory(**arguments)
    except ValueError as error:
        if user_line(error) == "":
            raise
        raise ValueError(f"task.factory {config.factory} failed: {describe_error(error)}") from error
    except Exception as error:
        raise ValueError(f"task.factory {config.factory} failed: {describe_error(error)}") from error
    if not isinstance(task, Task):
        raise ValueError(f"task.factory {config.factory} returned a {type(task).__name__}; return a Task")
    return task


def _is_tool(tool: Any) -> bool:
    return all(hasattr(tool, name) for name in ("name", "description", "parameters"))


def _import_module(name: str) -> ModuleType:
    """Import a module or a file `.py`. The recipes of an installed wheel are below `async_rl`."""
    if name.endswith(".py"):
        return _import_file(Path(name))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name.partition(".")[0] != "recipes" or error.name is None or not error.name.startswith("recipes"):
            raise
        return importlib.import_module(f"async_rl.{name}")


def _import_file(path: Path) -> ModuleType:
    """Import a file, beside which it finds its own modules."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = f"async_rl_task_{path.stem}"  # not the name of an installed module
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    pickler: Any = cloudpickle
    pickler.register_pickle_by_value(module)  # other processes cannot import it
    return module
