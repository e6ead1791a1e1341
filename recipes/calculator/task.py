"""The calculator task: implements `async_rl.rollout.task.Task`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agent_loop.chat import Chat
from agent_loop.control_tokens import Tokenizer
from agent_loop.engine import Engine, SamplingConfig
from agent_loop.loop import AgentLoop, Prompt, TurnLimits
from agent_loop.tool_use import ToolUseLoop
from agent_loop.tools.tool import PauseGate, ToolRunner, describe_tool
from async_rl.files.validation import explain
from async_rl.rollout.task import Task
from message_queue.tokens import Int32Array
from message_queue.training_sequence import BoolArray

from .calculator import ERROR_TEXT, Calculator, LatencyConfig
from .demonstrator import Demonstrator
from .model import TinyModelConfig, save_initial_checkpoint
from .problems import ProblemConfig, draw_problem, make_prompt
from .reward import ExactAnswer
from .tokenizer import END_OF_TURN, PAD, TURN_START, build_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorConfig:
    """Options of the task (`task.options`).

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    operation_weights: tuple[float, ...] = (0.5, 0.3, 0.2)
    """Relative frequency of chains with 1, 2, 3, ... operations."""
    min_operand: int = 10
    """Smallest operand."""
    max_operand: int = 99
    """Largest operand."""
    distinct_prompts: int | None = None
    """Training prompts, which come back in the same order; None for an endless stream of new ones."""
    tool_latency_s: float = 0.0
    """Mean seconds of a tool call, exponentially distributed."""
    tool_tail_share: float = 0.0
    """Share of slow tool calls."""
    tool_tail_factor: float = 10.0
    """Slow tool calls take this many times as long."""
    dense_first_layer: bool = True
    """Whether layer 0 has no experts. Set it to False for SGLang, which ignores `mlp_only_layers`."""

    def __post_init__(self) -> None:
        _ = self.problems, self.latency  # each checks its own fields
        if self.distinct_prompts is not None and self.distinct_prompts < 1:
            raise ValueError(f"task.options.distinct_prompts is {self.distinct_prompts}; must be >= 1, or null")

    @property
    def problems(self) -> ProblemConfig:
        """Options of the questions."""
        return ProblemConfig(
            operation_weights=tuple(self.operation_weights), min_operand=self.min_operand, max_operand=self.max_operand
        )

    @property
    def latency(self) -> LatencyConfig:
        """Options of the tool's latency."""
        return LatencyConfig(
            mean_s=self.tool_latency_s, tail_share=self.tool_tail_share, tail_factor=self.tool_tail_factor
        )


class CalculatorTask(Task):
    """A Task. All results depend only on (config, seed).

    Validation prompts do not depend on the seed, so that runs with different seeds can be compared.
    """

    reward = ExactAnswer()

    def __init__(self, config: CalculatorConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._tokenizer = build_tokenizer()
        self._demonstrator = Demonstrator(chat=build_chat(self._tokenizer), tokenizer=self._tokenizer)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a decode; the first is the end-of-turn token."""
        return build_chat(self._tokenizer).stop_token_ids

    def train_prompt(self, index: int) -> Prompt:
        """Prompt `index` of an endless stream; never a held-out question."""
        number = index % (self._config.distinct_prompts or index + 1)
        rng = random.Random(f"train {self._seed} {number}")
        return make_prompt(draw_problem(rng, self._config.problems, held_out=False), index=index)

    def validation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` prompts of the held-out stream."""
        return [
            make_prompt(draw_problem(random.Random(f"validation {i}"), self._config.problems, held_out=True), index=i)
            for i in range(count)
        ]

    def check_prompt(self, prompt: Prompt) -> None:
        """Check that `target.answer` is a text.

        Raises:
            ValueError: the answer is missing, empty or not a text; the message names the key.
        """
        answer = prompt.target.get("answer")
        if not isinstance(answer, str) or not answer:
            found = "is missing" if "answer" not in prompt.target else f"is {answer!r}"
            raise ValueError(f'target.answer {found}; write the answer as text, such as "target": {{"answer": "42"}}')

    def chat(self, tokenizer: Tokenizer) -> Chat:
        """See `build_chat`."""
        return build_chat(tokenizer)

    def build_loop(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: SamplingConfig,
        limits: TurnLimits,
        gate: PauseGate | None = None,
    ) -> AgentLoop:
        """Build the multi-turn tool-use loop with the calculator; see `Task.build_loop`."""
        assert self.reward is not None
        calculator = Calculator(latency=self._config.latency, seed=self._seed)
        return ToolUseLoop(
            engine=engine,
            chat=build_chat(tokenizer),
            tools=ToolRunner(
                [calculator], timeout_s=limits.tool_timeout_s, gate=gate, error_text=lambda _cause: ERROR_TEXT
            ),
            reward=self.reward,
            limits=limits,
            sampling=sampling,
        )

    def save_initial_checkpoint(self, path: Path) -> None:
        """Write a randomly initialised model and the tokenizer as a Hugging Face checkpoint folder."""
        config = TinyModelConfig(dense_first_layer=self._config.dense_first_layer)
        save_initial_checkpoint(path, tokenizer=self._tokenizer, seed=self._seed, config=config)

    def demonstrations(self, start: int, count: int) -> list[tuple[Int32Array, BoolArray]]:
        """Demonstrations `start` to `start + count - 1`: (token ids int32 [t], loss mask bool [t]).

        Their questions are not held out.
        """
        return [self._demonstration(index) for index in range(start, start + count)]

    def _demonstration(self, index: int) -> tuple[Int32Array, BoolArray]:
        rng = random.Random(f"demonstration {self._seed} {index}")
        return self._demonstrator.demonstrate(draw_problem(rng, self._config.problems, held_out=False), rng)


def build_chat(tokenizer: Tokenizer) -> Chat:
    """The chat of the task. Padding and start-of-turn tokens end a decode too: no valid answer contains them."""
    return Chat(
        tokenizer,
        end_of_turn=END_OF_TURN,
        tools=[describe_tool(Calculator())],
        stop_tokens=(PAD, TURN_START),
    )


def calculator_task(options: Mapping[str, Any], *, seed: int) -> CalculatorTask:
    """Build the task.

    Args:
        options: fields of CalculatorConfig; lists are accepted for tuples.
        seed: of prompts, initial weights, demonstrations and latencies.

    Raises:
        ValueError: an option is unknown, or its value has the wrong type or is out of range; the message names it.
    """
    known = [field.name for field in fields(CalculatorConfig)]
    for name in options:
        if name not in known:
            raise ValueError(f"task.options.{name} is an unknown option; use one of {', '.join(known)}")
    try:
        config = TypeAdapter(CalculatorConfig).validate_python(options)
    except ValidationError as error:
        raise ValueError(explain(error.errors()[0], prefix="task.options.")) from error
    return CalculatorTask(config, seed=seed)
