"""Metrics of a batch, what the recorder writes, the trace and the report."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.metrics.console import _Clock
from async_rl.metrics.lengths import Lengths, survival
from async_rl.metrics.recorder import Recorder, StepRecord, ValidationResult
from async_rl.metrics.registry import METRICS, batch_metrics, of_layer, staleness_histogram
from async_rl.metrics.report import draw_curves, draw_layers, read_run, write_report
from async_rl.metrics.trace import Trace
from async_rl.report import main as report
from message_queue.heads import head_of
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import PromptGroup, Trajectory

SPEC = RoutingSpec(layers=(1, 2), num_experts=4, top_k=2)


def segment(n, *, version, held, length, reason=StopReason.STOP, unavailable=0):
    rows = np.tile(np.array([0, 1], np.uint8), (length + n - 1 - held, 2, 1))
    return TokenOutput(
        token_ids=np.arange(n, dtype=np.int32),
        logprobs=np.full(n, -1.0, np.float32),
        routed_experts=RoutedExperts(first_position=held, experts=rows, unavailable=unavailable),
        weights=WeightVersion(version, "d"),
        stop_reason=reason,
        replica="r",
    )


def interrupted_trajectory():
    """Prompt 3, 2 tokens of version 4, abort, 3 tokens of version 5: T = 8."""
    trajectory = Trajectory(routing=SPEC)
    trajectory.observe(np.zeros(3, np.int32))
    trajectory.extend(segment(2, version=4, held=0, length=3, reason=StopReason.ABORT))
    trajectory.extend(segment(3, version=5, held=4, length=5))
    trajectory.close(stop_reason=StopReason.STOP, reward=1.0)
    return trajectory


def plain_trajectory():
    """Prompt 2, 2 tokens of version 5: T = 4."""
    trajectory = Trajectory(routing=SPEC)
    trajectory.observe(np.zeros(2, np.int32))
    trajectory.extend(segment(2, version=5, held=0, length=2))
    trajectory.close(stop_reason=StopReason.STOP, reward=0.0)
    return trajectory


@pytest.fixture
def groups():
    trajectories = [interrupted_trajectory(), plain_trajectory()]
    return [PromptGroup(group=0, prompt=0, admitted_version=4, admitted_update=8, trajectories=trajectories)]


UPDATES = {4: 8, 5: 10}


def test_batch_metrics_are_those_of_the_tokens(groups):
    metrics = batch_metrics([head_of(group) for group in groups], update=11, version_updates=UPDATES)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == 0.5
    assert metrics["staleness/max"] == metrics["staleness/p99"] == 3
    assert metrics["staleness/mean"] == pytest.approx((2 * 3 + 5 * 1) / 7)
    assert metrics["partial/resumed_fraction"] == 0.5
    assert metrics["partial/max_segments"] == 2
    assert metrics["routing/missing_fraction"] == 0
    assert metrics["routing/bytes_per_token"] == (7 + 3) * 2 * 2 / 12, "each row crosses once: T-1 per trajectory"
    assert set(metrics) <= set(METRICS)


def test_a_row_the_engine_could_not_give_is_missing(groups):
    trajectory = Trajectory(routing=SPEC)
    trajectory.observe(np.zeros(5, np.int32))
    trajectory.extend(segment(1, version=5, held=2, length=5, unavailable=2))
    trajectory.close(stop_reason=StopReason.STOP, reward=0.0)
    groups[0].trajectories.append(trajectory)
    assert batch_metrics([head_of(group) for group in groups], update=11, version_updates=UPDATES)[
        "routing/missing_fraction"
    ] == 2 / (7 + 3 + 5)


def closed(reward, *, reason=StopReason.STOP, info=None):
    """One token of version 5, with this end."""
    trajectory = Trajectory(routing=SPEC)
    trajectory.observe(np.zeros(2, np.int32))
    trajectory.extend(segment(1, version=5, held=0, length=2))
    trajectory.close(stop_reason=reason, reward=reward, info=info)
    return trajectory


def metrics_of(*groups):
    """Batch metrics of groups, each given by its trajectories."""
    made = [
        PromptGroup(group=i, prompt=i, admitted_version=5, admitted_update=10, trajectories=list(trajectories))
        for i, trajectories in enumerate(groups)
    ]
    return batch_metrics([head_of(group) for group in made], update=11, version_updates=UPDATES)


def test_groups_without_signal_are_those_with_one_reward():
    metrics = metrics_of(*([closed(reward) for reward in rewards] for rewards in [(1, 1), (0, 0), (0, 1), (0, 0)]))
    assert metrics["reward/groups_without_signal"] == 0.75
    assert metrics["reward/groups_all_right"] == 0.25 and metrics["reward/groups_all_wrong"] == 0.5


def test_a_group_of_one_trajectory_has_no_signal_to_lack():
    assert math.isnan(metrics_of([closed(1.0)])["reward/groups_without_signal"])


def test_cut_off_answers_and_unexecuted_calls_are_counted_apart():
    reasons = [StopReason.LENGTH, StopReason.TOOL_CALL, StopReason.STOP, StopReason.LENGTH]
    metrics = metrics_of([closed(0.0, reason=reason) for reason in reasons])
    assert metrics["rollout/cut_off_fraction"] == 0.5
    assert metrics["rollout/out_of_turns_fraction"] == 0.25


def test_info_of_trajectories_becomes_metrics_custom_keys_too(tmp_path):
    metrics = metrics_of([closed(1.0, info={"turns": 2.0, "own": np.float64(3)}), closed(0.0, info={"turns": 4.0})])
    assert metrics["info/turns"] == 3 and metrics["info/own"] == 3
    recorder = Recorder(tmp_path, console=Null(), scalars=None)
    recorder.step(StepRecord(metrics={"train_step": 1, **metrics}, staleness_tokens={}))
    recorder.close()
    assert report([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<td>info/own</td><td>3</td>" in page and "<td>info/turns</td><td>3</td>" in page


def test_info_of_a_trajectory_is_plain_numbers():
    trajectory = closed(1.0, info={"own": np.float32(3)})
    assert {key: type(value) for key, value in trajectory.info.items()} == {"own": float}
    with pytest.raises(ValueError, match="many"):
        closed(1.0, info={"own": "many"})


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_the_percentile_of_staleness_is_that_of_the_tokens(tokens):
    trajectory = Trajectory(routing=None)
    trajectory.observe(np.zeros(1, np.int32))
    for version, count in enumerate(tokens):
        trajectory.extend(replace(segment(count, version=version, held=0, length=1), routed_experts=None))
    trajectory.close(stop_reason=StopReason.STOP, reward=0.0)
    group = PromptGroup(group=0, prompt=0, admitted_version=0, admitted_update=0, trajectories=[trajectory])
    metrics = batch_metrics([head_of(group)], update=10, version_updates={0: 0, 1: 3, 2: 4, 3: 10})
    staleness = np.repeat([10, 7, 6, 0][: len(tokens)], tokens)
    assert metrics["staleness/p99"] == np.quantile(staleness, 0.99, method="higher")
    assert metrics["staleness/mean"] == pytest.approx(staleness.mean())


def test_the_histogram_counts_sampled_tokens_by_staleness(groups):
    assert staleness_histogram([head_of(group) for group in groups], update=11, version_updates=UPDATES) == {1: 5, 3: 2}


class Null:
    def step(self, record): ...
    def validation(self, train_step, result): ...
    def note(self, text): ...
    def close(self): ...


class Scalars:
    """TensorBoard's writer, as far as a recorder calls it."""

    def __init__(self):
        self.written, self.closed = [], False

    def add_scalar(self, tag, value, step):
        self.written.append((tag, value, step))

    def close(self):
        self.closed = True


def validated(success, *, failed=0):
    """A round over 8 prompts."""
    return ValidationResult(
        success_rate=success, prompts=8, failed=failed, cut_off=0, mean_tokens=9.0, min_version=1, max_version=2
    )


def record(directory, steps=3, *, scalars=None):
    recorder = Recorder(directory, console=Null(), scalars=scalars)
    for step in range(1, steps + 1):
        metrics = {"train_step": step, "reward/mean": step / 10, "mismatch/k3_lag0": math.nan, "mismatch/k3": 1e-3}
        recorder.step(StepRecord(metrics=metrics, staleness_tokens={0: 5}))
    recorder.validation(steps, validated(0.5))
    recorder.close()


def test_tensorboard_has_the_metrics_that_are_finite(tmp_path):
    scalars = Scalars()
    record(tmp_path, steps=1, scalars=scalars)
    lengths = [tag for tag, _, _ in scalars.written if tag.startswith("length/")]
    assert [entry for entry in scalars.written if entry[0] not in lengths] == [
        ("train_step", 1, 1),
        ("reward/mean", 0.1, 1),
        ("mismatch/k3", 1e-3, 1),
        ("validation/success", 0.5, 1),
    ]
    assert all(math.isfinite(value) for _, value, _ in scalars.written) and scalars.closed


def test_metrics_are_strict_json_lines_with_null_for_what_has_no_value(tmp_path):
    record(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_step"] for line in lines] == [1, 2, 3]
    assert lines[0]["mismatch/k3_lag0"] is None and lines[0]["staleness/tokens"] == {"0": 5}


def test_a_metric_without_a_reduction_is_refused():
    with pytest.raises(ValueError, match="wish"):
        StepRecord(metrics={"train_step": 1, "wish": 2.0}, staleness_tokens={})


def test_a_metric_of_a_layer_is_one_where_the_whole_model_has_it(tmp_path):
    metrics = {"train_step": 1, "routing/overlap_layer12": 0.5, "routing/overlap": 0.75}
    recorder = Recorder(tmp_path, console=Null(), scalars=None)
    recorder.step(StepRecord(metrics=metrics, staleness_tokens={}))
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["routing/overlap_layer12"] == 0.5
    with pytest.raises(ValueError, match="loss_layer12"):
        StepRecord(metrics={"train_step": 1, "loss_layer12": 2.0}, staleness_tokens={})


def test_overlapping_spans_of_a_track_get_lanes_of_their_own(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    first = trace.span("rollout", "a")
    first.__enter__()
    with trace.span("rollout", "b"), trace.span("train", "c"):
        first.__exit__(None, None, None)
        with trace.span("rollout", "d"), trace.span("rollout", "e"):
            pass
    trace.write()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {"a": "rollout 0", "b": "rollout 1", "c": "train 0", "d": "rollout 0", "e": "rollout 2"}
    assert {e["name"]: e["tid"] for e in events} == lanes, "the first lane that is free"
    assert all(e["dur"] >= 0 and e["ph"] == "X" for e in events)


def test_a_report_of_a_run_needs_nothing_else(tmp_path, capsys):
    record(tmp_path)
    assert report([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "reward/mean" in page and page.count("data:image/png;base64") == 1 and "http" not in page
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert "report.html" in capsys.readouterr().out


def record_layers(directory):
    recorder = Recorder(directory, console=Null(), scalars=None)
    for step, shift in ((1, 0.0), (2, 0.2)):
        found = {of_layer("routing/overlap", layer): 0.1 * layer + shift for layer in (11, 2, 3)}
        found[of_layer("routing/gate_mass", 2)] = math.nan
        recorder.step(StepRecord(metrics={"train_step": step, **found}, staleness_tokens={}))
    recorder.close()


def test_replay_is_drawn_by_layer_as_the_mean_over_the_run(tmp_path):
    record(tmp_path / "dense")
    record_layers(tmp_path / "moe")
    dense, moe = (read_run(tmp_path / name) for name in ("dense", "moe"))
    assert moe.by_layer("routing/overlap") == pytest.approx({2: 0.3, 3: 0.4, 11: 1.2})
    (line,) = draw_layers([moe]).axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([2, 3, 11], pytest.approx([0.3, 0.4, 1.2]))
    assert moe.by_layer("routing/gate_mass") == {} and draw_layers([dense]) is None
    write_report([dense, moe], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("<img") == 2


def test_a_report_of_nothing_says_so(tmp_path, capsys):
    assert report([str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_a_validation_in_which_every_rollout_failed_is_no_point(tmp_path):
    recorder = Recorder(tmp_path, console=Null(), scalars=None)
    for step, success in enumerate([0.25, math.nan, 0.75]):
        recorder.validation(step, validated(success, failed=8 if math.isnan(success) else 0))
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [(v["validation/success"], v["validation/failed"]) for v in lines] == [(0.25, 0), (None, 8), (0.75, 0)]
    (line,) = draw_curves([read_run(tmp_path)]).axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 2], [0.25, 0.75])


def test_a_report_of_a_run_without_validation_or_steps_is_made(tmp_path):
    Recorder(tmp_path, console=Null(), scalars=None).close()
    assert report([str(tmp_path)]) == 0
    (tmp_path / "validation.jsonl").unlink()
    assert report([str(tmp_path)]) == 0 and (tmp_path / "report.png").exists()


def test_several_runs_share_the_axes(tmp_path):
    for name in ("a", "b"):
        record(tmp_path / name)
    runs = [read_run(tmp_path / name) for name in ("a", "b")]
    assert len(draw_curves(runs).axes[1].lines) == 2


def test_the_time_left_survives_steps_that_are_done_again():
    clock = _Clock(total=9)
    left = [clock.left(StepRecord(metrics={"train_step": step}, staleness_tokens={})) for step in (4, 5, 4, 5, 6)]
    assert [text == "--:--" for text in left] == [True, False, True, False, False]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_without_given_up_ones_the_quantiles_offered_are_those_of_the_sample(lengths, share):
    longer, left = survival((n, True) for n in lengths)
    assert left[-1] == pytest.approx(0)
    assert [int(n) for n in longer] == sorted(set(lengths))
    assert left == pytest.approx([np.mean([n > at for n in lengths]) for at in longer])


def test_a_length_that_is_a_lower_bound_counts_for_what_it_says():
    told = Lengths()
    told.offered([(2, True), (4, False), (6, True)])
    metrics = told.metrics()
    assert metrics["length/offered_p50"] == 6, "of the two that got beyond 2, one is not known"
    assert metrics["length/offered_mean"] == pytest.approx(2 / 3 * 6 + 1 / 3 * 2)
    assert metrics["length/given_up_fraction"] == pytest.approx(1 / 3)
    assert math.isnan(metrics["length/trained_p50"])
