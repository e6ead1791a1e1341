"""Noisy demonstrations for the warm start.

The demonstrator often answers without the tool, garbles calls, miscopies digits and stops early. The warm-started model
makes the same mistakes, so that reinforcement learning has something to improve.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from agent_loop.chat import Chat
from agent_loop.control_tokens import Tokenizer
from agent_loop.loop import Message
from agent_loop.tools.tool import MalformedCall, parse_tool_calls
from message_queue.errors import ToolError
from message_queue.tokens import Int32Array
from message_queue.training_sequence import BoolArray

from .calculator import ERROR_TEXT, NAME, calculate
from .problems import Problem, make_prompt
from .reward import answer_text
from .tokenizer import END_OF_TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """Probabilities of mistakes.

    Raises:
        ValueError: a value is not a probability, or the demonstrator would never end.
    """

    direct_guess: float = 0.55
    """Answer at once with a random number, per trajectory."""
    malformed_call: float = 0.05
    """Break the JSON of a call, per tool turn."""
    wrong_digit: float = 0.08
    """Get one digit of the expression wrong, per tool turn."""
    give_up: float = 0.5
    """Guess after a broken call in place of a retry, per broken call."""
    early_answer: float = 0.12
    """Answer with an intermediate result, per tool turn before the last."""
    wrong_answer_digit: float = 0.06
    """Get one digit of the final answer wrong, per trajectory."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"demonstrator.{name} is {getattr(self, name)}; must be a probability")
        if self.malformed_call == 1 and self.give_up == 0:
            raise ValueError("demonstrator.malformed_call is 1 and give_up 0; such a demonstration never ends")


class Demonstrator:
    """Writes token sequences as the agent loop would record them.

    Args:
        chat: chat of the task.
        tokenizer: the model's tokenizer.
        noise: probabilities of mistakes; None for the defaults.
    """

    def __init__(self, *, chat: Chat, tokenizer: Tokenizer, noise: NoiseConfig | None = None) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._noise = noise or NoiseConfig()

    def demonstrate(self, problem: Problem, rng: random.Random) -> tuple[Int32Array, BoolArray]:
        """Token ids int32 [t] and loss mask bool [t], True for tokens of the model."""
        parts = [(self._chat.prompt(make_prompt(problem, index=0).messages), False)]
        for turn, reply in self.turns(problem, rng):
            written = np.asarray(self._tokenizer.encode(turn + END_OF_TURN, add_special_tokens=False), np.int32)
            parts.append((written, True))
            if reply is not None:
                parts.append((self._chat.reply([Message(role="tool", content=reply)], after=written), False))
        mask = np.concatenate([np.full(len(ids), sampled) for ids, sampled in parts])
        return np.concatenate([ids for ids, _ in parts]), mask

    def turns(self, problem: Problem, rng: random.Random) -> list[tuple[str, str | None]]:
        """Pairs (turn of the model, reply of the tool); the last reply is None."""
        noise, turns = self._noise, list[tuple[str, str | None]]()

        def answered(value: str) -> list[tuple[str, str | None]]:
            return [*turns, (answer_text(value), None)]

        if rng.random() < noise.direct_guess:
            return answered(_guess(rng, problem))
        value, done = str(problem.operands[0]), 0
        while done < len(problem.operators):
            expression = f"{value}{problem.operators[done]}{problem.operands[done + 1]}"
            slip = rng.random()
            if slip < noise.malformed_call:
                turn = _garble(rng, call_text(expression))
                turns.append((turn, _execute(turn)))
                if rng.random() < noise.give_up:
                    return answered(_guess(rng, problem))
                continue
            if slip < noise.malformed_call + noise.wrong_digit:
                expression = _corrupt_digit(rng, expression)
            turn = call_text(expression)
            value = _execute(turn)
            turns.append((turn, value))
            if value == ERROR_TEXT:
                return answered(_guess(rng, problem))
            done += 1
            if done < len(problem.operators) and rng.random() < noise.early_answer:
                return answered(value)
        return answered(_corrupt_digit(rng, value) if rng.random() < noise.wrong_answer_digit else value)


def call_text(expression: str) -> str:
    """The text of a turn that calls the calculator."""
    return f'<tool_call>\n{{"name": "{NAME}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def _execute(turn: str) -> str:
    """The tool's reply to `turn`."""
    (call,) = parse_tool_calls(turn)
    if isinstance(call, MalformedCall):
        return ERROR_TEXT
    try:
        return calculate(call.arguments["expression"])
    except ToolError:
        return ERROR_TEXT


def _garble(rng: random.Random, turn: str) -> str:
    """Drop a brace or a quote at the end of the JSON."""
    return turn.replace('"}}', '"}' if rng.random() < 0.5 else "}}")


def _corrupt_digit(rng: random.Random, text: str) -> str:
    at = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    return text[:at] + rng.choice([d for d in "0123456789" if d != text[at]]) + text[at + 1 :]


def _guess(rng: random.Random, problem: Problem) -> str:
    return str(rng.randrange(10 ** len(str(problem.answer))))
