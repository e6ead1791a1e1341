"""Interface of a task: prompts, an agent loop, and a warm start if the task builds its own model."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from agent_loop.control_tokens import Tokenizer
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import AgentLoop, Prompt, TurnLimits
from agent_loop.tools import PauseGate
from message_queue.tokens import Int32Array
from message_queue.training_sequence import BoolArray

Demonstration = tuple[Int32Array, BoolArray]
"""Token ids int32 [t] and loss mask bool [t]."""


class Task(ABC):
    """A task. All results are deterministic functions of its seed, so that a run can be resumed.

    A subclass has to define the first three methods. The others have defaults for a task that trains a given checkpoint
    and can use every prompt.
    """

    @abstractmethod
    def train_prompt(self, index: int) -> Prompt:
        """Prompt `index` of an endless stream, from 0."""
        ...

    @abstractmethod
    def validation_prompts(self, count: int) -> Sequence[Prompt]:
        """`count` held-out prompts, which are never training prompts."""
        ...

    @abstractmethod
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
        ...

    def check_prompt(self, prompt: Prompt) -> None:  # noqa: B027 - a task may accept every prompt
        """Check that the agent loop and the reward can use a prompt of `task.prompt_file`.

        Called for every prompt of the file before any process starts.

        Raises:
            ValueError: the prompt cannot be used. The text names the message or the key of `target`, and a fix.
        """

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
        ValueError: `factory` is not of the form `module:callable`.
    """

    factory: str
    """`module:callable`, which is called with `options` and `seed` and returns a Task."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that the factory defines."""
    prompt_file: Path | None = None
    """JSON lines of prompts to train on instead of the task's own stream; see `rollout.prompts.PromptFile`."""

    def __post_init__(self) -> None:
        module, _, name = self.factory.partition(":")
        if not module or not name:
            raise ValueError(f"task.factory is {self.factory!r}; write it as 'module:callable'")


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """Import the factory and build the task.

    Raises:
        ValueError: the factory cannot be imported or refuses its options; the message names the field and the value.
    """
    module, _, name = config.factory.partition(":")
    try:
        factory = getattr(_import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task.factory is {config.factory!r}, which cannot be imported: {error}") from error
    try:
        return cast(Task, factory(config.options, seed=seed))
    except TypeError as error:
        raise ValueError(f"task.options is {dict(config.options)}, which {config.factory} refuses: {error}") from error


def _import_module(name: str) -> ModuleType:
    """Import a module. The recipes of an installed wheel are below `async_rl`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name.partition(".")[0] != "recipes" or error.name is None or not error.name.startswith("recipes"):
            raise
        return importlib.import_module(f"async_rl.{name}")
