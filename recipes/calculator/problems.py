"""Chains of integer operations, such as 83*96-12."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from agent_loop.loop import Message, Prompt

HELD_OUT_MODULUS = 10  # one question in ten is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemConfig:
    """Distribution of the problems.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    operation_weights: tuple[float, ...] = (0.5, 0.3, 0.2)
    """Relative frequency of chains with 1, 2, 3, ... operations. More entries give a longer tail."""
    min_operand: int = 10
    """Smallest operand."""
    max_operand: int = 99
    """Largest operand."""

    def __post_init__(self) -> None:
        weights = self.operation_weights
        if not weights or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise ValueError(f"task.options.operation_weights is {weights}; need weights >= 0, at least one above 0")
        if self.min_operand < 0:
            raise ValueError(f"task.options.min_operand is {self.min_operand}; must be >= 0")
        if self.max_operand < self.min_operand + 9:
            raise ValueError(
                f"task.options.max_operand is {self.max_operand} with task.options.min_operand={self.min_operand}; "
                "need at least 10 operands, so that some questions are held out and some are not"
            )
        if self.max_operand > 9999:
            raise ValueError(
                f"task.options.max_operand is {self.max_operand}; must be <= 9999, as calls take six digits"
            )


@dataclass(frozen=True, slots=True)
class Problem:
    """A chain of operations, evaluated left to right without precedence.

    Operands (83, 96, 12) and operators ("*", "-"): question 83*96-12, partial results (7968, 7956).
    """

    operands: tuple[int, ...]
    """n + 1 operands."""
    operators: tuple[str, ...]
    """n operators, each + - or *."""

    @property
    def question(self) -> str:
        """The chain as text, such as 83*96-12."""
        rest = (f"{op}{n}" for op, n in zip(self.operators, self.operands[1:], strict=True))
        return f"{self.operands[0]}{''.join(rest)}"

    @property
    def partial_results(self) -> tuple[int, ...]:
        """Value after each operation; the last is the answer."""
        results: list[int] = []
        value = self.operands[0]
        for operator, operand in zip(self.operators, self.operands[1:], strict=True):
            value = apply_operator(value, operator, operand)
            results.append(value)
        return tuple(results)

    @property
    def answer(self) -> int:
        """The last partial result."""
        return self.partial_results[-1]

    @property
    def held_out(self) -> bool:
        """Whether the question belongs to validation."""
        return zlib.crc32(self.question.encode()) % HELD_OUT_MODULUS == 0


def apply_operator(left: int, operator: str, right: int) -> int:
    """Compute one operation.

    Raises:
        ValueError: the operator is not + - or *.
    """
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case _:
            raise ValueError(f"operator is {operator!r}; must be one of + - *")


def draw_problem(rng: random.Random, config: ProblemConfig, *, held_out: bool) -> Problem:
    """Draw a problem without negative partial results. Only the first operation can be a product.

    Args:
        rng: source of randomness.
        config: distribution of the problems.
        held_out: whether to draw a held-out problem or a training problem.
    """
    lengths = range(1, len(config.operation_weights) + 1)
    while True:
        length = rng.choices(lengths, config.operation_weights)[0]
        operands = tuple(rng.randint(config.min_operand, config.max_operand) for _ in range(length + 1))
        operators = (rng.choice("+-*"), *(rng.choice("+-") for _ in range(length - 1)))
        problem = Problem(operands, operators)
        if min(problem.partial_results) >= 0 and problem.held_out == held_out:
            return problem


def make_prompt(problem: Problem, *, index: int) -> Prompt:
    """The question as a user message. `target` has `answer` (text) and `operations` (count)."""
    return Prompt(
        index=index,
        messages=(Message(role="user", content=f"{problem.question}="),),
        target={"answer": str(problem.answer), "operations": len(problem.operators)},
    )
