"""Metrics of a batch, the files of the recorder and the report."""

import io
import json
import logging
import math
import re
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as Terminal

from agent_loop.user_errors import Failure
from async_rl.files.rollouts import FOLDER, write_step
from async_rl.metrics.console import _COLUMNS, LiveView, RunConsole
from async_rl.metrics.curves import draw_curves
from async_rl.metrics.lengths import Lengths, survival
from async_rl.metrics.recorder import ENDED_UNRECORDED, Recorder
from async_rl.metrics.registry import METRICS, StepRecord, batch_metrics, metric_of, of_layer, staleness_histogram
from async_rl.metrics.report import PANELS, RECENT, read_run
from async_rl.metrics.validation import ValidationResult, ValidationRollout
from async_rl.report import main as report
from message_queue.heads import head_of
from message_queue.ledger import Drop, DropKind
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup, Trajectory
from tests.helpers.groups import SPEC, routed, segment, trajectory

UPDATES = {4: 8, 5: 10}


def heads_of(*groups):
    """Heads of groups, each given by its trajectories."""
    return [
        head_of(PromptGroup(group=i, prompt=i, admitted_version=4, admitted_update=8, trajectories=list(trajectories)))
        for i, trajectories in enumerate(groups)
    ]


def metrics_of(*groups, update=11, updates=UPDATES):
    heads = heads_of(*groups)
    histogram = staleness_histogram(heads, update=update, version_updates=updates)
    return batch_metrics(heads, staleness_tokens=histogram)


def closed(reward, *, reason=StopReason.STOP, info=None):
    """A trajectory of one token of version 5."""
    made = Trajectory(routing=None)
    made.observe(np.zeros(2, np.int32))
    made.extend(segment(1, version=5))
    made.close(stop_reason=reason, reward=reward, info=info)
    return made


def test_batch_metrics_are_those_of_the_tokens():
    aborted = segment(2, version=4, rows=(0, 4), stop_reason=StopReason.ABORT)
    interrupted = trajectory(aborted, segment(3, version=5, rows=(4, 7)), prompt=3, routing=SPEC)
    plain = trajectory(segment(2, version=5, rows=(0, 3)), prompt=2, reward=0.0, routing=SPEC)
    metrics = metrics_of([interrupted, plain])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == 0.5
    assert metrics["staleness/max"] == metrics["staleness/p99"] == 3
    assert metrics["staleness/mean"] == pytest.approx((2 * 3 + 5 * 1) / 7)
    assert metrics["partial/resumed_fraction"] == 0.5
    assert metrics["partial/max_segments"] == 2
    assert metrics["routing/missing_fraction"] == 0
    assert metrics["routing/bytes_per_token"] == (7 + 3) * 2 * 2 / 12, "each row crosses once: T-1 per trajectory"
    assert set(metrics) <= set(METRICS)
    histogram = staleness_histogram(heads_of([interrupted, plain]), update=11, version_updates=UPDATES)
    assert histogram == {1: 5, 3: 2}
    late = replace(segment(1, version=5), routed_experts=routed(2, 5, unavailable=2))
    missing = metrics_of([interrupted, plain, trajectory(late, prompt=5, routing=SPEC)])["routing/missing_fraction"]
    assert missing == 2 / (7 + 3 + 5)


def test_batch_metrics_count_groups_whose_trajectories_have_one_reward():
    metrics = metrics_of(*([closed(reward) for reward in rewards] for rewards in [(1, 1), (0, 0), (0, 1), (0, 0)]))
    assert metrics["reward/groups_without_signal"] == 0.75
    assert metrics["reward/groups_all_right"] == 0.25 and metrics["reward/groups_all_wrong"] == 0.5
    assert math.isnan(metrics_of([closed(1.0)])["reward/groups_without_signal"])


def test_batch_metrics_count_cut_off_answers_and_calls_out_of_turns():
    reasons = [StopReason.LENGTH, StopReason.TOOL_CALL, StopReason.STOP, StopReason.LENGTH]
    metrics = metrics_of([closed(0.0, reason=reason) for reason in reasons])
    assert metrics["rollout/cut_off_fraction"] == 0.5
    assert metrics["rollout/out_of_turns_fraction"] == 0.25


def test_trajectory_info_is_averaged_and_shown_in_the_report(tmp_path):
    infos = {"turns": 2.0, "own": np.float32(3)}, {"turns": 4.0}
    assert type(closed(1.0, info=infos[0]).info["own"]) is float
    metrics = metrics_of([closed(1.0, info=info) for info in infos])
    assert metrics["info/turns"] == 3 and metrics["info/own"] == 3
    record_steps(tmp_path, metrics)
    data = reported(tmp_path)
    assert data["runs"][0]["steps"]["info/own"] == [3] and data["runs"][0]["steps"]["info/turns"] == [3]
    assert "Trajectory.info" in data["metrics"]["info/own"]["meaning"]
    with pytest.raises(ValueError, match="many"):
        closed(1.0, info={"own": "many"})


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_staleness_metrics_are_those_of_the_single_tokens(tokens):
    segments = [segment(count, version=version) for version, count in enumerate(tokens)]
    metrics = metrics_of([trajectory(*segments)], update=10, updates={0: 0, 1: 3, 2: 4, 3: 10})
    staleness = np.repeat([10, 7, 6, 0][: len(tokens)], tokens)
    assert metrics["staleness/p99"] == np.quantile(staleness, 0.99, method="higher")
    assert metrics["staleness/mean"] == pytest.approx(staleness.mean())


def reported(*directories):
    """Data of the page that the command writes."""
    assert report([str(directory) for directory in directories]) == 0
    page = (directories[0] / "report.html").read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


class Spy:
    """Stands for trackers."""

    def __init__(self):
        self.written, self.rows, self.closed = [], [], False

    def log(self, metrics, train_step):
        self.written += [(key, value, train_step) for key, value in metrics.items()]

    def table(self, rows, train_step):
        self.rows += [(train_step, row["response"]) for row in rows]

    def close(self):
        self.closed = True


def validated(success, *, failed=0, **more):
    """A round over 8 prompts."""
    return ValidationResult(
        success_rate=success, prompts=8, failed=failed, cut_off=0, mean_tokens=9.0, min_version=1, max_version=2, **more
    )


def record(directory, *, trackers=None):
    """A run of one step, with a validation."""
    recorder = Recorder(directory, console=None, trackers=trackers)
    metrics = {"train_step": 1, "reward/mean": 0.1, "mismatch/k3_lag0": math.nan, "mismatch/k3": 1e-3}
    recorder.step(StepRecord(metrics=metrics, staleness_tokens={0: 5}))
    said = ValidationRollout(
        reward=1.0, tokens=3, cut_off=False, error=None, prompt="2+2=", response="4", min_version=1, max_version=2
    )
    recorder.validation(1, validated(0.5, rollouts={"": [[said]]}))
    recorder.close()


def record_steps(directory, *metrics, console=None):
    """Record train steps 1, 2, ... with these metrics."""
    recorder = Recorder(directory, console=console)
    for step, values in enumerate(metrics, 1):
        recorder.step(StepRecord(metrics={"train_step": step, **values}, staleness_tokens={}))
    recorder.close()


def record_rounds(directory, *success):
    """Record validations at train steps 0, 1, ...; all rollouts of one without a success failed."""
    recorder = Recorder(directory, console=None)
    for step, value in enumerate(success):
        recorder.validation(step, validated(value, failed=8 if math.isnan(value) else 0))
    recorder.close()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_recorder_gives_trackers_metrics_and_rollouts_and_writes_strict_json_lines(tmp_path):
    spy = Spy()
    record(tmp_path, trackers=spy)
    assert {tag for tag, _, _ in spy.written} > validated(0.5).metrics().keys()
    assert [entry for entry in spy.written if not entry[0].startswith(("length/", "mismatch/"))][:3] == [
        ("train_step", 1, 1),
        ("reward/mean", 0.1, 1),
        ("validation/success", 0.5, 1),
    ]
    assert spy.rows == [(1, "4")] and spy.closed
    (line,) = lines_of(tmp_path / "metrics.jsonl")
    assert line["mismatch/k3_lag0"] is None and line["staleness/tokens"] == {"0": 5}, "null for nan"


@pytest.mark.parametrize("name", ["wish", "loss_layer12"])
def test_step_record_refuses_a_metric_without_a_reduction(name):
    with pytest.raises(ValueError, match=name):
        StepRecord(metrics={"train_step": 1, "routing/overlap_layer12": 0.5, name: 2.0}, staleness_tokens={})


def test_a_warning_that_repeats_is_shown_with_its_count(tmp_path):
    shown = []
    console = SimpleNamespace(note=lambda text, *, level: shown.append((level, text)), close=lambda: None)
    recorder = Recorder(tmp_path, console=console)
    for i in range(100):
        text = f"rollout g{i}-t1 failed: bad {chr(97 + i % 26)}"
        recorder.warn_once(Failure(kind="ValueError", line="/a/mine.py:12 in exact", text=text))
    recorder.warn_once(Failure(kind="ValueError", line="/a/mine.py:13 in exact", text="rollout g1-t1 failed: bad"))
    recorder.warn_once(Failure(kind="PromptError", line="", text="prompt 5 has 300 tokens"))
    recorder.warn_once(Failure(kind="PromptError", line="", text="prompt 6 has 301 tokens"))
    recorder.close()
    assert {level for level, _ in shown} == {logging.WARNING}
    assert [text.partition(":")[0] for _, text in shown] == [
        "rollout g0-t1 failed",
        "10 times so far",
        "100 times so far",
        "rollout g1-t1 failed",
        "prompt 5 has 300 tokens",
    ]


@pytest.mark.parametrize(
    ("shares", "warnings"), [([1.0] * 5, 1), ([1.0] * 12, 1), ([1.0] * 4, 0), ([1.0] * 3 + [0.9] + [1.0] * 4, 0)]
)
def test_batches_in_a_row_without_any_advantage_are_warned_of_once(tmp_path, shares, warnings):
    shown = []
    console = SimpleNamespace(note=lambda text, *, level: shown.append(text), step=lambda _: None, close=lambda: None)
    record_steps(tmp_path, *({"reward/groups_without_signal": share} for share in shares), console=console)
    assert len(shown) == warnings and all("5 batches in a row" in text for text in shown)


def test_report_has_replay_by_layer_as_the_mean_over_the_run(tmp_path):
    record(tmp_path / "dense")
    overlaps = [{of_layer("routing/overlap", n): 0.1 * n + shift for n in (11, 2, 3)} for shift in (0.0, 0.2)]
    record_steps(tmp_path / "moe", *(found | {of_layer("routing/gate_mass", 2): math.nan} for found in overlaps))
    dense, moe = reported(tmp_path / "dense", tmp_path / "moe")["runs"]
    assert dense["layers"] == {} and moe["layers"] == {"routing/overlap": [[2, 3, 11], [0.3, 0.4, 1.2]]}
    runs = [read_run(tmp_path / "dense")] * 2
    assert len(draw_curves(runs).axes[1].lines) == 2, "runs share the axes"


def test_report_compares_throughput_with_its_limit_and_mismatch_by_staleness(tmp_path):
    steps, metrics = RECENT + 2, []
    for step in range(1, steps + 1):
        of_step = {"step/seconds": step, "idle/trainer": 1 / step, "idle/rollout": 0.25, "throughput/tokens_per_s": 3}
        of_step |= {"tokens/lag1": step, "mismatch/k3_lag1": step, "tokens/lag3": 2, "mismatch/k3_lag3": 5.0}
        metrics.append(of_step | {"tokens/lag0": 0, "mismatch/k3_lag0": math.nan})
    record_steps(tmp_path, *metrics)
    (run,) = reported(tmp_path)["runs"]
    found = {key: values[-1] for key, values in run["steps"].items() if key.startswith("recent/")}
    seconds = sum(range(3, steps + 1))  # the trainer waited 1 in each step
    assert found["recent/throughput"] == pytest.approx(3) and found["recent/idle_replicas"] == pytest.approx(0.25)
    assert found["recent/idle_trainer"] == pytest.approx(RECENT / seconds, rel=1e-4)
    assert found["recent/limit"] == pytest.approx(3 / (1 - RECENT / seconds), rel=1e-4)
    assert run["steps"]["recent/limit"][0] is None, "the trainer only waited"
    mean = sum(step**2 for step in range(1, steps + 1)) / sum(range(1, steps + 1))
    assert run["mismatch"] == [[2, 4], [pytest.approx(mean, rel=1e-4), 5.0]]
    assert list(found)[:2] == [key for panel in PANELS if panel.title == "Throughput" for key in panel.keys]


def test_report_counts_drops_by_reason_and_names_best_and_worst_rollouts_and_changes_of_the_config(tmp_path):
    record(tmp_path)
    failed = [Drop(DropKind.ROLLOUT_FAILED, f"prompt {number}: no") for number in (1, 2)]
    lines = [("dropped", failed[0], 5), ("dropped", Drop(DropKind.EXPIRED, "x"), 1), ("dropped", failed[1], 6)]
    lines += [("dropped", ENDED_UNRECORDED, None)]
    with (tmp_path / "ledger.jsonl").open("a") as file:
        for outcome, drop, tokens in lines:
            line = {"outcome": outcome, "kind": drop.kind, "reason": str(drop), "tokens": tokens}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"outcome": "trained", "kind": None, "reason": None, "tokens": 7}) + "\n")
    rows = [(7, 0, 0.5, "stop"), (7, 1, -2.0, "stop"), (8, 0, 9.0, "error"), (8, 1, 3.5, "length")]
    columns = zip(*rows, strict=True)
    table = pa.table(dict(zip(("group", "trajectory", "reward", "stop_reason"), map(list, columns), strict=True)))
    write_step(tmp_path / FOLDER, table, train_step=4, keep=5)
    (tmp_path / "config.yaml").write_text("a: {b: 1, c: x}\nresume: auto\n")
    (tmp_path / "config-000020.yaml").write_text("a: {b: 2, c: x}\nresume: never\n")
    (run,) = reported(tmp_path)["runs"]
    assert run["drops"] == [
        {"reason": "rollout failed", "groups": 2, "tokens": 11, "last": "rollout failed: prompt 2: no"},
        {"reason": "expired", "groups": 1, "tokens": 1, "last": "expired: x"},
        {"reason": ENDED_UNRECORDED.kind, "groups": 1, "tokens": 0, "last": str(ENDED_UNRECORDED)},
    ]
    assert run["rollouts"] == [
        {"step": 4, "count": 4, "failed": 1}
        | {"best": {"group": 8, "trajectory": 1, "reward": 3.5}}
        | {"worst": {"group": 7, "trajectory": 1, "reward": -2.0}}
    ]
    assert run["config"] == {"a.b": 2, "a.c": "x", "resume": "never"}, "the newest"
    assert run["changes"] == ["config-000020.yaml: a.b: 1 -> 2"], "by a restart"


def test_every_panel_of_the_report_names_a_metric():
    known = validated(0.5).metrics().keys() | {"staleness/share"}
    keys = [key for panel in PANELS for key in panel.keys if not key.startswith(("recent/", "phase/"))]
    assert [key for key in keys if metric_of(key) is None and key not in known] == []


@pytest.mark.parametrize("success", [(-3.0, 0.5), (0.2, 4.0), (0.25, 0.75)])
def test_picture_shows_rewards_outside_of_the_unit_interval(tmp_path, success):
    record_rounds(tmp_path, *success)
    low, high = draw_curves([read_run(tmp_path)]).axes[0].get_ylim()
    assert low <= min(0, *success) and high >= max(1, *success)


def test_report_leaves_out_a_validation_whose_rollouts_all_failed(tmp_path):
    record_rounds(tmp_path, 0.25, math.nan, 0.75)
    lines = lines_of(tmp_path / "validation.jsonl")
    assert [(v["validation/success"], v["validation/failed"]) for v in lines] == [(0.25, 0), (None, 8), (0.75, 0)]
    (line,) = draw_curves([read_run(tmp_path)]).axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 2], [0.25, 0.75])


def test_report_of_a_run_without_records_is_made_and_of_no_run_refused(tmp_path, capsys):
    assert report([str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    Recorder(tmp_path, console=None).close()
    assert report([str(tmp_path)]) == 0
    (tmp_path / "validation.jsonl").unlink()
    assert report([str(tmp_path)]) == 0 and (tmp_path / "report.png").stat().st_size > 10_000
    assert "report.html" in capsys.readouterr().out


def console_of(directory, *, terminal=None):
    """A console; `terminal` is the patch of a test whose standard output is a terminal."""
    if terminal is not None:
        stdout = io.StringIO()
        terminal.setattr(stdout, "isatty", lambda: True, raising=False)
        terminal.setattr("sys.stdout", stdout)
    return RunConsole(total_train_steps=9, log=directory / "driver.log")


def test_console_shows_the_rollouts_and_the_sets_of_a_validation(tmp_path, capsys):
    console = console_of(tmp_path)
    console.validation(3, validated(0.5, failed=1))
    sets = {name: validated(success, pass_at={1: success}) for name, success in (("easy", 1.0), ("hard", math.nan))}
    console.validation(4, validated(0.25, samples=4, pass_at={1: 0.25, 4: 0.75}, sets=sets))
    console.close()
    first, second = (line for line in capsys.readouterr().out.splitlines() if "validation" in line)
    assert "success 0.500 on 7 held-out prompts, 1 failed" in first
    assert "success 0.250 pass@1 0.250 pass@4 0.750 on 32 rollouts of 8 held-out prompts" in second
    assert second.endswith("; easy: success 1.000 pass@1 1.000; hard: success - pass@1 -")


def test_console_shows_and_logs_steps_with_the_time_left_and_warnings(tmp_path, capsys):
    console = console_of(tmp_path)
    for step in (4, 5, 4, 5, 6):  # steps 4 and 5 are repeated after a restart
        console.step(StepRecord(metrics={"train_step": step}, staleness_tokens={}))
    console.note("a node left", level=logging.WARNING)
    console.close()
    *steps, warning = capsys.readouterr().out.splitlines()
    assert [line.endswith("--:--") for line in steps] == [True, False, True, False, False]
    assert warning == "warning: a node left"
    logged = [line.split(" ", 3)[2:] for line in (tmp_path / "driver.log").read_text().splitlines()]
    assert logged == [*(["INFO", line] for line in steps), ["WARNING", "a node left"]]


def drawn(view, *, width=120):
    """Text of a live view."""
    terminal = Terminal(width=width, file=io.StringIO())
    terminal.print(view._render())
    return terminal.file.getvalue()


PHASES = [
    ("Ray", "starting"),
    ("Ray", "starting"),
    ("trainer", "warm start 25/50, loss 2.5"),
    ("replicas", "starting 2 of vllm"),
    ("trainer", "warm start 25/50, loss 2.5"),
    ("trainer", "warm start 50/50, loss 1.5"),
]


def test_console_shows_each_change_of_a_phase_once_if_there_is_no_terminal(tmp_path, capsys):
    console = console_of(tmp_path)
    for phase in PHASES:
        console.phase(*phase)
    threads = threading.active_count()
    console.close()
    assert threads == threading.active_count(), "nothing repeats a line"
    changes = [f"{process}: {text}" for process, text in (PHASES[0], PHASES[2], PHASES[3], PHASES[5])]
    assert capsys.readouterr().out.splitlines() == changes
    assert [line.split(" ", 3)[3] for line in (tmp_path / "driver.log").read_text().splitlines()] == changes


def test_console_shows_all_phases_in_one_line_that_lives_at_a_terminal(tmp_path, monkeypatch):
    console = console_of(tmp_path, terminal=monkeypatch)
    for phase in PHASES:
        console.phase(*phase)
    before = drawn(console._view)
    console.step(StepRecord(metrics={"train_step": 1}, staleness_tokens={}))
    after = drawn(console._view)
    console.close()
    line = "Ray: starting  trainer: warm start 50/50, loss 1.5  replicas: starting 2 of vllm  0 s"
    assert line in before and "trainer:" not in after
    assert "INFO trainer: warm start 25/50" in (tmp_path / "driver.log").read_text()


def test_console_shows_throughput_and_idle_shares_over_the_last_batches(tmp_path, capsys):
    console = console_of(tmp_path)
    for step, rate in ((1, 100.0), (2, 100 / 3)):
        metrics = {"train_step": step, "throughput/tokens_per_s": rate, "idle/trainer": step / 4, "idle/rollout": 0.0}
        console.step(StepRecord(metrics=metrics, staleness_tokens={0: 60, 1: 40}))
    console.close()
    last = capsys.readouterr().out.splitlines()[-1]
    assert "tok/s 50 " in last and "idle train 44%" in last, "(0.25 * 1 s + 0.5 * 3 s) / 4 s"


@pytest.mark.parametrize("lives", [False, True])
def test_console_has_the_share_of_the_peak_once_a_step_has_it(lives, tmp_path, capsys, monkeypatch):
    console = console_of(tmp_path, terminal=monkeypatch if lives else None)
    for step, mfu in ((1, {}), (2, {"throughput/mfu": 0.414})):
        console.step(StepRecord(metrics={"train_step": step, **mfu}, staleness_tokens={}))
    shown = drawn(console._view) if lives else capsys.readouterr().out
    console.close()
    assert re.search(r"mfu\s", shown) and "41%" in shown and shown.count("mfu") == 1


@pytest.mark.filterwarnings("default")
def test_warnings_of_libraries_go_to_the_log_only(tmp_path, capsys):
    console = console_of(tmp_path)
    warnings.warn("an option is deprecated", stacklevel=1)
    console.close()
    shown = capsys.readouterr()
    assert "deprecated" not in shown.out + shown.err and "deprecated" in (tmp_path / "driver.log").read_text()


def test_live_view_shows_progress_warning_and_status():
    view = LiveView(total=60, log=Path("driver.log"))
    view.set_status("starting Ray")
    assert "starting Ray" in drawn(view)
    view.add({"idle train": "12%"}, step=12, left="03:00")
    view.footer = "validation at step 10"
    view.set_status("")
    for text in ("rank 0 is slow", "replica-0 died\nthe end of its log"):
        view.warn(text)
    shown = drawn(view)
    view.close()
    assert "starting Ray" not in shown
    for part in ("idle", "validation at step 10", "step 12/60", "left 03:00", "last of 2 warnings", "replica-0 died"):
        assert part in shown
    assert "the end of its log" not in shown and "rank 0" not in shown


def test_live_view_cuts_no_number_and_shows_a_long_warning_in_80_columns():
    view = LiveView(total=1000, log=Path("outputs/calculator/logs/driver.log"))
    cells = ["1000", "-0.305", *["100%"] * 2, "-10.01", "10.23", "1e-05", "100%", "128", *["100%"] * 2, "123456", "45%"]
    view.add(dict(zip((title for title, _, _ in _COLUMNS), cells, strict=True)), step=1000, left="600:00")
    view.warn("rollout g12-t3 failed: " + "ValueError: no number in the answer " * 3 + "(/a/mine.py:12 in exact)")
    shown = drawn(view, width=80)
    view.close()
    assert "\u2026" not in shown
    assert all(cell in shown.split() for cell in cells)
    assert "1 warning (all in" in shown and "/a/mine.py:12" in " ".join(shown.split())


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_survival_of_finished_trajectories_is_that_of_the_sample(lengths):
    longer, left = survival((n, True) for n in lengths)
    assert left[-1] == pytest.approx(0)
    assert [int(n) for n in longer] == sorted(set(lengths))
    assert left == pytest.approx([np.mean([n > at for n in lengths]) for at in longer])


def test_lengths_count_a_trajectory_that_was_given_up_as_a_lower_bound():
    lengths = Lengths()
    lengths.offered([(2, True), (4, False), (6, True)])
    metrics = lengths.metrics()
    assert metrics["length/offered_p50"] == 6, "one of the two lengths beyond 2 is not known"
    assert metrics["length/offered_mean"] == pytest.approx(2 / 3 * 6 + 1 / 3 * 2)
    assert metrics["length/given_up_fraction"] == pytest.approx(1 / 3)
    assert math.isnan(metrics["length/trained_p50"])
