"""The calculator task with a reward that a random model earns half of the time, so that every step trains."""

from __future__ import annotations

from recipes.calculator import task
from recipes.calculator.task import CalculatorConfig, CalculatorTask


class EvenLength:
    """1 for an answer of an even number of characters."""

    async def score(self, prompt, *, completion):
        return float(sum(map(len, completion.turns)) % 2 == 0)


def parity_task(options, *, seed):
    """Build it; see `task.factory`."""
    task.ExactAnswer = EvenLength
    return CalculatorTask(CalculatorConfig(**options), seed=seed)
