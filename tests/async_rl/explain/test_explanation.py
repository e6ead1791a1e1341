"""Waits, staleness, files, overrides and the command."""

import json

import pytest

from async_rl.explain.__main__ import main
from async_rl.explain.explanation import explain
from async_rl.plan.records import RecordsError
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
    assert explain(tmp_path).last_step == 3


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
    assert values["limit"] in values["seconds"]


@pytest.mark.parametrize(("reason", "text"), [("expired", "staleness=wait"), ("rollouts failed", "max_retries=2")])
def test_an_override_for_drops_is_for_their_reason(tmp_path, reason, text):
    dropped = range(5, 9)
    events = [*three_steps(), *(span("rollout", 0, 30, group=group) for group in dropped)]
    ledger = [*LEDGER, *({"group": g, "outcome": "dropped", "reason": reason, "train_step": None} for g in dropped)]
    bound = {"max_staleness": 1, "policy": "drop" if reason == "expired" else "wait", "max_requeues": 3}
    write_run(tmp_path, events, metrics=METRICS, schedule=SCHEDULE, ledger=ledger, config={"staleness": bound})
    found = explain(tmp_path)
    assert found.seconds["drops"] > 0.05 * sum(found.seconds.values())
    (override,) = [each.override.text for each in found.predictions if "drops" in each.override.treats]
    assert override.endswith(text)
