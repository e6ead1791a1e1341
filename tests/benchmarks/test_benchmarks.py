"""The arithmetic of the benchmarks: which tokens a changed routing choice touches, intervals, budgets, tables."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.decoder import SegmentDecoder
from agent_loop.engine import SamplingConfig
from agent_loop.loop import Message, Prompt, TurnLimits
from async_rl.cluster.queue_host import QueueHost
from async_rl.config import MismatchConfig
from async_rl.inference.sglang.config import PLUGIN_PATH
from async_rl.rollout.rollouter import DroppedGroup
from async_rl.trainer.batch.training_batch import supervised_batch
from async_rl.weights.transport import WeightUpdate
from benchmarks import (
    load_checks,
    load_checks_sglang,
    queue_groups,
    queue_throughput,
    queue_ways,
    rollout_throughput,
    routing_mismatch,
    scale,
    scale_processes,
    simulated_scale,
)
from benchmarks.rollout_throughput import GROUP, Load, Rates, cpu_table, draw_budgets, rates_table, take_turns
from benchmarks.routing_mismatch import CHANGES, Stop, by_change, changed_rows, classify, ratio, summary
from benchmarks.support import Interval, Mismatch, bootstrap, find_warm_start, markdown_table, save_calculator
from benchmarks.train_steps import Taken, paired_ratio, time_in_turns, with_support
from message_queue.contract import Admission
from message_queue.policies import WaitPolicy
from message_queue.recovery import JournalPlace
from message_queue.tokens import RoutingSpec, StopReason, WeightVersion
from message_queue.trajectory import Trajectory
from tests.flow.harness import DirectHandle

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

NONE, CONTEXT, OWN = (CHANGES.index(name) for name in ("none", "context", "own"))


def test_a_set_of_experts_in_another_order_is_no_change():
    engine = np.array([[[1, 2]], [[3, 4]], [[5, 6]], [[-1, -1]]], np.int16)
    live = np.array([[[2, 1]], [[3, 5]], [[5, 6]], [[0, 7]]], np.int16)
    changed = changed_rows(engine, live)
    assert changed[:, 0].tolist() == [False, True, False, False]


def test_the_support_of_a_benchmark_holds_the_tokens_in_the_loss():
    examples = [(np.array(ids, np.int32), np.arange(len(ids)) > 0) for ids in ([5, 9], [8, 2, 7])]
    batch = with_support(supervised_batch(examples), vocab=10, kept=4)
    sequences = [batch.sequence(number) for number in range(2)]
    assert [sequence.support.unpack()[0].tolist() for sequence in sequences] == [[0, 4], [0, 4, 4]]
    for sequence in sequences:
        sequence.support.check(sequence.token_ids, vocab_size=10)


def test_a_changed_row_touches_the_next_token_itself_and_later_ones_as_context():
    changed = np.array([False, False, True, False, False])
    assert classify(changed, np.arange(5)).tolist() == [NONE, NONE, NONE, OWN, CONTEXT]


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_tokens_are_untouched_exactly_up_to_the_first_changed_row(changed):
    found = classify(np.array(changed), np.arange(len(changed))).tolist()
    first = changed.index(True) if True in changed else len(changed)
    assert all((change == NONE) == (place <= first) for place, change in enumerate(found))


def test_an_interval_holds_the_mean_and_narrows_with_more_trajectories():
    def interval(trajectories):
        values = np.random.default_rng(1).normal(size=trajectories)
        return values.mean(), Mismatch(values, np.arange(trajectories), trajectories).mean(values)

    (mean, wide), (_, narrow) = interval(20), interval(2000)
    assert wide.value == pytest.approx(mean)
    assert wide.low < wide.value < wide.high
    assert narrow.high - narrow.low < (wide.high - wide.low) / 4


def test_a_mean_counts_tokens_and_not_trajectories():
    found = Mismatch(np.zeros(4), np.array([0, 0, 0, 1]), 2)
    assert found.mean(np.array([0.0, 0.0, 0.0, 1.0])).value == 0.25
    assert found.mean(np.array([0.0, 0.0, 0.0, 1.0]), np.array([True, False, False, True])).value == 0.5


def test_draws_without_a_token_do_not_enter_the_interval():
    found = Mismatch(np.zeros(3), np.arange(3), 3)
    only = found.mean(np.array([7.0, 0.0, 0.0]), np.array([True, False, False]))
    assert only == Interval(7.0, 7.0, 7.0)


def test_bootstrap_is_a_function_of_its_seed():
    values = np.random.default_rng(0).normal(size=50)
    intervals = [bootstrap(lambda drawn: drawn @ values / 50, units=50) for _ in range(2)]
    assert intervals[0] == intervals[1]


def stop(live, replayed, change):
    places = np.arange(len(live)) // 2
    found = [Mismatch(np.array(d), places, len(live) // 2) for d in (replayed, live)]
    return Stop(3, found[0], found[1], Interval(0.5, 0.4, 0.6), np.array(change))


def test_the_ratio_of_equal_evaluations_is_one_in_every_resample():
    d = [0.1, -0.2, 0.3, 0.05]
    found = ratio(stop(d, d, [NONE] * 4))
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_tables_have_a_row_per_evaluation_and_per_class_that_occurs():
    found = stop([0.1, 1.0, 0.3, 0.0], [0.1, 0.5, 0.2, 0.0], [NONE, OWN, OWN, NONE])
    rows = summary([found]).splitlines()[2:]
    assert [row.split("|")[2].strip() for row in rows] == ["R3", "none"]
    assert "25.00%" in rows[1], "one token in four is off by more than log 2"
    classes = by_change([found]).splitlines()[2:]
    assert [row.split("|")[2].strip() for row in classes] == ["none", "own"]
    assert "50.0%" in classes[0]


def test_k3_is_exact_for_tiny_differences():
    assert Mismatch(np.array([1e-8]), np.zeros(1, np.int64), 1).k3[0] == pytest.approx(5e-17, rel=1e-3, abs=0)


@given(st.integers(1, 60), st.integers(1, 300), st.floats(0, 0.99))
def test_budgets_stay_in_their_range_and_are_equal_without_spread(requests, tokens, spread):
    budgets = draw_budgets(requests, tokens=tokens, spread=spread)
    assert len(budgets) == requests
    assert all(b >= 1 and tokens * (1 - spread) - 1 <= b <= tokens * (1 + spread) + 1 for b in budgets)
    assert set(draw_budgets(requests, tokens=tokens, spread=0.0)) == {tokens}


async def test_a_load_keeps_to_its_concurrency():
    import asyncio

    running, most = 0, 0

    async def work(_index):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 2

    load = Load(budgets=(2,) * 9 * GROUP, concurrency=4 * GROUP)
    assert await load.each(work) == 18
    assert most == 4
    most = 0
    assert await load.each_request(work) == 18 * GROUP
    assert most == 4 * GROUP


async def test_each_rollout_of_a_burst_has_the_budget_of_its_request():
    class Recorded:
        def __init__(self, budget):
            self.budget, self.sessions = budget, []

        async def run(self, _prompt, *, trajectory, session, cache_salt):
            self.sessions.append(session)

    budgets = tuple(range(2 * GROUP))
    loops = {budget: Recorded(budget) for budget in budgets}
    loop = rollout_throughput.BudgetLoop(loops, load=Load(budgets=budgets, concurrency=GROUP))
    prompt = Prompt(index=1, messages=(Message(role="user", content="?"),))
    for number in range(GROUP):
        await loop.run(prompt, trajectory=None, session=f"g17-t{number}", cache_salt="")
    assert [loops[GROUP + i].sessions for i in range(GROUP)] == [[f"g17-t{i}"] for i in range(GROUP)]


async def test_bursts_of_the_rollout_path_have_groups_and_a_version_of_their_own():
    class Rolls:
        admissions, forgotten = [], []

        async def roll(self, _prompt, admission):
            self.admissions.append(admission)
            head = DroppedGroup(group=admission.group, reason="no", segments=0, lengths=())
            return (head, None) if len(self.admissions) > 4 else (queue_groups.head_of(admission), None)

        async def forget(self, groups):
            self.forgotten += groups

    prompts = [Prompt(index=i, messages=(Message(role="user", content="?"),)) for i in range(2)]
    way = rollout_throughput.rollout_way(
        Rolls(), prompts=prompts, load=Load(budgets=(2,) * 2 * GROUP, concurrency=GROUP)
    )
    assert [await way("a"), await way("b")] == [2 * queue_groups.TOKENS] * 2
    assert [(a.group, a.prompt, a.admitted_version) for a in Rolls.admissions] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert Rolls.forgotten == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="group 4 was dropped: no"):
        await way("c")


async def test_ways_take_turns_in_changing_order_after_a_round_that_does_not_count():
    order = []

    def way(name):
        async def run(burst):
            order.append((name, burst))
            return 10

        return run

    found = await take_turns({name: way(name) for name in ("a b", "c")}, rounds=2, clock=None)
    assert [name for name, _ in order] == ["c", "a b", "a b", "c", "c", "a b"]
    assert len({burst for _, burst in order}) == 6, "a name of its own for each burst, or caches would serve it"
    assert not any(" " in burst or "#" in burst for _, burst in order)
    assert [(len(r.tokens_per_s), r.tokens) for r in found.values()] == [(2, 20), (2, 20)]


def test_ratios_are_of_the_same_round():
    rates = {
        "bare vLLM": Rates(tokens_per_s=[100.0, 200.0, 50.0]),
        "whole path": Rates(tokens_per_s=[96.0, 192.0, 48.0]),
    }
    row = rates_table(rates).splitlines()[3]
    assert "0.960" in row
    assert "met" in row
    rates["whole path"].tokens_per_s[:] = [90.0, 180.0, 45.0]
    assert "missed" in rates_table(rates)


def test_cpu_seconds_are_per_1000_tokens_and_leave_out_idle_processes():
    table = cpu_table({"whole path": Rates(tokens=4000, cpu={"driver": 2.0, "idle": 0.001})})
    assert "0.5000" in table
    assert "idle" not in table


def test_a_table_is_as_wide_as_its_cells():
    lines = markdown_table(("a", "bb"), [("long cell", "x")]).splitlines()
    assert lines[2] == "| long cell | x  |"
    assert len({len(line) for line in lines}) == 1


def test_the_newest_finished_warm_start_is_found(tmp_path: Path):
    assert find_warm_start(tmp_path / "absent") is None
    for age, name in enumerate(("newest.partial", "newer", "older")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").touch()
        os.utime(folder, (1000 - age, 1000 - age))
    (tmp_path / "empty").mkdir()
    assert find_warm_start(tmp_path) == tmp_path / "newer"


@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (routing_mismatch.parse, ["--trajectories", "1"], "--trajectories is 1; intervals need at least 2"),
        (routing_mismatch.parse, ["--updates", "-1"], "--updates is"),
        (load_checks.parse, ["--publishes", "1"], "--publishes is 1; intervals need at least 2"),
        (rollout_throughput.parse, ["--tokens", "0"], "--tokens is 0; must be >= 1"),
        (rollout_throughput.parse, ["--spread", "1"], "--spread is 1.0; must be in"),
        (rollout_throughput.parse, ["--requests", "12"], "--requests is 12; must be a multiple of 8"),
        (scale.parse, ["--in-flight", "1000"], "--in-flight is 1000; must be a multiple of 1024"),
        (scale.parse, ["--workers", "0"], "--workers is 0; must be >= 1"),
        (simulated_scale.parse, ["--trajectories", "123"], "--trajectories is 123; must be a multiple of"),
        (simulated_scale.parse, ["--worker-deaths", "32"], "--worker-deaths is 32; must be less than --workers"),
    ],
)
def test_bad_arguments_are_refused_with_the_value(parse, arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_steps_take_turns_after_a_round_that_does_not_count():
    order = []
    taken = time_in_turns({name: lambda n=name: order.append(n) for name in "abc"}, rounds=3)
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"
    assert all(len(of_one.wall) == len(of_one.cpu) == 3 for of_one in taken.values())


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=9))
def test_a_ratio_is_the_median_of_those_of_the_rounds(ratios):
    base = np.arange(1, len(ratios) + 1)
    found = paired_ratio(list(np.array(ratios) * base), list(base))
    assert found.value == pytest.approx(float(np.median(ratios)))
    assert min(ratios) * 0.999 <= found.low <= found.value <= found.high <= max(ratios) * 1.001


def test_the_table_of_load_checks_says_how_much_more_a_check_takes():
    plain, checked = Taken(wall=[0.1, 0.2], cpu=[0.04, 0.08]), Taken(wall=[0.11, 0.22], cpu=[0.05, 0.10])
    trainer = {"train": Taken([2.0], [1.0]), "hold": Taken([0.1], [0.01]), "score": Taken([0.3], [0.04])}
    _, _, publish, step = load_checks.table({"vllm": (plain, checked)}, trainer).splitlines()
    assert [cell.strip() for cell in publish.split("|")[3:5]] == ["60.00", "15.00"]
    assert "10.00% [10.00%, 10.00%]" in publish and "25.00% [25.00%, 25.00%]" in publish
    assert "20.00% [20.00%, 20.00%]" in step and "5.00% [5.00%, 5.00%]" in step


def test_the_probe_of_load_checks_ends_with_the_tokens_that_are_sampled(tmp_path):
    _, task, routing = save_calculator(tmp_path)
    batch = load_checks.probe_batch(task, routing, config=MismatchConfig(prompts=3, tokens=16))
    assert batch.num_loss_tokens.tolist() == [16, 16, 16]
    for number, length in enumerate(batch.lengths.tolist()):
        assert batch.loss_tokens(number).positions.tolist() == list(range(length - 16, length))


def test_the_plugin_of_load_checks_leaves_checksums_out_while_switched_off(tmp_path):
    folder = load_checks_sglang.plugin_folder(tmp_path)
    script = (
        "import load_checks_plugin as plugin, torch\n"
        "from async_rl_sglang import loading\n"
        "plugin.register()\n"
        "print(*loading._weights_module('checksum').model_checksums(torch.nn.Linear(1, 1)))\n"
    )
    found = []
    for on in (True, False):
        load_checks_sglang.switch(folder, on=on)
        environment = {**os.environ, "PYTHONPATH": f"{PLUGIN_PATH}:{folder}"}
        found.append(subprocess.check_output([sys.executable, "-c", script], env=environment, text=True).split())
    assert found == [["weight", "bias"], ["none"]]


@pytest.mark.parametrize("policy", ["wait", "drop"])
async def test_the_groups_of_the_cost_benchmark_all_end_and_little_is_held(policy):
    driver = queue_groups.Driver(policy=policy)
    first, later = await driver.run_to(1000), await driver.run_to(5000)
    held = (2 + queue_groups.SAVE_EVERY) * queue_groups.BATCH
    assert first.live <= held and later.live <= held
    assert max(first.state_bytes / first.live, later.state_bytes / later.live) < 200, "only live groups"


@pytest.mark.parametrize("make", [queue_ways.qwen3, queue_ways.kimi_k2])
def test_a_shape_knows_the_bytes_of_its_arrays(make):
    shape = make(300, 2)
    contents = shape.contents(0)
    arrays = queue_ways.arrays_of(contents)
    assert sum(array.nbytes for array in arrays) == shape.num_bytes
    assert [len(arrays[0]), len(arrays[1]), *arrays[2].shape] == [300, 44, 299, *shape.routing.row_shape]
    records = queue_ways.records_of(Admission(group=0, prompt=0, admitted_version=0, admitted_update=0), 1, contents[1])
    assert [record.at for record in records] == [0, queue_ways.PROMPT_TOKENS, 300]


class DirectHost:
    """A Host of the same event loop, called as an actor is."""

    def __init__(self):
        self.host, self.fetched = queue_ways.Host(), 0
        self.roll = SimpleNamespace(remote=self._roll)
        self.fetch = SimpleNamespace(remote=self._fetch)

    def _roll(self, *args):
        rolled = asyncio.ensure_future(self.host.roll(*args))
        return tuple(asyncio.ensure_future(self._part(rolled, at)) for at in range(2))

    async def _part(self, rolled, at):
        return (await rolled)[at]

    async def _fetch(self, contents):
        await self.host.fetch(contents)
        self.fetched += len(contents)


@pytest.mark.parametrize("journaled", [False, True])
async def test_the_queues_way_hands_over_all_groups_and_removes_trained_content(tmp_path, journaled):
    options = {"batch_groups": queue_ways.BATCH, "staleness": queue_throughput.NO_BOUND, "max_ready": 16}
    if journaled:
        queue = QueueHost(**options)
        await queue.open(JournalPlace(directory=tmp_path, run="benchmark"))
    else:
        queue = queue_ways.PlainQueue(**options)
    host, directory = DirectHost(), tmp_path / "content"
    end = queue_ways.RolloutEnd(directory=directory if journaled else None)
    await host.host.open("queue", end, queue_ways.qwen3(300, 2))
    way = queue_ways.QueueWay("queue", DirectHandle(queue), rollouter=host, trainer=host)
    groups = queue_ways.KEPT + 2 * queue_ways.BATCH
    await way.run(groups)
    assert (host.fetched, way._contents) == (groups, {})
    if journaled:
        await end._writer.close()
        await queue.close_journal()
        with closing(sqlite3.connect(directory / "rollout.sqlite")) as index:
            (kept,) = index.execute("SELECT COUNT(DISTINCT group_id) FROM records").fetchone()
        assert kept == queue_ways.KEPT


def test_the_ratio_of_a_way_to_itself_is_one():
    assert queue_throughput.ratio([2.0, 1.0], [2.0, 1.0]) == "1.00 [1.00 .. 1.00]"
    assert queue_throughput.ratio([1.0, 2.0], [2.0, 8.0]).startswith("3.00")


def test_every_script_finds_its_imports_when_it_is_run_by_its_path(tmp_path):
    scripts = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]
    assert len(scripts) >= 12
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_EACH, *map(str, scripts)]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]


async def test_a_lag_meter_counts_each_time_that_a_late_task_missed():
    meter = scale_processes.LagMeter()
    await asyncio.sleep(0)
    started = time.monotonic()
    while time.monotonic() < started + 20 * scale_processes.TICK_S:
        pass  # as code that keeps the event loop
    await asyncio.sleep(2 * scale_processes.TICK_S)
    samples = meter.take()
    meter._task.cancel()
    blocked = samples[(started <= samples[:, 0]) & (samples[:, 0] < started + 20 * scale_processes.TICK_S)]
    assert len(blocked) >= 19
    ends = blocked[:, 0] + blocked[:, 1]
    assert np.ptp(ends) < 1e-6, "all were late by the same run"
    assert (blocked[:, 2] <= blocked[:, 1]).all() and blocked[0, 2] > 0
    assert not len(meter.take())


def test_the_percentile_of_a_lag_is_of_what_was_due_in_the_windows():
    samples = np.array([[t, t / 1e3, 0.0] for t in range(1000)])
    assert scale_processes.percentile(samples, [(0, 100), (200, 300)], column=1) == pytest.approx(298, abs=2)
    assert np.isnan(scale_processes.percentile(samples, [(5000, 6000)], column=1))


async def test_a_scripted_replica_ends_released_groups_and_gives_aborted_ones_a_part():
    routing = RoutingSpec(layers=(0, 1), num_experts=8, top_k=2)
    replica = scale_processes.ScriptedReplica("r", routing=routing, stop_token=2, vocab_size=117, max_tokens=80)
    replica.begin(tokens=64)
    trajectories = [Trajectory(routing=routing) for _ in range(2)]
    limits = TurnLimits(max_turns=1, max_tokens=80)
    decodes = []
    for group, trajectory in enumerate(trajectories):
        trajectory.observe(np.arange(14, dtype=np.int32) + 50)
        decoder = SegmentDecoder(
            replica,
            sampling=SamplingConfig(),
            stop_token_ids=(2,),
            session=f"g{group}-t0",
            cache_salt="",
            limits=limits,
        )
        decodes.append(asyncio.create_task(decoder.decode(trajectory, max_new_tokens=limits.turn_budget(14))))
    while (await replica.stats()).in_flight < 2:  # noqa: ASYNC110 - of the gate
        await asyncio.sleep(0)
    await replica.pause()
    assert await replica.abort() == 2
    await replica.load(WeightUpdate(path=Path("x"), weights=WeightVersion(1, "0")))
    await replica.resume()
    replica.release(1)
    assert await asyncio.wait_for(decodes[0], 30) is StopReason.STOP
    assert not decodes[1].done()
    replica.release(2)
    await asyncio.wait_for(decodes[1], 30)
    for trajectory in trajectories:
        assert len(trajectory) == scale_processes.PROMPT_TOKENS + 64
        assert [segment.weights.version for segment in trajectory.segments] == [0, 1]
        assert trajectory.num_rows == len(trajectory) - 1


def test_the_tables_of_scale_compare_tokens_and_name_missed_bounds():
    sizes = [scale.Size(in_flight=1024, workers=1, tokens=tokens) for tokens in (64, 2048)]
    late = np.array([[1.0, 0.002, 0.001], [1.5, 0.08, 0.01]])
    found = [
        scale.Seen(
            cpu_s=[0.1, cpu, 9.0],
            windows=[(0.0, 2.0)],
            rss_bytes=100_000_000,
            lags={"driver": late[:1], "worker-0": lags, "idle": late[:1]},
        )
        for cpu, lags in ((0.2, late[:1]), (0.3, late))
    ]
    short, long = scale.driver_table(sizes, found).splitlines()[2:]
    assert [cell.strip() for cell in long.split("|")[4:9]] == ["300", "1.50", "100", "1.00", "<= 1.2 missed"]
    assert short.split("|")[8].strip() == ""
    met, missed = scale.lag_table(sizes, found).splitlines()[2:]
    assert "< 50 met" in met and "< 50 missed" in missed
    assert "79 (10)" in missed


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
    assert "kept" in simulated_scale.table(scenario, result)
    assert {"driver", "worker"} <= result.cpu_s.keys()


def test_the_simulated_scale_fails_if_an_invariant_is_broken_or_a_death_did_not_happen(monkeypatch):
    few = {"replicas": 4, "workers": 2, "trajectories": 200, "steps": 2, "worker_deaths": 0, "seed": 0}
    whole = simulated_scale.scenario_of(**few, replica_deaths=1)
    late = replace(whole, faults=tuple(replace(fault, at=1 << 30) for fault in whole.faults))
    assert simulated_scale.run(late).broken == "0 of 1 deaths happened; the run was too short"
    monkeypatch.setattr(WaitPolicy, "batch_ready", lambda *_args, **_kwargs: False)
    broken = simulated_scale.run(whole).broken
    assert broken is not None and broken.startswith("progress")
