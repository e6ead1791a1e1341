"""Random schedules with faults hold every invariant, and a seed means the same run everywhere."""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.simulate import main, run_seeds
from async_rl.simulator.outcome import run_scenario, run_seed
from async_rl.simulator.scenario import KINDS, Fault, draw_scenario

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 1400), marks=pytest.mark.nightly)], ids=len)
def test_every_invariant_holds_under_faults(seeds):
    outcomes = list(run_seeds(seeds, jobs=2))
    failed = [(outcome.command, outcome.text) for outcome in outcomes if outcome.invariant]
    assert not failed, failed[:5]
    happened = {fault.kind for outcome in outcomes for fault in outcome.fired}
    assert happened == set(KINDS), f"these never happened: {set(KINDS) - happened}"


def test_a_seed_gives_the_same_trace_in_every_process():
    here = [run_seed(seed).trace_hash for seed in range(10)]
    assert len(set(here)) == 10
    code = "from async_rl.simulator.outcome import run_seed; print([run_seed(seed).trace_hash for seed in range(10)])"
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == f"{here}\n"


def test_run_without_faults_starts_once_and_keeps_all_groups():
    for seed in range(8):
        world = run_scenario(draw_scenario(seed, faults=False))
        assert world.violation is None and not world.fired
        assert [what for _, who, what, _ in world.events if who == "world"] == ["start", "ended"]


def test_simulate_command_reports_seeds_that_hold(capsys, monkeypatch):
    monkeypatch.setattr("async_rl.simulate.PROGRESS", 2)
    assert main(["--seed", "0", "--trace"]) == 0
    assert "replica-0" in capsys.readouterr().out
    assert main(["--seeds", "4", "--start", "3", "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    progress = [line for line in lines if line.endswith("failed")]
    assert progress == ["2 of 4 seeds, 0 failed", "4 of 4 seeds, 0 failed"]
    assert "4 of 4 seeds held every invariant" in lines


@pytest.mark.parametrize("argv", [["--seeds", "0"], ["--trace"], ["--faults", "1"]])
def test_simulate_command_refuses_arguments_without_a_meaning(argv):
    with pytest.raises(SystemExit, match="2"):
        main(argv)


@pytest.mark.parametrize("at", [2, 3, 4, 5, 20])
def test_driver_that_dies_early_leaves_no_unstarted_coroutine(at):
    fault = Fault(0, "turn/driver", at, "driver dies", 0.0)
    world = run_scenario(replace(draw_scenario(0, faults=False), faults=(fault,)))
    assert world.fired and world.violation is None
    del world
    gc.collect()  # pytest makes an error of what would be warned of
