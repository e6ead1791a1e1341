"""Killed runs with real Ray, vLLM and megatron-core: the same command continues the run."""

import re
import time

import psutil
import pytest

from async_rl.config import load_config
from tests.e2e.runs import (
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
from tests.helpers.lanes import WHOLE_RUN

pytestmark = pytest.mark.timeout(1000)
OVERRIDES = (
    "checkpoint.every=3",
    "staleness.max_staleness=2",
    "task.factory=tests.e2e.tasks:slow_task",
    "rollout.groups_per_batch=2",
    "rollout.limits.max_tokens=160",
    "rollout.limits.max_new_tokens_per_turn=24",
    "validation.prompts=0",
)
RUN = load_config([*SMALL, *OVERRIDES])


@pytest.fixture(scope="module")
def warm_starts(tmp_path_factory):
    return tmp_path_factory.mktemp("warm_start")


def kill_all(process, *, when):
    """SIGKILL to the driver and every process below it, at a moment when `when()` is true; they stand still then."""
    while True:
        assert process.poll() is None, finish(process)
        tree = tree_of(process)
        each(tree, psutil.Process.suspend)
        if when():
            break
        each(tree, psutil.Process.resume)
        time.sleep(0.1)
    each(tree, psutil.Process.kill)
    process.communicate()
    psutil.wait_procs(tree, timeout=20)


def journal(read, directory, warm_starts, copy):
    (model,) = warm_starts.glob("*/config.json")
    return read(directory, copy, config=RUN, checkpoint=model.parent)


def in_flight(recovered, content):
    """Groups that have sampled something and have more to sample."""
    limits = RUN.rollout.limits
    whole = RUN.rollout.trajectories_per_group * TURNS * limits.max_new_tokens_per_turn
    return [a.group for a in recovered.open if 0 < content[a.group].num_tokens < whole]


def test_a_killed_run_continues_with_the_same_prompts_groups_and_tokens(tmp_path, warm_starts):
    directory, copy = tmp_path / "run", tmp_path / "copy"
    process = start(directory, warm_starts, *OVERRIDES, "total_train_steps=500")
    wait_for_step(directory, 4, process)

    def busy():
        now = journal(peek, directory, warm_starts, copy)
        return now is not None and in_flight(*now) and now[0].replay

    kill_all(process, when=busy)
    recovered, held = journal(read_journal, directory, warm_starts, copy)
    partial = {group: held[group] for group in in_flight(recovered, held)}
    assert partial, "no generation was under way"
    assert recovered.replay, "nothing was trained after the checkpoint"
    before = {line["group"]: line for line in lines(directory, "ledger.jsonl")}
    last = len(lines(directory, "metrics.jsonl")) + 3

    process = start(directory, warm_starts, *OVERRIDES, f"total_train_steps={last}")
    continued = set()
    while process.poll() is None:
        time.sleep(0.1)
        found = (journal(peek, directory, warm_starts, copy) or (None, {}))[1]
        for group in partial.keys() & found.keys():
            pairs = list(zip(found[group].trajectories, partial[group].trajectories, strict=True))
            assert all(begins_with(f, h) for f, h in pairs), f"group {group} starts otherwise"
            continued |= {group for f, h in pairs if len(f) > len(h) and h.num_sampled and not h.closed}
    output = finish(process)
    assert process.returncode == 0, output
    assert "goes on after train step" in output
    assert continued, "no generation under way continued"

    steps, groups = check_records(directory, steps=last, staleness=2, trained=2 * last, dropped=0)
    check_rollouts(directory, steps, groups)
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
    assert process.returncode == 0, output
    for _, note in notes:
        assert re.search(note, output), output
    assert output.count("trainer and queue start anew") == 2
    check_rollouts(
        tmp_path, *check_records(tmp_path, steps=8, staleness=2, k3=k3_bound(warm_starts), trained=16, dropped=0)
    )
