"""The arithmetic of the benchmarks: changed rows, intervals, ratios, and the order of measurements."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat import Chat
from agent_loop.loop import TurnLimits
from agent_loop.programs.endpoint.config import EndpointConfig
from agent_loop.programs.endpoint.host import Sessions
from benchmarks import gateway, simulated_scale
from benchmarks.equal_weights import Found, changed_rows, over_r3
from benchmarks.publishes import adam_versions, change_entropy
from benchmarks.support import Interval, Mismatch, in_turns, paired_ratio, time_in_turns
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from recipes.calculator.tokenizer import END_OF_TURN

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
    found = Mismatch(np.zeros(4), np.array([0, 0, 0, 1]), 2)
    assert found.mean(np.array([0.0, 0.0, 0.0, 1.0])).value == 0.25
    assert found.mean(np.array([0.0, 0.0, 0.0, 1.0]), np.array([True, False, False, True])).value == 0.5


def test_draws_without_a_token_do_not_enter_the_interval():
    found = Mismatch(np.zeros(3), np.arange(3), 3)
    only = found.mean(np.array([7.0, 0.0, 0.0]), np.array([True, False, False]))
    assert only == Interval(7.0, 7.0, 7.0)


def test_the_mismatch_ratio_of_equal_evaluations_is_one_in_every_draw():
    same = Mismatch(np.array([0.1, -0.2, 0.3, 0.05]), np.array([0, 0, 1, 1]), 2)
    found = over_r3(Found(1, {"R2": same, "R3": same}, {}), "R2")
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_k3_is_exact_for_tiny_differences():
    assert Mismatch(np.array([1e-8]), np.zeros(1, np.int64), 1).k3[0] == pytest.approx(5e-17, rel=1e-3, abs=0)


# ---- loads


def test_an_interval_is_written_with_its_ends():
    assert f"{Interval(0.5, 0.25, 1):.2f}" == "0.50 [0.25, 1.00]"


def test_ways_take_turns_after_a_round_that_does_not_count():
    assert [*in_turns("ab", rounds=2)] == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_train_steps_take_turns_after_a_round_that_does_not_count():
    order = []
    taken = time_in_turns({name: lambda n=name: order.append(n) for name in "abc"}, rounds=3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert all(len(of_one.wall) == len(of_one.cpu) == 3 for of_one in taken.values())


def test_the_end_of_a_step_is_not_timed():
    order = []
    time_in_turns({"a": lambda: lambda: order.append("end"), "b": lambda: order.append("b")}, rounds=1)
    assert order == ["b", "end", "end", "b"]


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=9))
def test_a_paired_ratio_is_the_median_of_those_of_the_rounds(ratios):
    base = np.arange(1, len(ratios) + 1)
    found = paired_ratio(list(np.array(ratios) * base), list(base))
    assert found.value == pytest.approx(float(np.median(ratios)))
    assert min(ratios) * 0.999 <= found.low <= found.value <= found.high <= max(ratios) * 1.001


# ---- scale


@pytest.mark.parametrize("deaths", [(1, 1), (3, 0)])
def test_the_simulated_scale_keeps_every_invariant_through_deaths(deaths):
    scenario = simulated_scale.scenario_of(
        replicas=4, workers=2, trajectories=800, steps=4, replica_deaths=deaths[0], worker_deaths=deaths[1], seed=0
    )
    result = simulated_scale.run(scenario)
    assert result.broken is None
    assert result.deaths.total() == sum(deaths)
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


# ---- sessions over HTTP


class WordEngine:
    """Samples as many words as are asked for."""

    async def generate(self, request):
        n, rows = request.max_new_tokens, len(request.token_ids) + request.max_new_tokens - 1 - request.existing_rows
        experts = np.tile(np.array([0, 1], np.uint8), (rows, 3, 1))
        return [
            TokenOutput(
                token_ids=np.arange(200, 200 + n, dtype=np.int32),
                logprobs=np.full(n, -0.5, np.float32),
                routed_experts=RoutedExperts(first_position=request.existing_rows, experts=experts),
                weights=WeightVersion(0, "d"),
                stop_reason=StopReason.LENGTH,
                replica="r",
            )
        ]


async def test_gateway_ways_give_the_engine_the_same_work():
    chat = Chat(gateway.word_tokenizer(), end_of_turn=END_OF_TURN)
    engine = gateway.ForcedTurns(WordEngine(), end=chat.stop_token_ids[0])
    routing = RoutingSpec(layers=(0, 1, 2), num_experts=8, top_k=2)
    limits = TurnLimits(max_turns=3, max_tokens=gateway.MAX_TOKENS)
    session = partial(gateway.session_of, engine, chat, routing, limits)
    load = gateway.draw(chat, sessions=4, calls=3, tokens=8, seed=0)
    served = Sessions(EndpointConfig())
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client:
            ways = (partial(gateway.bare, engine), partial(gateway.over_http, session, served, client))
            for number, way in enumerate(ways):
                done = engine.work.copy()
                await way(load, f"{number}")
                assert (engine.work - done).tolist() == [*load.work]
    finally:
        await served.close()
