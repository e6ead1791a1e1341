"""The calculator: one binary operation per call, optionally slow."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.tools import ToolError
from recipes.calculator.problems import apply_operator

NAME = "calculator"
ERROR_TEXT = "error"  # the reply to every failed call, as the demonstrations show it
_BINARY = re.compile(r"([0-9]{1,6})([+\-*])([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """How long a call takes: exponential with mean `mean_s`; a share `tail_share` takes `tail_factor` times as long."""

    mean_s: float = 0.0
    tail_share: float = 0.0
    tail_factor: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.mean_s < float("inf"):
            raise ValueError(f"task.tool_latency_s is {self.mean_s}; must be >= 0 seconds")
        if not 0 <= self.tail_share <= 1:
            raise ValueError(f"task.tool_tail_share is {self.tail_share}; must be in [0, 1]")
        if not 1 <= self.tail_factor < float("inf"):
            raise ValueError(f"task.tool_tail_factor is {self.tail_factor}; must be >= 1")


def calculate(expression: object) -> str:
    """Result of `a+b`, `a-b` or `a*b`, operands of at most six digits.

    Raises:
        ToolError: anything else, or a negative result.
    """
    match = _BINARY.fullmatch(expression) if isinstance(expression, str) else None
    if match is None:
        raise ToolError("expression must be two numbers of at most six digits with + - or * between them")
    left, operator, right = match.groups()
    result = apply_operator(int(left), operator, int(right))
    if result < 0:
        raise ToolError("the result is negative")
    return str(result)


class Calculator:
    """A Tool.

    Args:
        seed: of the latencies, drawn in the order of the calls.
    """

    name = NAME
    description = "Computes one operation on two non-negative integers."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as 83*96"}},
        "required": ["expression"],
    }

    def __init__(self, *, latency: LatencyConfig | None = None, seed: int = 0) -> None:
        self._latency = latency or LatencyConfig()
        self._rng = random.Random(f"tool latency {seed}")

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Result of `arguments["expression"]`."""
        if self._latency.mean_s:
            await asyncio.sleep(self.draw_latency())
        return calculate(arguments.get("expression"))

    def draw_latency(self) -> float:
        """Seconds the next call takes."""
        seconds = self._rng.expovariate(1.0) * self._latency.mean_s
        return seconds * self._latency.tail_factor if self._rng.random() < self._latency.tail_share else seconds
