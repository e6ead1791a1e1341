"""Each cause from a hand-written trace: the trainer waits from 120 s to 130 s for group 1, admitted at 110 s."""

import numpy as np
import pytest

from async_rl.explain.explanation import explain
from tests.async_rl.plan.traces import A, B, background, generate, span, write_run

AT, END = 110, 130
ALONE = round((END - AT) / (A + B))  # tokens of a request without others
SHARED = round((END - AT) / (A + 61 * B))  # with 60 others
QUEUED = round((END - AT) / ((A + 6 * B) * 31 / 6))  # with 30 others; 6 are decoded at a time


def beside(count, tokens):
    """Requests of another group, during all of group 1."""
    return [span("rollout", AT, END, group=2), *(generate(AT, END, tokens=tokens, group=2) for _ in range(count))]


def held_out(count, tokens):
    """Requests of a validation, during all of group 1."""
    place = {"replica": "replica-0", "tokens": tokens, "aborted": False}
    return [span("generate", AT, END, process="worker-0", round=1, rollout=n, **place) for n in range(count)]


def slow_replica():
    """12 requests, one after the other, at a quarter of the speed."""
    each = 100 * 4 * (A + B)
    at = [each * n for n in range(12)]
    return [generate(a, a + each, tokens=100, group=0, trajectory=7, replica="replica-1") for a in at]


def dropped():
    return [span("rollout", 0, 100, group=group) for group in (3, 4, 5)]


CASES = {
    "staleness": [generate(AT, END, tokens=ALONE)],
    "engines": [generate(AT, END, tokens=SHARED), *beside(60, SHARED)],
    "slots": [generate(AT, END, tokens=QUEUED), *beside(30, QUEUED)],
    "tools": [generate(AT, 112, tokens=190), span("tool", 112, END, process="worker-0", group=1, trajectory=0)],
    "reward": [generate(AT, 112, tokens=190), span("reward", 112, END, process="worker-0", group=1, trajectory=0)],
    "teacher": [generate(AT, 112, tokens=190), span("score", 112, END, process="worker-0", group=1, trajectory=0)],
    "publish": [generate(AT, END, tokens=380), span("pause", 112, 128, process="replica-0", version=1)],
    "publish, of tools": [generate(AT, 112, tokens=190), span("pause", 112, END, process="replica-0", version=1)],
    "repeat": [generate(AT, 112, tokens=190, aborted=True), generate(112, END, tokens=190)],
    "validation": [generate(AT, END, tokens=SHARED), *held_out(60, SHARED)],
    "replica": [generate(AT, END, tokens=ALONE // 4, replica="replica-1"), *slow_replica()],
    "drops": [generate(AT, END, tokens=ALONE), *dropped()],
    "agent": [generate(AT, 112, tokens=190)],
}


PARTS = {"publish": 0.8, "engines": 0.75, "slots": 0.62, "validation": 0.75, "drops": 0.75, "replica": 0.75}
"""Cause -> its part of the wait, if it is not nearly the whole."""


def explained(directory, spans, *, start=AT, end=END, train_s=5, config=None):
    train = span("train", end, end + train_s, step=1, groups=[1])
    events = [*background(), span("rollout", start, end, group=1), span("wait", 120, end, step=1), train, *spans]
    groups = {0: "trained", 1: "trained", 3: "dropped", 4: "dropped", 5: "dropped"}
    ledger = [{"group": g, "outcome": o, "reason": "", "train_step": 0 if g == 0 else 1} for g, o in groups.items()]
    return explain(write_run(directory, events, ledger=ledger, config=config))


@pytest.mark.parametrize("cause", CASES)
def test_wait_is_divided_by_what_the_last_group_did(tmp_path, cause):
    config = {"engine": {"replicas": 1, "max_num_seqs": 6}} if cause == "slots" else {}
    found = explained(tmp_path, CASES[cause], config=config)
    assert found.limit == cause.partition(",")[0]
    assert found.seconds[found.limit] == pytest.approx(10 * PARTS.get(cause, 0.9), abs=1)
    assert sum(found.seconds.values()) == pytest.approx(15)
    assert found.seconds["train"] == pytest.approx(5)


def test_long_trajectory_is_a_tail_by_what_it_is_longer_than_nine_tenths(tmp_path):
    tokens = round(420 / (A + B))
    found = explained(tmp_path, [generate(AT, 530, tokens=tokens)], end=530)
    usual = np.quantile([1000, 2000, 3000, 4000, 5000, 6000, tokens], 0.9)
    assert found.limit == "tail"
    assert found.seconds["tail"] == pytest.approx(410 * A / (A + B) * (1 - usual / tokens), rel=0.02)


def test_wait_before_the_admission_is_of_the_publish(tmp_path):
    spans = [generate(129, END, tokens=95), span("publish", 120, 129, version=1)]
    found = explained(tmp_path, spans, start=129)
    assert found.seconds["publish"] == pytest.approx(9)
    assert sum(found.seconds.values()) == pytest.approx(15)


@pytest.mark.parametrize("cause", ["train", "export", "checkpoint"])
def test_work_of_the_trainer_is_divided_by_its_spans(tmp_path, cause):
    spans = [generate(AT, END, tokens=ALONE)]
    if cause != "train":
        spans += [span(cause, 136, 176), span(cause, 136, 176, process="trainer-0")]
    found = explained(tmp_path, spans, train_s=45 if cause == "train" else 5)
    assert found.limit == cause
    assert found.seconds[cause] == pytest.approx(45 if cause == "train" else 40)
    assert sum(found.seconds.values()) == pytest.approx(55 if cause == "train" else 56)


def test_trainer_that_waits_for_a_call_only_is_on_the_critical_path(tmp_path):
    events = background()
    for step in range(1, 5):
        at = 10 * step
        events += [span("rollout", 0, at + 0.01, group=step), span("wait", at, at + 0.01, step=step)]
        events += [span("train", at + 0.01, at + 10, step=step, groups=[step])]
    found = explain(write_run(tmp_path, events))
    assert found.limit == "train"
    assert found.savings["train"] == pytest.approx(0.5 * found.seconds["train"])
