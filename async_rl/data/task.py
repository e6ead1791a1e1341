"""What a run asks of a task: prompts, an agent loop for them, and, where it builds its own model, a warm start."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from agent_loop.chat import Tokenizer
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import AgentLoop, Prompt, TurnLimits
from agent_loop.tools import Gate
from message_queue.tokens import Int32Array
from message_queue.trajectory import BoolArray

Demonstration = tuple[Int32Array, BoolArray]


class Task(Protocol):
    """A task. Everything it gives is a deterministic function of its seed, so that a run can be continued."""

    def train_prompt(self, index: int) -> Prompt:
        """Prompt `index` of an endless stream."""
        ...

    def validation_prompts(self, count: int) -> Sequence[Prompt]:
        """Held-out prompts, never among the training prompts."""
        ...

    def check_prompt(self, prompt: Prompt) -> None:
        """Check that the agent loop and the reward can use a prompt of `task.prompt_file`.

        Called for every prompt of the file before any process starts.

        Raises:
            ValueError: names the key of `target` or the message, and the way out.
        """
        ...

    def build_loop(
        self, *, engine: Engine, tokenizer: Tokenizer, sampling: SamplingConfig, limits: TurnLimits, gate: Gate
    ) -> AgentLoop:
        """The agent loop that turns one prompt into one trajectory. gate: passed before each tool call."""
        ...

    def save_initial_checkpoint(self, path: Path) -> None:
        """Write a randomly initialised model and tokenizer; only called where `model.checkpoint` is not given."""
        ...

    def demonstrations(self, start: int, count: int) -> Sequence[Demonstration]:
        """Supervised examples `start..start+count-1`: (token ids, loss mask)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """factory: `module:callable` that is called with `options` and `seed` and returns a Task.

    prompt_file: JSON lines of prompts to train on instead of the task's own stream.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompt_file: Path | None = None

    def __post_init__(self) -> None:
        module, _, name = self.factory.partition(":")
        if not module or not name:
            raise ValueError(f"task.factory is {self.factory!r}; write it as 'module:callable'")


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """Import the factory and build the task.

    Raises:
        ValueError: the factory cannot be imported, or refuses its options; names the field and the value.
    """
    module, _, name = config.factory.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task.factory is {config.factory!r}, which cannot be imported: {error}") from error
    try:
        return cast(Task, factory(config.options, seed=seed))
    except TypeError as error:
        raise ValueError(f"task.options is {dict(config.options)}, which {config.factory} refuses: {error}") from error
