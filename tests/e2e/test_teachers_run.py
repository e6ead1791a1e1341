"""Runs with frozen teachers on real engines: both kinds of terms, kills, two teachers, and one that always fails."""

import json
import re

import numpy as np
import psutil
import pytest

from async_rl.config import ConfigError, load_config
from async_rl.controller.preflight import check_run
from recipes.calculator.model import TinyModelConfig, save_initial_checkpoint
from recipes.calculator.tokenizer import build_tokenizer
from tests.e2e.runs import (
    SMALL,
    check_records,
    check_rollouts,
    complete,
    each,
    finish,
    lines,
    pids,
    start,
    tree_of,
    wait_for_step,
)
from tests.helpers.lanes import WHOLE_RUN

pytestmark = [pytest.mark.timeout(1000), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TAUGHT = ("validation.prompts=0", "staleness.max_staleness=2", "optimizer.lr=3e-3", "loss=tis")
ALONE = ("distillation.rewards=false", "rollout.trajectories_per_group=1", "rollout.groups_per_batch=8")


@pytest.fixture(scope="module")
def warm_starts(tmp_path_factory):
    return tmp_path_factory.mktemp("warm_start")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another random model with the student's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    save_initial_checkpoint(folder, tokenizer=build_tokenizer(), seed=5, config=TinyModelConfig())
    return folder


def of_steps(steps, key):
    return [step[key] for step in steps]


@WHOLE_RUN
@pytest.mark.parametrize(("kl", "measured"), [("reverse", "kl_sampled"), ("forward", "kl_forward")])
def test_a_student_comes_nearer_to_its_teacher_also_after_a_kill(tmp_path, warm_starts, teacher, kl, measured):
    overrides = (*TAUGHT, *ALONE, f"teachers.math.checkpoint={teacher}", f"distillation.kl={kl}", "checkpoint.every=3")
    process = start(tmp_path, warm_starts, *overrides, "total_train_steps=500")
    wait_for_step(tmp_path, 5, process)
    tree = tree_of(process)
    each(tree, psutil.Process.suspend)
    each(tree, psutil.Process.kill)
    process.communicate()
    psutil.wait_procs(tree, timeout=20)
    assert "goes on after train step" in complete(tmp_path, warm_starts, *overrides, "total_train_steps=12")
    steps, _ = check_records(tmp_path, steps=12, staleness=2, dropped=0)
    assert all(share == 1 for share in of_steps(steps, "teacher/scored_fraction")), "also of groups of the journal"
    found = of_steps(steps, f"teacher/{measured}")
    assert np.mean(found[-3:]) < 0.8 * np.mean(found[:2]), found
    if kl == "forward":
        assert min(found) > 0 and min(of_steps(steps, "teacher/kl_reverse")) > 0


@WHOLE_RUN
def test_a_teacher_that_is_killed_is_restarted_and_no_rollout_fails(tmp_path, warm_starts, teacher):
    process = start(
        tmp_path,
        warm_starts,
        *TAUGHT,
        f"teachers.math.checkpoint={teacher}",
        "rollout.workers=2",
        "total_train_steps=8",
    )
    wait_for_step(tmp_path, 2, process)
    psutil.Process(pids(tmp_path)["teacher-math-0"]).kill()
    output = " ".join(finish(process).split())
    assert "replica teacher-math-0 is lost" in output
    assert re.search(r"replica teacher-math-\d serves in place of teacher-math-0", output), output
    steps, _ = check_records(tmp_path, steps=8, staleness=2, dropped=0)
    assert all(share == 1 for share in of_steps(steps, "teacher/scored_fraction"))
    assert sum(of_steps(steps, "teacher/failures")) == 0
    spans = [line for line in (tmp_path / "trace.json").read_text().splitlines() if '"cat":"score"' in line]
    assert all(json.loads(line.rstrip(","))["args"]["teacher"] == "math" for line in spans) and len(spans) >= 8 * 16


@WHOLE_RUN
def test_a_teacher_that_always_fails_ends_the_run_with_its_cause(tmp_path, warm_starts, teacher):
    output = complete(
        tmp_path,
        warm_starts,
        *TAUGHT,
        f"teachers.math.checkpoint={teacher}",
        "teachers.math.timeout_s=0.0001",
        "rollout.max_failed_groups=3",
        "total_train_steps=4",
        code=1,
    )
    assert "3 groups in a row failed (rollout.max_failed_groups)" in output
    assert "teacher math failed 3 times (teachers.math.tries)" in output and "teachers.math.timeout_s=0.0001" in output
    *groups, total = lines(tmp_path, "ledger.jsonl")
    assert {group["kind"] for group in groups if group["outcome"] == "dropped"} == {"teacher failed"}
    assert total["error"] == 0


@WHOLE_RUN
def test_each_of_two_teachers_scores_the_prompts_of_its_own(tmp_path, warm_starts, teacher):
    """Prompts in turn of the one teacher, the other, and none."""
    complete(
        tmp_path,
        warm_starts,
        *TAUGHT,
        "task.factory=tests.e2e.tasks:taught_task",
        f"teachers.even.checkpoint={teacher}",
        f"teachers.odd.checkpoint={teacher}",
        "total_train_steps=6",
    )
    steps, ledger = check_records(tmp_path, steps=6, staleness=2, dropped=0)
    rows = [row for of_step in check_rollouts(tmp_path, steps, ledger).values() for row in of_step]
    assert 0 < np.mean(of_steps(steps, "teacher/scored_fraction")) < 1, "a third of the prompts has none"
    spans = [line for line in (tmp_path / "trace.json").read_text().splitlines() if '"cat":"score"' in line]
    asked = [json.loads(line.rstrip(","))["args"] for line in spans]
    asked_of = {span["group"]: span["teacher"] for span in asked}
    named = {row["group"]: ("even", "odd", "")[row["prompt_index"] % 3] for row in rows}
    assert {asked_of.get(group, "") for group in named} == {"even", "odd", ""}
    assert {group: asked_of.get(group, "") for group in named} == named


def test_a_teacher_with_other_tokens_is_refused_before_the_start(tmp_path, teacher):
    other = tmp_path / "other"
    tokenizer = build_tokenizer()
    save_initial_checkpoint(other, tokenizer=tokenizer, seed=5, config=TinyModelConfig())
    table = json.loads((other / "tokenizer.json").read_text())
    vocab = table["model"]["vocab"]
    vocab["7"], vocab["8"] = vocab["8"], vocab["7"]
    (other / "tokenizer.json").write_text(json.dumps(table))
    config = load_config([f"output_dir={tmp_path / 'run'}", *SMALL, f"teachers.math.checkpoint={other}"])
    with pytest.raises(ConfigError) as refused:
        check_run(config)
    text = str(refused.value)
    assert "teachers.math.checkpoint" in text and str(other) in text and "'7'" in text
    check_run(load_config([f"output_dir={tmp_path / 'run'}", *SMALL, f"teachers.math.checkpoint={teacher}"]))


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("distillation.kl=forward", "distillation.top_k=117"), "distillation.top_k"),
        (("teachers.math.engine.max_model_len=4096", "rollout.limits.max_tokens=96"), "teachers.math"),
        (("teachers.math.checkpoint=/nowhere",), "teachers.math.checkpoint"),
        (("task.factory=tests.e2e.tasks:taught_task",), "prompt 0 names the teacher 'even'"),
    ],
)
def test_a_teacher_that_cannot_score_is_refused_before_the_start(tmp_path, teacher, overrides, field):
    given = [f"output_dir={tmp_path}", *SMALL, f"teachers.math.checkpoint={teacher}", *overrides]
    with pytest.raises(ConfigError, match=re.escape(field)):
        check_run(load_config(given))
