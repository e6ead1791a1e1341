"""The calculator tool: one binary operation per call, with optional latency."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from message_queue.errors import ToolError

from .problems import apply_operator

NAME = "calculator"
ERROR_TEXT = "error"  # the reply to every failed call
_BINARY = re.compile(r"([0-9]{1,6})([+\-*])([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """Distribution of the latency of a call.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    mean_s: float = 0.0
    """Mean seconds of a normal call, exponentially distributed."""
    tail_share: float = 0.0
    """Share of slow calls."""
    tail_factor: float = 10.0
    """Slow calls take this many times as long."""

    def __post_init__(self) -> None:
        if not 0 <= self.mean_s < float("inf"):
            raise ValueError(f"task.options.tool_latency_s is {self.mean_s}; must be >= 0 seconds")
        if not 0 <= self.tail_share <= 1:
            raise ValueError(f"task.options.tool_tail_share is {self.tail_share}; must be in [0, 1]")
        if not 1 <= self.tail_factor < float("inf"):
            raise ValueError(f"task.options.tool_tail_factor is {self.tail_factor}; must be >= 1")


def calculate(expression: object) -> str:
    """Result of `a+b`, `a-b` or `a*b` with operands of at most six digits: "83*96" -> "7968".

    Raises:
        ToolError: the expression has another form, or the result is negative.
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
        latency: distribution of the latency; None for no latency.
        seed: random seed for the latencies, drawn in the order of the calls.
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
        """Draw the seconds of the next call."""
        seconds = self._rng.expovariate(1.0) * self._latency.mean_s
        return seconds * self._latency.tail_factor if self._rng.random() < self._latency.tail_share else seconds
