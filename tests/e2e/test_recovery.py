"""Killed runs with real Ray, vLLM and megatron-core: the same command continues the run."""

import re
import time

import numpy as np
import psutil
import pytest

from async_rl.config import load_config
from tests.e2e.runs import (
    SLOW,
    SMALL,
    begins_with,
    check_prompts,
    check_records,
    check_rollouts,
    each,
    finish,
    k3_bound,
    lines,
    peek,
    pids,
    read_journal,
    start,
    tree_of,
    wait_for_step,
)
from tests.e2e.tasks import TURNS
from tests.helpers.dense import behaviour_logprobs
from tests.helpers.lanes import WHOLE_RUN

pytestmark = pytest.mark.timeout(1000)
OVERRIDES = (*SLOW, "checkpoint.every=3", "task.factory=tests.e2e.tasks:slow_task", "mismatch.verify=every_token")
RUN = load_config([*SMALL, *OVERRIDES])


@pytest.fixture(scope="module")
def warm_starts(tmp_path_factory):
    return tmp_path_factory.mktemp("warm_start")


def kill_all(process, *, when):
    """SIGKILL to the driver and every process below it, at a moment when `when()` is true; they stand still then."""
    while True:
        assert process.poll() is None, process.stdout.read()
        tree = tree_of(process)
        each(tree, psutil.Process.suspend)
        if when():
            break
        each(tree, psutil.Process.resume)
        time.sleep(0.1)
    each(tree, psutil.Process.kill)
    process.communicate()
    psutil.wait_procs(tree, timeout=20)


def in_flight(recovered, content):
    """Groups that have sampled something and have more to sample."""
    limits = RUN.rollout.limits
    whole = RUN.rollout.trajectories_per_group * TURNS * limits.max_new_tokens_per_turn
    return [a.group for a in recovered.open if 0 < content[a.group].num_tokens < whole]


def held_before(rows, partial):
    """Trained rows of groups that were under way, each with its trajectory of that time, which had sampled tokens."""
    for row in rows:
        if row["group"] in partial and row["path"] == 0:
            trajectory = partial[row["group"]].trajectories[row["trajectory"]]
            if trajectory.num_sampled:
                yield row, trajectory


def test_a_killed_run_continues_with_the_same_prompts_groups_and_tokens(tmp_path, warm_starts):
    directory, copy = tmp_path / "run", tmp_path / "copy"
    of_run = {"config": RUN, "warm_starts": warm_starts}
    process = start(directory, warm_starts, *OVERRIDES, "total_train_steps=500")
    wait_for_step(directory, 4, process)

    def busy():
        now = peek(directory, copy, **of_run)
        return now is not None and in_flight(*now) and now[0].replay

    kill_all(process, when=busy)
    recovered, held = read_journal(directory, copy, **of_run)
    partial = {group: held[group] for group in in_flight(recovered, held)}
    assert partial, "no generation was under way"
    assert recovered.replay, "nothing was trained after the checkpoint"
    before = {line["group"]: line for line in lines(directory, "ledger.jsonl")}
    replayed = max(line["train_step"] for line in lines(directory, "metrics.jsonl"))
    last = len(lines(directory, "metrics.jsonl")) + 3

    process = start(directory, warm_starts, *OVERRIDES, f"total_train_steps={last}")
    while process.poll() is None:
        time.sleep(0.1)
        found = (peek(directory, copy, **of_run) or (None, {}))[1]
        for group in partial.keys() & found.keys():
            pairs = zip(found[group].trajectories, partial[group].trajectories, strict=True)
            assert all(begins_with(f, h) for f, h in pairs), f"group {group} starts otherwise"
    output = finish(process)
    assert "goes on after train step" in output

    steps, groups = check_records(directory, steps=last, staleness=2, trained=2 * last, dropped=0)
    of_checkpoint = [s for s in steps if s["train_step"] <= replayed and s["tokens"]]
    assert all(s["old/missing_fraction"] == 0 for s in of_checkpoint), "the versions are in the checkpoint"
    rows = [row for of_step in check_rollouts(directory, steps, groups).values() for row in of_step]
    continued = [(row, h) for row, h in held_before(rows, partial) if len(row["token_ids"]) > len(h) and not h.closed]
    assert continued, "no generation under way continued"
    for row, h in continued:
        assert row["token_ids"][: len(h)] == h.token_ids().tolist()
        assert np.allclose([value or 0.0 for value in row["behaviour_logprobs"][: len(h)]], behaviour_logprobs(h))
    check_prompts(directory, step=last)
    after = {line["group"]: line for line in groups}
    again = {g for g, line in before.items() if line["outcome"] == "trained"}
    assert {g: after[g]["train_step"] for g in again} == {g: before[g]["train_step"] for g in again}


@WHOLE_RUN
def test_run_outlives_its_parts(tmp_path, warm_starts):
    keep = ("rollout.on_update=keep", "rollout.resume_routing=force", "journal.fsync=true")
    sent = "sync.route=direct"  # a version is lost with the trainer
    process = start(tmp_path, warm_starts, *OVERRIDES, *keep, sent, "rollout.workers=2", "total_train_steps=8")
    notes = (
        ("replica-0", r"replica replica-\d serves in place of replica-0"),
        ("worker-1", r"rollout worker worker-1 is lost, [1-9]\d* groups continue at another"),
        ("trainer-0", "(trainer rank 0: process died|did not come from)"),
        ("queue", "trainer and queue start anew from the last checkpoint and the journal"),
    )
    for step, (victim, _) in zip((1, 2, 4, 6), notes, strict=True):
        wait_for_step(tmp_path, step, process)
        psutil.Process(pids(tmp_path)[victim]).kill()
    output = " ".join(finish(process).split())
    for _, note in notes:
        assert re.search(note, output), output
    assert output.count("trainer and queue start anew") == 2
    check_rollouts(
        tmp_path, *check_records(tmp_path, steps=8, staleness=2, k3=k3_bound(warm_starts), trained=16, dropped=0)
    )
