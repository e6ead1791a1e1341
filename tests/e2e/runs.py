"""Runs as a user makes them, `python -m async_rl.run`, and checks of their directories, also after kills."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from async_rl.controller.resume import Resume
from async_rl.files.rollouts import read_steps
from async_rl.rollout.group_contents import read_content
from async_rl.weights.model_info import read_model_info
from message_queue.errors import JournalError, QueueError
from message_queue.policies import build_policy
from message_queue.recovery import open_queue
from tests.conformance.reference import reference
from tests.helpers.dense import behaviour_logprobs, param_versions

SMALL = (
    "task.factory=tests.e2e.tasks:parity_task",
    "task.options={}",
    "rollout.groups_per_batch=4",
    "rollout.trajectories_per_group=4",
    "rollout.limits.max_tokens=96",
    "warm_start.steps=2",
    "warm_start.batch=8",
    "validation.every=0",
    "validation.prompts=8",
    "cluster.stop_timeout_s=10",
)
SLOW = (  # for the tasks of slow turns
    "rollout.groups_per_batch=2",
    "rollout.limits.max_tokens=160",
    "rollout.limits.max_new_tokens_per_turn=24",
    "staleness.max_staleness=2",
    "validation.prompts=0",
)


def begin(directory, *overrides, output=subprocess.PIPE, **options):
    """Start a run; its output goes to `output`. options: of the process."""
    command = [sys.executable, "-m", "async_rl.run", f"output_dir={directory}", *overrides]
    return spawn(command, output=output, **options)


def spawn(command, *, output=subprocess.PIPE, **options):
    """Start a command in a separate process group, as a terminal does."""
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )


def start(directory, warm_starts, *overrides, **options):
    """Start a small run. options: of the process."""
    return begin(directory, f"warm_start.cache={warm_starts}", *SMALL, *overrides, **options)


def finish(process, *, code=0, timeout_s=800):
    """Output of a run that ends by itself with the exit status `code`; a run that does not end is killed, and shown."""
    try:
        output = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        each(tree_of(process), lambda one: one.kill())
        output = process.communicate()[0]
        raise AssertionError(f"the run did not end within {timeout_s} s; its output:\n{output}") from None
    assert process.returncode == code, output
    return output


def complete(directory, warm_starts, *overrides, code=0, **options):
    """Output of a small run that ends by itself. options: of the process."""
    return finish(start(directory, warm_starts, *overrides, **options), code=code)


def python(*arguments, code=0, **options):
    """`python ARGUMENTS`, ended with the exit status `code`, with its output. options: of the process."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, **options)
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def lines(directory, name):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def check_records(directory, *, steps, staleness, k3=None, **ledger):
    """Steps and groups are recorded once, and each step keeps the promises of its metrics; returns (steps, groups).

    k3: bound on the mismatch. ledger: expected numbers of its last line.
    """
    found = lines(directory, "metrics.jsonl")
    assert [s["train_step"] for s in found] == list(range(1, steps + 1))
    versions = [s["param_version"] for s in found]
    assert versions == sorted(versions)
    for s in found:
        assert s["ledger/error"] == s["ledger/token_error"] == s["routing/missing_fraction"] == 0
        assert s["staleness/max"] <= staleness
        mismatches = [s["mismatch/k3_lag0"], s["mismatch/k3_probe"]]
        assert k3 is None or all(value is None or value <= k3 for value in mismatches)
    *groups, total = lines(directory, "ledger.jsonl")
    assert {name: total[name] for name in ("error", *ledger)} == {"error": 0, **ledger}
    assert sorted(group["group"] for group in groups) == list(range(total["admitted"]))
    return found, groups


def check_rollouts(directory, steps, groups):
    """Each step has one file of whole groups, whose rows agree with the metrics and the ledger if all are recorded.

    steps, groups: of `check_records`. Returns train step -> rows.
    """
    files = {step: table.to_pylist() for step, table in read_steps(directory / "rollouts")}
    assert list(files) == [step["train_step"] for step in steps]
    assert not list(directory.glob("rollouts/*.partial"))
    for step in steps:
        rows = files[step["train_step"]]
        assert {row["train_step"] for row in rows} == {step["train_step"]}
        trained = {g["group"] for g in groups if g["outcome"] == "trained" and g["train_step"] == step["train_step"]}
        assert {row["group"] for row in rows} == trained
        rewards = [row["reward"] for row in rows if row["path"] == 0]  # other rows are paths of the same rollouts
        assert np.isclose(np.mean(rewards), step["reward/mean"])
        pairs = [
            (behaviour, current)
            for row in rows
            for behaviour, current, effect in zip(
                row["behaviour_logprobs"], row["logprobs"], row["effect"], strict=True
            )
            if effect not in (None, "too_old", "no_spread", "untrained")
        ]
        assert len(pairs) == step["tokens"]
        difference = [behaviour - current for behaviour, current in pairs]
        assert not pairs or np.isclose(np.mean(difference), step["mismatch/k1"], rtol=1e-3, atol=1e-7)
        shares = [share for row in rows for share in row["gradient_share"] if share is not None]
        assert len(shares) == len(pairs) and (not pairs or np.isclose(sum(shares), step["optimizer_steps"], rtol=1e-4))
    return files


def check_prompts(directory, *, step):
    """Each prompt was admitted once, by the checkpoint of the last step."""
    state = json.loads((directory / f"checkpoints/step-{step:06d}/run.json").read_text())["state"]
    total = lines(directory, "ledger.jsonl")[-1]
    prompts = [admission["prompt"] for admission in state["queue"]["unfinished"]]
    assert state["prompt_cursor"] == total["admitted"]
    assert len(set(prompts)) == len(prompts) == total["open"]


def pids(directory):
    """Name -> process id of the parts of a run, dead ones included."""
    path = directory / "processes.json"
    return json.loads(path.read_text() or "{}") if path.exists() else {}


def k3_bound(warm_starts):
    """Of tokens that engine and trainer give the same weights: k3 is d^2 / 2 + ..., both are float32.

    One wrong row of routing changes a logprob by 4e-2 and more.
    """
    (checkpoint,) = (path.parent for path in warm_starts.glob("*/config.json"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    token_ids = np.random.default_rng(0).integers(3, model.config.vocab_size, 96).astype(np.int32)
    drift = 2 * reference(model, token_ids).logprob_bound
    assert drift < 4e-3
    return drift**2


def until(ready, process, *, what, timeout_s=300):
    """Value of `ready()` as soon as it is true; the run must not end before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := ready():
            return found
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {timeout_s} s")


def wait_for_step(directory, step, process):
    path = directory / "metrics.jsonl"
    until(lambda: path.exists() and len(path.read_text().splitlines()) >= step, process, what=f"step {step}")


# ---- kills


def tree_of(process):
    """The driver and every process below it."""
    driver = psutil.Process(process.pid)
    return [driver, *driver.children(recursive=True)]


def each(processes, do):
    """Apply `do` to each process that still runs."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            do(one)


# ---- journals


def read_journal(directory, copy, *, config, warm_starts):
    """The groups in flight of a run with this config, read from a copy: (Restored, group -> content)."""
    (model,) = warm_starts.glob("*/config.json")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*.lock", "*.partial", "tensorboard"))
    config = replace(config, output_dir=copy)
    return asyncio.run(_read(config, routing=read_model_info(model.parent).routing))


async def _read(config, *, routing):
    resume = Resume(config)
    _, journal, restored = await open_queue(
        replace(resume.journal(), busy_s=0.0),
        policy=build_policy(
            config.staleness,
            batch_groups=config.rollout.groups_per_batch,
            updates_per_batch=config.trainer.updates_per_batch,
        ),
        max_ready=config.queue.max_ready,
    )
    await journal.close()
    stored = await read_content(resume.content(routing), restored)
    if stored.incomplete or stored.notes or restored.notes:
        raise ValueError(f"groups {stored.incomplete} miss content; {stored.notes} {restored.notes}")
    return restored, stored.groups


def peek(directory, copy, **run):
    """As `read_journal`, of a living run; None if files changed while they were copied, or are not there yet."""
    try:
        return read_journal(directory, copy, **run)
    except (OSError, JournalError, QueueError, ValueError, KeyError, shutil.Error):
        return None


def begins_with(found, held):
    """Whether a trajectory starts with the whole content of another one, its last row aside."""
    return all(f[: len(h)] == h for f, h in zip(_content(found), _content(held), strict=True))


def _content(trajectory):
    """Of each position: token, logprob, version, and its row if it has one."""
    rows = trajectory.sequences()[-1].routed_experts[: trajectory.num_rows]
    return (
        trajectory.token_ids().tolist(),
        behaviour_logprobs(trajectory).tolist(),
        param_versions(trajectory).tolist(),
        rows.tolist(),
    )
