"""Report of a broken seed: the invariant, the fewest faults, the command, the trace."""

import re

import pytest

from async_rl.simulate import main
from async_rl.simulator import outcome as outcome_module
from async_rl.simulator.outcome import run_seed, shrink
from tests.simulator.mutations import MUTATIONS


@pytest.fixture
def failed(monkeypatch):
    MUTATIONS["QueueAnswersBeforeItWrites"].plant(monkeypatch)
    return next(o for seed in range(1000) if (o := run_seed(seed)).invariant and len(o.fired) > 1)


def test_faults_that_do_not_matter_are_left_out(failed):
    fewest = shrink(failed)
    assert fewest.invariant == failed.invariant
    assert 0 < len(fewest.fired) < len(failed.fired)


def test_a_broken_seed_is_reported_with_the_command_that_replays_it(failed, capsys):
    assert main(["--seeds", "1", "--start", str(failed.seed)]) == 1
    shown = capsys.readouterr().out
    assert f"  {failed.invariant}: broken by 1" in shown and f"seed {failed.seed}: trace" in shown
    command = re.search(r"python -m async_rl.simulate (--seed .*)", shown).group(1)
    assert main(command.split()) == 1
    assert f"broken: {failed.invariant}" in capsys.readouterr().out


def test_a_seed_that_is_well_cannot_be_shrunk():
    with pytest.raises(ValueError, match="seed 0"):
        shrink(run_seed(0))


def test_a_seed_that_fails_the_simulation_itself_is_named(monkeypatch):
    def run_scenario(scenario):
        raise ZeroDivisionError

    monkeypatch.setattr(outcome_module, "run_scenario", run_scenario)
    with pytest.raises(ZeroDivisionError) as caught:
        run_seed(7)
    assert caught.value.__notes__ == ["the simulation of seed 7 itself failed"]
