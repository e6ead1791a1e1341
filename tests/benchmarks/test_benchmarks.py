"""The arithmetic of the benchmarks: changed rows, intervals, ratios, and the order of measurements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import simulated_scale
from benchmarks.equal_weights import Found, changed_rows, over_r3
from benchmarks.publishes import adam_versions, change_entropy
from benchmarks.support import Interval, Mismatch, paired_ratio, time_in_turns

ROOT = Path(__file__).parents[2]
IMPORT_EACH = """
import runpy, sys
path = list(sys.path)
for script in sys.argv[1:]:
    runpy.run_path(script, run_name="benchmark")
    sys.path[:] = path
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]
"""


def test_every_benchmark_finds_its_imports_when_run_by_its_path(tmp_path):
    scripts = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]
    assert len(scripts) >= 12
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_EACH, *map(str, scripts)]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]


# ---- mismatch of logprobs


def test_changed_rows_are_sets_of_experts_in_any_order():
    engine = np.array([[[1, 2]], [[3, 4]], [[5, 6]], [[-1, -1]]], np.int16)
    live = np.array([[[2, 1]], [[3, 5]], [[5, 6]], [[0, 7]]], np.int16)
    assert changed_rows(engine, live)[:, 0].tolist() == [False, True, False, False]


def test_an_interval_holds_the_mean_and_narrows_with_more_trajectories():
    def interval(trajectories):
        values = np.random.default_rng(1).normal(size=trajectories)
        return values.mean(), Mismatch(values, np.arange(trajectories), trajectories).mean(values)

    (mean, wide), (_, narrow) = interval(20), interval(2000)
    assert wide.value == pytest.approx(mean)
    assert wide.low < wide.value < wide.high
    assert narrow.high - narrow.low < (wide.high - wide.low) / 4
    assert interval(20)[1] == wide, "the draws are a function of their seed"


def test_a_mismatch_mean_counts_tokens_and_not_trajectories():
    found, values = Mismatch(np.zeros(4), np.array([0, 0, 0, 1]), 2), np.array([0.0, 0.0, 0.0, 1.0])
    assert found.mean(values).value == 0.25
    assert found.mean(values, np.array([True, False, False, True])).value == 0.5
    without_other_draws = Interval(1.0, 1.0, 1.0)
    assert found.mean(values, np.array([False, False, False, True])) == without_other_draws


def test_the_mismatch_ratio_of_equal_evaluations_is_one_in_every_draw():
    same = Mismatch(np.array([0.1, -0.2, 0.3, 0.05]), np.array([0, 0, 1, 1]), 2)
    found = over_r3(Found(1, {"R2": same, "R3": same}, {}), "R2")
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_k3_is_exact_for_tiny_differences():
    assert Mismatch(np.array([1e-8]), np.zeros(1, np.int64), 1).k3[0] == pytest.approx(5e-17, rel=1e-3, abs=0)


# ---- loads


def test_train_steps_take_turns_after_a_round_that_does_not_count_and_their_ends_are_not_timed():
    order = []
    taken = time_in_turns({name: lambda n=name: order.append(n) for name in "abc"}, rounds=3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert all(len(of_one.wall) == len(of_one.cpu) == 3 for of_one in taken.values())
    order.clear()
    time_in_turns({"a": lambda: lambda: order.append("end"), "b": lambda: order.append("b")}, rounds=1)
    assert order == ["b", "end", "end", "b"]


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=9))
def test_a_paired_ratio_is_the_median_of_those_of_the_rounds(ratios):
    base = np.arange(1, len(ratios) + 1)
    found = paired_ratio(list(np.array(ratios) * base), list(base))
    assert found.value == pytest.approx(float(np.median(ratios)))
    assert min(ratios) * 0.999 <= found.low <= found.value <= found.high <= max(ratios) * 1.001


# ---- scale


def test_the_simulated_scale_keeps_every_invariant_through_deaths():
    scenario = simulated_scale.scenario_of(
        replicas=4, workers=2, trajectories=800, steps=4, replica_deaths=2, worker_deaths=1, seed=0
    )
    result = simulated_scale.run(scenario)
    assert result.broken is None
    assert result.deaths.total() == 3
    assert (result.steps, result.ledger["error"]) == (4, 0)
    assert 0 <= result.staleness <= scenario.config.staleness.max_staleness
    assert {"driver", "worker"} <= result.cpu_s.keys()


# ---- deltas


def test_the_entropy_of_a_change_counts_positions_and_steps():
    old = torch.tensor([1.0, 2.0, -0.0, 4.0] * 100, dtype=torch.bfloat16)
    same_step = old.clone()
    same_step[2::4] = 0.0
    assert change_entropy(old, old) == 0
    assert change_entropy(old, same_step) == pytest.approx(400 * (2 - 0.75 * np.log2(3)) / 8)
    two_steps = same_step.clone()
    two_steps[3::4] = 4.0 - 1 / 64
    assert change_entropy(old, two_steps) == pytest.approx((400 * 1 + 200 * 1) / 8)


def test_versions_under_adam_start_with_steps_of_the_learning_rate():
    base, first, *later = adam_versions(10_000, lr=1e-3, versions=3)
    assert len(later) == 2
    assert float((first - base).abs().mean()) == pytest.approx(1e-3, rel=0.05)
    assert float(base.double().std()) == pytest.approx(0.02, rel=0.05)
