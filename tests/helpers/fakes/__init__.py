"""Stand-ins for engines, tools and rewards. They honour the contracts, so that what passes here is worth something."""

from __future__ import annotations

from tests.helpers.fakes.engine import FakeEngine, Fault, Interruption, check_at_edge
from tests.helpers.fakes.sampled import (
    SPEC,
    Script,
    SeededScript,
    TurnScript,
    fake_kept,
    fake_logprob,
    fake_row,
    fake_weights,
    true_rows,
    true_support,
)
from tests.helpers.fakes.task import FakeReward, FakeTool

__all__ = [
    "SPEC",
    "FakeEngine",
    "FakeReward",
    "FakeTool",
    "Fault",
    "Interruption",
    "Script",
    "SeededScript",
    "TurnScript",
    "check_at_edge",
    "fake_kept",
    "fake_logprob",
    "fake_row",
    "fake_weights",
    "true_rows",
    "true_support",
]
