"""The simulator finds each planted defect within 1,000 seeds."""

import re

import pytest

from async_rl.simulator.outcome import run_seed
from async_rl.simulator.scenario import draw_scenario
from async_rl.simulator.violations import INVARIANTS
from tests.simulator.mutations import MUTATIONS

pytestmark = pytest.mark.mutations

SEEDS = 1000
OTHER_SIGNATURE = r"unexpected keyword argument|positional argument|has no attribute"


@pytest.mark.parametrize("name", MUTATIONS)
def test_simulator_finds_a_planted_defect(name, monkeypatch):
    defect = MUTATIONS[name]
    defect.plant(monkeypatch)
    seeds = [*([] if defect.seed is None else [defect.seed]), *range(SEEDS)]
    outcomes = (run_seed(seed) for seed in seeds if defect.may_show(draw_scenario(seed)))
    outcome = next((outcome for outcome in outcomes if outcome.invariant is not None), None)
    assert outcome is not None, f"{SEEDS} seeds hold every invariant in spite of: {name}"
    assert outcome.invariant in defect.broken, outcome.text
    assert not re.search(OTHER_SIGNATURE, outcome.text), f"{name} does not fit the code that it changes: {outcome.text}"


def test_every_invariant_has_a_defect_that_breaks_it():
    assert {invariant for defect in MUTATIONS.values() for invariant in defect.broken} == set(INVARIANTS)
