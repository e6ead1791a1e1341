"""Chains of integer operations: 83*96-12. Problem i is a function of the stream's name and i alone."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from agent_loop.loop import Message, Prompt

HELD_OUT_MODULUS = 10  # one question in ten is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemConfig:
    """operation_weights: relative frequency of chains with 1, 2, 3, ... operations; more entries, longer tail.

    min_operand, max_operand: operands are drawn from this range, both ends included.
    """

    operation_weights: tuple[float, ...] = (0.5, 0.3, 0.2)
    min_operand: int = 10
    max_operand: int = 99

    def __post_init__(self) -> None:
        weights = self.operation_weights
        if not weights or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise ValueError(f"task.operation_weights is {weights}; need weights >= 0, at least one above 0")
        if self.min_operand < 0:
            raise ValueError(f"task.min_operand is {self.min_operand}; must be >= 0")
        if self.max_operand < self.min_operand + 9:
            raise ValueError(
                f"task.max_operand is {self.max_operand} with task.min_operand {self.min_operand}; "
                "need at least 10 operands, so that some questions are held out and some are not"
            )
        if self.max_operand > 9999:
            raise ValueError(f"task.max_operand is {self.max_operand}; must be <= 9999, as calls take six digits")


@dataclass(frozen=True, slots=True)
class Problem:
    """operands[0] operators[0] operands[1] operators[1] ..., evaluated left to right; no partial result is negative."""

    operands: tuple[int, ...]
    operators: tuple[str, ...]

    @property
    def question(self) -> str:
        """Such as 83*96-12."""
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
        return self.partial_results[-1]

    @property
    def held_out(self) -> bool:
        """Whether the question belongs to validation."""
        return zlib.crc32(self.question.encode()) % HELD_OUT_MODULUS == 0


def apply_operator(left: int, operator: str, right: int) -> int:
    """left operator right, operator one of + - *."""
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
    """Draw until the problem is valid and on the wanted side. A product can only be the first operation."""
    lengths = range(1, len(config.operation_weights) + 1)
    while True:
        length = rng.choices(lengths, config.operation_weights)[0]
        operands = tuple(rng.randint(config.min_operand, config.max_operand) for _ in range(length + 1))
        operators = (rng.choice("+-*"), *(rng.choice("+-") for _ in range(length - 1)))
        problem = Problem(operands, operators)
        if min(problem.partial_results) >= 0 and problem.held_out == held_out:
            return problem


def make_prompt(problem: Problem, *, index: int) -> Prompt:
    """The question as a user message; target: answer (text) and operations (count)."""
    return Prompt(
        index=index,
        messages=(Message(role="user", content=f"{problem.question}="),),
        target={"answer": str(problem.answer), "operations": len(problem.operators)},
    )
