"""A task: prompts, an agent loop, and a warm start if the task builds its own model."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from agent_loop.chat import Chat
from agent_loop.control_tokens import Tokenizer
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.environment import EnvironmentClass, EnvironmentLoop
from agent_loop.loop import AgentLoop, Prompt, TurnLimits
from agent_loop.programs.program import Program
from agent_loop.reward import FunctionReward, Reward, RewardFunction, weighted
from agent_loop.single_turn import SingleTurnLoop
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools.functions import FunctionTool, ToolClass, ToolSource
from agent_loop.tools.tool import PauseGate, Tool, ToolRunner, describe_tool
from agent_loop.user_errors import describe_error
from async_rl.files.user_code import import_module
from async_rl.rollout.data import CHECKED, Epochs, PromptFormat, Source, Stream, leave_out, open_rows, split_rows
from message_queue.tokens import Int32Array
from message_queue.training_sequence import BoolArray
from message_queue.trajectory import POLICY

T = TypeVar("T")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
PICKLED: dict[Path, bytes] = {}
"""File of a pickled task that this process writes once its run is not refused -> its content."""
UNNAMED = ""  # the only set of held-out prompts, if it has no name
Demonstration = tuple[Int32Array, BoolArray]
"""Token ids int32 [t] and loss mask bool [t]."""


class Task:
    """A task: prompts, tools and rewards.

        task = Task(prompts=[{"prompt": "17*3", "answer": "51"}], rewards=exact, tools=[multiply])

    All results are deterministic functions of the seed of the run, so that a run can be resumed. A subclass may define
    `train_prompt`, `validation_prompts` and `build_loop` itself, and then needs no arguments.

    Args:
        prompts: rows to train on; see `async_rl.rollout.data.Source`.
        rewards: a function, several, or name -> function or (weight, function); see `agent_loop.reward`. None
            if the agent gives each reward.
        environment: in place of rewards and tools, a class that answers each turn; see `agent_loop.environment`.
        validation: rows that are never trained on, as a separate source, as a share of `prompts`, or as several
            sets, name -> source.
        tools: functions, classes whose methods are the tools (`agent_loop.tools.functions`), servers
            (`agent_loop.McpServer`), or objects with the interface of `agent_loop.Tool`. Without tools a rollout is one
            turn.
        agent: a program that calls the model over HTTP, in place of `tools`; see `agent_loop.programs.program`.
            `external` takes programs outside of the run.
        agents: name of each agent of the program, as in the field `model` of its calls -> whether it is trained. Each
            has its own rewards and baseline. A call with another name is of the agent `policy`; that one is trained.
        template: text with {column} places, the user's message; None takes the column `prompt`.
        system: first message of each prompt.
        teacher: column with the name of the teacher of a row (`teachers.NAME`), or an empty text for none; None takes
            the only teacher of a run for all rows.
        shuffle: whether rows that are not generated are shuffled in each epoch.
        end_of_turn: text of the token that ends a turn; None is the one that the chat template puts after an assistant
            turn. The tokenizer's end-of-sequence token ends a turn too.
        max_prompt_tokens: rows with more tokens, as the chat template renders them, are left out, and their number is
            noted; None refuses rows that leave no token to sample (`rollout.limits.max_tokens`).

    Raises:
        ValueError: a tool or a reward cannot be used; the message names it.
    """

    seed: int = 0
    """Seed of the run."""
    notes: Sequence[str] = ()
    """Texts for the user about the rows that are left out; complete after the first prompt."""
    program: Program | None = None
    """Agent program that makes the rollouts; None for the loop of `build_loop`."""
    agents: Mapping[str, bool] = {}
    """Name of each agent of the program -> whether it is trained."""
    reward: Reward | None = None
    """Reward of a rollout; None if the agent program gives it."""
    _num_tokens: Callable[[Prompt], int] | None = None
    _max_tokens = 0

    def __init__(
        self,
        *,
        prompts: Source,
        rewards: RewardFunction | Sequence[RewardFunction] | Mapping[str, Any] | None = None,
        environment: Callable[[], Any] | None = None,
        validation: Source | Mapping[str, Source] | float | None = None,
        tools: Sequence[Any] = (),
        agent: Program | None = None,
        agents: Mapping[str, bool] | None = None,
        template: str | None = None,
        system: str | None = None,
        teacher: str | None = None,
        shuffle: bool = True,
        end_of_turn: str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._prompts = prompts
        self._validation = validation
        if isinstance(validation, Mapping):
            held_out_sets(validation)  # checks the names
        _check_types(
            texts={"template": template, "system": system, "teacher": teacher, "end_of_turn": end_of_turn},
            tools=tools,
            max_prompt_tokens=max_prompt_tokens,
        )
        if rewards is None and environment is None and agent is None:
            raise ValueError("rewards is None; give a function, an environment, or an agent that gives each reward")
        if environment is not None and (rewards is not None or tools):
            raise ValueError(
                f"environment is {environment!r}, rewards is {rewards!r} and tools is {tools!r}; leave out rewards and "
                "tools, as an environment takes the place of both"
            )
        if agent is not None and (environment is not None or tools):
            raise ValueError(
                f"agent is given with environment={environment!r} and tools={tools!r}; leave out both, as the agent "
                "calls its own tools"
            )
        self.program, self.agents = agent, agents or {}
        _check_agents(self.agents, program=agent)
        self._environment = None if environment is None else EnvironmentClass(environment)
        self.reward = None if rewards is None else FunctionReward(weighted(rewards))
        self._tool_sources: list[ToolSource] = []
        self._tools: list[Tool] = []
        for tool in tools:
            if hasattr(tool, "opened"):
                self._tool_sources.append(tool)
            elif inspect.isclass(tool.func if isinstance(tool, functools.partial) else tool):
                self._tool_sources.append(ToolClass(tool))
            else:
                is_tool = all(hasattr(tool, name) for name in ("name", "description", "parameters"))
                self._tools.append(cast(Tool, tool) if is_tool else FunctionTool(tool))
        self._checked = [part for part in (self.reward, self._environment, *self._tool_sources) if part is not None]
        self._format = PromptFormat(template=template, system=system, teacher=teacher)
        self._shuffle = shuffle
        self._end_of_turn = end_of_turn
        self._max_prompt_tokens = max_prompt_tokens

    def train_prompt(self, index: int) -> Prompt:
        """Prompt `index` of an endless stream, from 0."""
        return self._format.prompt(self._rows[0][index], index=index)

    def validation_prompts(self, count: int) -> Sequence[Prompt] | Mapping[str, Sequence[Prompt]]:
        """`count` held-out prompts, never training prompts; fewer if there are fewer.

        If there are several sets: name -> `count` prompts of the set. Empty if the task holds out no prompts.
        """
        sets = self._rows[1] if hasattr(self, "_prompts") else {}
        prompts = {
            name: [
                self._format.prompt(rows[index], index=index)
                for index in range(count if isinstance(rows, Stream) else min(count, len(rows)))
            ]
            for name, rows in sets.items()
        }
        return prompts.get(UNNAMED, prompts or [])

    @cached_property
    def _rows(self) -> tuple[Epochs | Stream, Mapping[str, Sequence[Any] | Stream]]:
        """Rows to train on, and sets of held-out rows; read when they are first needed, in the driver only."""
        rows, sets = self._opened()
        if self._max_prompt_tokens is not None and isinstance(rows, Stream):
            raise ValueError(
                f"max_prompt_tokens is {self._max_prompt_tokens}, and the rows are generated; leave long rows out "
                "where they are made"
            )
        seen: set[Any] = set()
        notes: list[str] = []
        for name, held_out in sets.items():
            if isinstance(held_out, Stream):
                self._reason_against(held_out[0], 0)
                continue
            sets[name], left_out = leave_out(held_out, self._reason_against, name=_set_name(name))
            notes += left_out
            for index in range(min(CHECKED, len(sets[name]))):
                seen.add(self._question(self._format.prompt(sets[name][index], index=index)))
        if isinstance(rows, Stream):
            self._reason_against(rows[0], 0)
            return rows, sets
        rows, more = leave_out(rows, lambda row, index: self._reason_against(row, index, seen=seen), name="prompts")
        self.notes = [*notes, *more]
        return Epochs(rows, seed=self.seed if self._shuffle else None), sets

    def _opened(self) -> tuple[Sequence[Any] | Stream, dict[str, Any]]:
        """Rows to train on, and sets of held-out rows."""
        rows = open_rows(self._prompts, seed=self.seed, name="prompts")
        if isinstance(self._validation, float):
            if isinstance(rows, Stream):
                raise ValueError(f"validation is {self._validation:g}, a share, and prompts are generated; give rows")
            rows, held_out = split_rows(rows, share=self._validation, name="prompts")
            return rows, {UNNAMED: held_out}
        if self._validation is None:
            return rows, {}
        sources = self._validation if isinstance(self._validation, Mapping) else {UNNAMED: self._validation}
        opened = {name: open_rows(each, seed=self.seed, name=_set_name(name)) for name, each in sources.items()}
        return rows, opened

    def _reason_against(self, row: Any, index: int, *, seen: Collection[Any] = ()) -> str | None:
        """Why a row is left out; None if it is used.

        Args:
            seen: held-out prompts; see `_question`.

        Raises:
            ValueError: the run cannot use the row.
        """
        prompt = self._format.prompt(row, index=index)
        self.check_prompt(prompt)
        most = self._max_prompt_tokens
        if most is not None and self._num_tokens is not None and self._num_tokens(prompt) > most:
            return f"more than {most} tokens (max_prompt_tokens)"
        self.check_length(prompt)
        return "the same prompt is in validation" if self._question(prompt) in seen else None

    def _question(self, prompt: Prompt) -> Any:
        """The part of a prompt that makes it another one: its messages; for an environment, also all columns."""
        return prompt.messages if self._environment is None else (prompt.messages, repr(prompt.target))

    def measure_prompts(self, tokenizer: Tokenizer, limits: TurnLimits) -> None:
        """Check the lengths of all prompts from now on. Called before the first prompt is asked for.

        A subclass with its own `build_loop` renders its prompts itself, so they are not measured.

        Raises:
            ValueError: `max_prompt_tokens` leaves no token to sample, or is given to such a subclass.
        """
        if type(self).build_loop is not Task.build_loop:
            if getattr(self, "_max_prompt_tokens", None) is not None:
                raise ValueError(
                    f"max_prompt_tokens is {self._max_prompt_tokens}, and {type(self).__name__} defines build_loop, "
                    "which renders prompts itself; leave long rows out of prompts"
                )
            return
        chat = self.chat(tokenizer)
        self._num_tokens = lambda prompt: _num_tokens(prompt, chat)
        self._max_tokens = limits.max_tokens
        if self._max_prompt_tokens is not None and self._max_prompt_tokens >= limits.max_tokens:
            raise ValueError(
                f"max_prompt_tokens is {self._max_prompt_tokens} with rollout.limits.max_tokens={limits.max_tokens}, "
                "which leaves no token to sample; lower the one or raise the other"
            )

    def check_length(self, prompt: Prompt) -> None:
        """Check that a prompt leaves a token to sample, once `measure_prompts` was called.

        Raises:
            ValueError: it does not, or the chat template leaves out one of several system messages, or a tool call.
        """
        if self._num_tokens is not None and (tokens := self._num_tokens(prompt)) >= self._max_tokens:
            raise ValueError(
                f"prompt {prompt.index} has {tokens} tokens and rollout.limits.max_tokens is {self._max_tokens}; raise "
                "it, and engine.max_model_len, which bounds it; or leave out long rows with Task(max_prompt_tokens=...)"
            )

    def chat(self, tokenizer: Tokenizer) -> Chat:
        """The chat of the task: its end of turn and its tools."""
        return Chat(tokenizer, end_of_turn=self._end_of_turn, tools=[describe_tool(tool) for tool in self._described])

    @property
    def _described(self) -> list[Tool]:
        """All tools; those that are opened for each rollout only as descriptions."""
        return [*self._tools, *(tool for each in self._tool_sources for tool in each.tools)]

    def build_loop(
        self, *, engine: Engine, tokenizer: Tokenizer, sampling: SamplingConfig, limits: TurnLimits, gate: PauseGate
    ) -> AgentLoop:
        """Build the agent loop that turns one prompt into one trajectory.

        Args:
            engine: generates tokens.
            tokenizer: the model's tokenizer.
            sampling: parameters of every model call.
            limits: bounds on turns and tokens.
            gate: awaited before each tool call; closed during a publish.
        """
        chat = self.chat(tokenizer)
        if self._environment is not None:
            return EnvironmentLoop(
                engine=engine, chat=chat, environment=self._environment, limits=limits, sampling=sampling, gate=gate
            )
        assert self.reward is not None, "only an agent program gives its rewards"
        if not self._described:
            return SingleTurnLoop(engine=engine, chat=chat, reward=self.reward, limits=limits, sampling=sampling)
        tools = ToolRunner(self._described, timeout_s=limits.tool_timeout_s, gate=gate)
        return ToolUseLoop(
            engine=engine,
            chat=chat,
            tools=tools,
            tool_sources=self._tool_sources,
            reward=self.reward,
            limits=limits,
            sampling=sampling,
        )

    def check_prompt(self, prompt: Prompt) -> None:
        """Check that the agent loop and the reward can use a prompt of `task.prompt_file`.

        Called for every prompt of the file before any process starts.

        Raises:
            ValueError: the prompt cannot be used. The text names the message or the key of `target`, and a fix.
        """
        for part in getattr(self, "_checked", ()):
            part.check(prompt.target)

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
    """`module:name` or `path/of/file.py:name` of a Task, or of a function that returns one; `path/of/file.pkl:task` of
    one that `async_rl.train` stored."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the function besides `seed`, the seed of the run."""
    prompt_file: Path | None = None
    """JSON lines of prompts to train on instead of the task's own stream; see `rollout.prompts.read_order`."""

    def __post_init__(self) -> None:
        module, _, name = self.factory.rpartition(":")
        if not module or not name:
            raise ValueError(f"task.factory is {self.factory!r}; write it as 'module:name' or 'file.py:name'")


def _check_types(*, texts: Mapping[str, Any], tools: Any, max_prompt_tokens: Any) -> None:
    """Refuse arguments of `Task` of another type, as a user may have no type checker."""
    if max_prompt_tokens is not None and not (isinstance(max_prompt_tokens, int) and max_prompt_tokens > 0):
        raise ValueError(f"max_prompt_tokens is {max_prompt_tokens!r}; give a whole number above 0, or None")
    for name, text in texts.items():
        if not isinstance(text, str | None):
            raise ValueError(f"{name} is {text!r}; give a text, or None")
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ValueError(f"tools is {tools!r}; give a list")


def _check_agents(agents: Any, *, program: Program | None) -> None:
    """Refuse an argument `agents` of `Task` that cannot be used."""
    if not isinstance(agents, Mapping) or not all(name and isinstance(name, str) for name in agents):
        raise ValueError(f'agents is {agents!r}; give name -> whether it is trained, such as {{"planner": True}}')
    given = cast(Mapping[str, object], agents)
    if any(not isinstance(trained, bool) for trained in given.values()):
        raise ValueError(f"agents is {dict(given)}; each value is True (trained) or False")
    if not any({POLICY: True, **given}.values()):
        raise ValueError(f"agents is {dict(given)}; train one of them")
    if given and program is None:
        raise ValueError(f"agents is {dict(given)} without agent; give the program that makes their calls")


def held_out_sets(found: Sequence[T] | Mapping[str, Sequence[T]]) -> Mapping[str, Sequence[T]]:
    """Name -> held-out prompts of a set; the only set of a task may have the name `UNNAMED`.

    Args:
        found: as `Task.validation_prompts` returns them.

    Raises:
        ValueError: there is no set, or a name cannot be part of a metric's key.
    """
    if not isinstance(found, Mapping):
        return {UNNAMED: found}
    if not found:
        raise ValueError("validation has no sets; give name -> source, or one source")
    for name in found:
        if not re.fullmatch(r"[\w.-]+", str(name)):
            raise ValueError(f"validation has a set named {name!r}; use letters, digits, '_', '-' and '.'")
    return found


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """Import the task, or the factory that builds it.

    Raises:
        ValueError: it cannot be imported or refuses its options; the message names the field, and file and line.
    """
    module, _, name = config.factory.rpartition(":")
    try:
        imported = _unpickle(Path(module)) if module.endswith(".pkl") else import_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"task.factory is {config.factory!r}, which cannot be imported: {describe_error(error)}"
        ) from error
    found = getattr(imported, name, None)
    if found is None:
        names = [key for key in vars(imported) if not key.startswith("_")]
        raise ValueError(f"task.factory is {config.factory!r}, and {module} has no {name}, only {', '.join(names)}")
    if isinstance(found, Task) and config.options:
        raise ValueError(
            f"task.options is {dict(config.options)}, and {config.factory} is a Task, which has none; name a function "
            "that returns one and has these parameters"
        )
    task = found if isinstance(found, Task) else _call_factory(found, config, seed=seed)
    task.seed = seed
    return task


def missing_methods(task: Task, config: TaskConfig, *, builds_model: bool, warm_start: bool) -> str:
    """The methods that a run needs and that a subclass of Task does not have, as an error; "" if there are none.

    Args:
        builds_model: whether the task has to write the initial checkpoint.
        warm_start: whether that is trained on demonstrations.
    """
    from_rows = hasattr(task, "_prompts")  # Task.__init__ was called
    needed = {
        "train_prompt": not from_rows and config.prompt_file is None,
        "build_loop": not from_rows and task.program is None,
        "save_initial_checkpoint": builds_model,
        "demonstrations": builds_model and warm_start,
    }
    kind = type(task)
    absent = [name for name, need in needed.items() if need and getattr(kind, name) is getattr(Task, name)]
    if absent[:1] in (["save_initial_checkpoint"], ["demonstrations"]):
        wish = "set model.checkpoint=PATH" if "save_initial_checkpoint" in absent else "set warm_start.steps=0"
        return f"model.checkpoint is null, and {config.factory} has no {' and '.join(absent)}; {wish}, or define them"
    if absent:
        return (
            f"task.factory is {config.factory!r}, and {kind.__name__} does not define {', '.join(absent)}; define "
            "them, or call Task.__init__ with prompts and rewards"
        )
    return ""


def _call_factory(factory: Any, config: TaskConfig, *, seed: int) -> Task:
    if not callable(factory):
        raise ValueError(f"task.factory is {config.factory!r}, a {type(factory).__name__}; name a Task or a function")
    parameters = inspect.signature(factory).parameters
    arguments: dict[str, Any] = {"options": config.options} if "options" in parameters else dict(config.options)
    if "options" not in parameters:
        _check_options(config, parameters)
    if "seed" in parameters:
        arguments["seed"] = seed
    try:
        task = factory(**arguments)
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and f"{error}".startswith("task.options"):
            raise  # the task checks its options itself
        raise ValueError(f"task.factory {config.factory} failed: {describe_error(error)}") from error
    if not isinstance(task, Task):
        raise ValueError(f"task.factory {config.factory} returned a {type(task).__name__}; return a Task")
    return task


def _check_options(config: TaskConfig, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Refuse an unknown or missing option of a factory."""
    kinds = {parameter.kind for parameter in parameters.values()}
    known = [name for name, parameter in parameters.items() if parameter.kind in _NAMED and name != "seed"]
    shown = f"its options are {', '.join(known)}" if known else "it has no options"
    for name in config.options:
        if name not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
            similar = get_close_matches(name, known, n=1)
            hint = f"did you mean task.options.{similar[0]}? " if similar else ""
            value = config.options[name]
            raise ValueError(
                f"task.options.{name} is {value!r}, and {config.factory} has no such option; {hint}{shown}"
            )
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in config.options:
            raise ValueError(f"task.options.{name} is missing, and {config.factory} needs it; set task.options.{name}=")


def _num_tokens(prompt: Prompt, chat: Chat) -> int:
    """Tokens of a prompt; refuses one whose system messages or tool calls the chat template leaves out."""
    token_ids = chat.prompt(prompt.messages)
    systems = [message.content for message in prompt.messages if message.role == "system"]
    calls = [call.name for message in prompt.messages for call in message.tool_calls]
    if texts := (systems if len(systems) > 1 else []) + calls:
        rendered = "".join(chat.decode(token_ids).split())
        if left_out := [text for text in texts if "".join(text.split()) not in rendered]:
            raise ValueError(
                f"prompt {prompt.index} has {left_out[0]!r} in a system message or a tool call, and the chat template "
                "leaves it out; give one system message, or a template with tool calls"
            )
    return len(token_ids)


def _set_name(name: str) -> str:
    """Of a set of held-out rows in texts."""
    return f"validation[{name!r}]" if name else "validation"


def pickled_task(task: Task | Callable[..., Task]) -> bytes:
    """A task for other processes and later runs, with the code that a script or a notebook defines.

    Raises:
        ValueError: it has a part that cannot be pickled.
    """
    if not isinstance(task, Task) and not callable(task):
        raise ValueError(f"task is {task!r}; give a Task, a function that returns one, or 'FILE.py:NAME'")
    copied = copy.copy(task)
    if isinstance(copied, Task):
        vars(copied).pop("_rows", None)  # they are of the seed so far
    pickler: Any = cloudpickle
    try:
        return pickler.dumps(([str(Path(path).absolute()) for path in sys.path], pickler.dumps(copied)))
    except Exception as error:
        raise ValueError(
            f"task is {task!r}, which cannot be sent to other processes: {describe_error(error)}; make that part in a "
            "function that returns the task, or give 'FILE.py:NAME'"
        ) from error


def _unpickle(path: Path) -> ModuleType:
    """A module with the task of `pickled_task`; the task finds the modules that it found there."""
    paths, pickled = pickle.loads(PICKLED.get(path) or path.read_bytes())
    sys.path += [each for each in paths if each not in sys.path]
    module = ModuleType("task")
    vars(module)["task"] = pickle.loads(pickled)
    return module
