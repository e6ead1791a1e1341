"""The parity task with decodes that only their budget ends, so that weight updates come in the middle of them."""

from __future__ import annotations

from recipes.calculator import task
from recipes.calculator.task import CalculatorConfig, CalculatorTask
from tests.e2e.parity_task import EvenLength


class LongTask(CalculatorTask):
    def build_loop(self, **parts):
        loop = super().build_loop(**parts)
        loop._chat.stop_token_ids = ()
        return loop


def long_task(options, *, seed):
    """Build it; see `task.factory`."""
    task.ExactAnswer = EvenLength
    return LongTask(CalculatorConfig(**options), seed=seed)
