"""The simulator finds what it is there to find: each planted defect, within 1,000 seeds."""

import pytest

from async_rl.simulator.outcome import run_seed
from async_rl.simulator.scenario import draw_scenario
from async_rl.simulator.violations import INVARIANTS
from tests.simulator.mutations import MUTATIONS

pytestmark = pytest.mark.mutations

SEEDS = 1000
KNOWN = {  # a seed that finds it, tried first; for what takes more than a few dozen to find
    "a_checkpoint_that_skips_the_prompt_being_admitted": 50,
    "a_failed_validation_rollout_that_ends_the_run": 181,
    "a_queue_that_is_lost_at_the_end_and_nobody_notices": 68,
    "a_restart_that_forgets_prompts_that_wait_to_be_admitted_again": 74,
    "requests_of_a_dead_worker_that_stay_in_the_engine": 942,
}


def first_broken(mutation, seeds):
    for seed in seeds:
        if mutation.may_show(draw_scenario(seed)) and (outcome := run_seed(seed)).invariant is not None:
            return outcome
    return None


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_defect_is_found(name, monkeypatch):
    mutation = MUTATIONS[name]
    mutation.plant(monkeypatch)
    outcome = first_broken(mutation, [*([KNOWN[name]] if name in KNOWN else []), *range(SEEDS)])
    assert outcome is not None, f"{SEEDS} seeds hold every invariant in spite of: {name}"
    assert outcome.invariant in mutation.broken, outcome.text


def test_every_invariant_has_a_defect_that_breaks_it():
    assert {invariant for mutation in MUTATIONS.values() for invariant in mutation.broken} == set(INVARIANTS)
