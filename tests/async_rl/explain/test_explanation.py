"""Waits, staleness, files, overrides and the command."""

import json
from unittest.mock import patch

import numpy as np
import pytest

from async_rl.explain import overrides
from async_rl.explain.__main__ import main
from async_rl.explain.explanation import explain
from async_rl.plan import records
from async_rl.plan.description import Cluster, Description, Distribution, Publish, Rates, Workload
from async_rl.plan.records import RecordsError, Span
from async_rl.plan.simulation import scale_of, simulate
from message_queue.policies import StalenessConfig
from tests.async_rl.plan.traces import background, generate, span, write_run


def three_steps():
    """Groups 1, 2 with 4, and 3 are ready at 10, 30, 21 and 11 s, and taken at 10, 30 and 40 s."""
    events = [*background()]
    for step, (ready, start) in enumerate([(10, 10), (30, 30), (11, 40)], start=1):
        events += [
            span("rollout", 0, ready, group=step),
            generate(0, ready, tokens=100 * ready, group=step),
            span("train", start, start + 10, step=step, groups=[2, 4] if step == 2 else [step]),
        ]
    events += [span("rollout", 0, 21, group=4), generate(0, 21, tokens=2100, group=4)]
    return [*events, span("wait", 0, 10, step=1), span("wait", 20, 30, step=2)]


METRICS = [{"train_step": n, "step/seconds": 20, "idle/trainer": 0.5, "staleness/mean": 2} for n in (1, 2, 3)]
SCHEDULE = [
    {"train_step": n, "groups": [{"group": n, "spans": spans}]}
    for n, spans in ((1, [[[0, 100]]]), (2, [[[0, 100], [1, 100]]]), (3, [[[0, 100]]]))
]
LEDGER = [{"group": n, "outcome": "trained", "reason": None, "train_step": n} for n in (1, 2, 3)]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, three_steps(), metrics=METRICS, schedule=SCHEDULE, ledger=LEDGER)


def test_staleness_is_divided_at_the_end_of_each_group(run):
    found = explain(run).staleness
    assert found is not None
    # group 2 ends after step 1 with 100 tokens of update 0; group 3 ends before it and is taken after step 2
    assert found.before_queue == pytest.approx(100 * 1 / 400)
    assert found.in_queue == pytest.approx(100 * 2 / 400)
    assert found.in_training == 0


def test_longest_waits_name_the_group_that_the_batch_waited_for(run):
    found = explain(run)
    assert (found.in_queue[0].group, found.in_queue[0].seconds) == (3, pytest.approx(29))
    assert "busy" in found.in_queue[0].reason
    assert (found.in_queue[1].group, found.in_queue[1].seconds) == (4, pytest.approx(9))
    assert "waited for group 2" in found.in_queue[1].reason
    assert found.waited_for[0].group == 2


def test_run_that_still_writes_its_files_is_explained(tmp_path):
    write_run(tmp_path, three_steps(), metrics=METRICS, schedule=SCHEDULE, ledger=LEDGER, cut=30)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"train_step": 4, "step/sec')
    assert explain(tmp_path).steps[-1].step == 3


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_directory_without_a_run_is_an_error_that_names_the_file(run, name, capsys):
    (run / name).unlink()
    assert main([str(run)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"), [("trace.json", "[\n{\n{}\n"), ("ledger.jsonl", "[1,\n{}\n"), ("config.yaml", "{")]
)
def test_damaged_file_is_an_error_that_names_it(run, name, text):
    (run / name).write_text(text)
    with pytest.raises(RecordsError, match=name):
        explain(run)


def test_without_requests_or_without_a_trace_the_cause_of_waits_is_open(run):
    kept = [event for event in three_steps() if event["cat"] != "generate"]
    (run / "trace.json").write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in kept))
    found = explain(run)
    assert {"rollouts", "train"} <= found.seconds.keys()
    assert any("requests" in note for note in found.notes)
    (run / "trace.json").unlink()
    found = explain(run)
    assert found.seconds.keys() == {"rollouts", "train"}
    assert any("trace.json" in note for note in found.notes)


def test_command_prints_shares_and_json_that_add_up(run, capsys):
    assert main([str(run)]) == 0
    assert "steps per hour" in capsys.readouterr().out
    assert main([str(run), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert sum(values["seconds"].values()) == pytest.approx(sum(s["end"] - s["start"] for s in values["steps"]))
    assert values["limit"] in values["seconds"] and values["signal"].keys() == {
        "without_signal",
        "all_right",
        "all_wrong",
    }


SIGNAL = {"reward/groups_without_signal": 0.8125, "reward/groups_all_right": 0.7, "reward/groups_all_wrong": 0.1125}
SAID = [  # metrics of a batch, texts
    ({}, []),
    ({"throughput/train_tflops": 412.5}, ["a rank computes 412 TFLOP/s\n"]),
    ({"throughput/train_tflops": 412.5, "throughput/mfu": 0.4171}, ["412 TFLOP/s, 41.7% of its peak (MFU)\n"]),
    ({"tree/compression": 3.5}, ["shared prefixes: it computes one of 3.50 tokens"]),
    (SIGNAL, ["81% of the groups", "is wasted", "a harder task", "rollout.drop_without_spread"]),
]


@pytest.mark.parametrize(("found", "texts"), SAID)
def test_command_says_what_the_metrics_of_the_run_have(tmp_path, capsys, found, texts):
    metrics = [line | found for line in METRICS]
    write_run(tmp_path, three_steps(), metrics=metrics, schedule=SCHEDULE, ledger=LEDGER)
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert [text for text in texts if text not in shown] == []
    for topic in ("TFLOP/s", "shared prefixes", "of the groups"):
        assert (topic in shown) == (topic in " ".join(texts))


@pytest.mark.parametrize(("kind", "text"), [("expired", "staleness=wait"), ("rollouts failed", "max_retries=2")])
def test_an_override_for_drops_is_for_their_reason(tmp_path, kind, text):
    dropped = range(5, 9)
    events = [*three_steps(), *(span("rollout", 0, 30, group=group) for group in dropped)]
    ledger = [*LEDGER, *({"group": g, "outcome": "dropped", "kind": kind, "train_step": None} for g in dropped)]
    bound = {"max_staleness": 1, "policy": "drop" if kind == "expired" else "wait", "max_requeues": 3}
    write_run(tmp_path, events, metrics=METRICS, schedule=SCHEDULE, ledger=ledger, config={"staleness": bound})
    found = explain(tmp_path)
    assert found.seconds["drops"] > 0.05 * sum(found.seconds.values())
    (override,) = [each.override.text for each in found.predictions if "drops" in each.override.treats]
    assert override.endswith(text)


def long_run(directory, *, steps):
    """A run of one group a step, of a second each; the trainer waits for half of it."""
    events, at = [*background()], 100.0
    for step in range(1, steps + 1):
        group = step + 10
        events += [span("rollout", at, at + 0.5, group=group), generate(at, at + 0.5, tokens=20, group=group)]
        events += [span("wait", at, at + 0.5, step=step)]
        events += [span("train", at + 0.5, at + 1, step=step, groups=[group])]
        at += 1
    metrics = [{"train_step": n, "step/seconds": 1, "idle/trainer": 0.5} for n in range(1, steps + 1)]
    schedule = [{"train_step": n, "groups": [{"group": n + 10, "spans": [[[n - 1, 20]]]}]} for n in range(1, steps + 1)]
    ledger = [{"group": n + 10, "outcome": "trained", "reason": None, "train_step": n} for n in range(1, steps + 1)]
    return write_run(directory, events, metrics=metrics, schedule=schedule, ledger=ledger)


def test_the_work_for_a_long_run_is_that_for_its_end(tmp_path, monkeypatch):
    """10,000 steps are as much work as the last ones: lines that are read, spans that are kept, tokens simulated."""
    monkeypatch.setattr(records, "LAST_BYTES", 100_000)
    monkeypatch.setattr(records, "LAST_BATCHES", 50)
    work = []
    for steps in (2_000, 10_000):
        (tmp_path / str(steps)).mkdir()
        directory = long_run(tmp_path / str(steps), steps=steps)
        with (
            patch.object(records.json, "loads", wraps=json.loads) as loads,
            patch.object(Span, "overlap", autospec=True, side_effect=Span.overlap) as overlap,
            patch.object(overrides, "simulate", wraps=simulate) as simulated,
        ):
            found = explain(directory)
        assert (found.steps[0].step, found.steps[-1].step) == (steps - 49 + 2, steps)
        assert any(note.startswith(f"steps before {steps - 49}:") for note in found.notes)
        work.append([loads.call_count, overlap.call_count, sum(c.kwargs["steps"] for c in simulated.call_args_list)])
    short, long = np.array(work)
    assert (short > 0).all() and (long <= 1.2 * short).all()
    assert long[-1] <= (overrides.MOST_SIMULATED + 1) * overrides.STEPS


def test_a_large_batch_is_simulated_by_as_many_requests_as_a_small_one():
    seen = []
    for groups, steps in ((16, overrides.STEPS), (64, overrides.STEPS_OF_LARGE)):
        work = Workload(groups_per_batch=groups, trajectories_per_group=8, lengths=Distribution(mean=100))
        cluster, rates = Cluster(gpus=2, train_gpus=1), Rates(decode_s=0.01, decode_s_per_request=0.001)
        described = Description(
            cluster=cluster, workload=work, rates=rates, publish=Publish(), staleness=StalenessConfig(max_staleness=1)
        )
        scale = scale_of(described, replicas=1, thin_to=overrides.THIN_TO if groups > 16 else None)
        assert scale.groups * 8 <= overrides.LARGE and scale.groups * scale.groups_of == groups
        seen.append(overrides._step_s(described) / simulate(described, steps=steps).step_s)
    assert seen == pytest.approx([1, 1], rel=0.05), "equal lengths: the same seconds"
