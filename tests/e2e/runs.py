"""Runs as a person makes them, `python -m async_rl.run`, and what is found in their directories, kills included."""

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

from async_rl.model_info import read_model_info
from async_rl.resume import Resume
from message_queue.journal import JournalError
from message_queue.restart import open_patiently
from message_queue.shards.holder import ContentHolder
from message_queue.wire import decode_group
from tests.conformance.reference import reference

SMALL = (
    "task.factory=tests.e2e.parity_task:parity_task",
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


def begin(directory, *overrides, output=subprocess.PIPE, **options):
    """Start a run; its output goes to `output`. options: of the process."""
    command = [sys.executable, "-m", "async_rl.run", f"output_dir={directory}", *overrides]
    return spawn(command, output=output, **options)


def spawn(command, *, output=subprocess.PIPE, **options):
    """Start a command in a process group of its own, as a terminal does."""
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )


def start(directory, warm_starts, *overrides, **options):
    """Start a small run. options: of the process."""
    return begin(directory, f"warm_start.cache={warm_starts}", *SMALL, *overrides, **options)


def finish(process, *, timeout_s=400):
    """Output of a run that ends by itself within `timeout_s`."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return output


def lines(directory, name):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


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


def wait_for_step(directory, step, process, *, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        path = directory / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= step:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    raise AssertionError(f"no step {step} within {timeout_s} s")


# ---- kills


def tree_of(process):
    """The driver and every process below it."""
    driver = psutil.Process(process.pid)
    return [driver, *driver.children(recursive=True)]


def each(processes, do):
    """Do it to each that is still there."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            do(one)


# ---- journals


def read_journal(directory, copy, *, config, checkpoint):
    """What the journal of a run holds, read from a copy: (recovered, group -> content).

    checkpoint: of the warm start. config: of the run.
    """
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("lock", "trainer", "tensorboard"))
    config = replace(config, output_dir=copy)
    place = replace(Resume(config).journal(read_model_info(checkpoint).routing), busy_s=0.0)

    return asyncio.run(_read(place) if config.queue.shards == 1 else read_shards(place, config.queue.shards))


async def _read(place):
    journal, recovered = await open_patiently(place, place.start())
    async with journal:
        groups = [g.admission.group for g in (*recovered.open, *recovered.ready)]
        return recovered, {g: await journal.read(g, routing=place.routing) for g in groups}


async def read_shards(place, shards):
    """Of a queue whose content is in processes of its own: (recovered, group -> content)."""
    holders, records = [], {}
    try:
        for shard in range(shards):
            holder = ContentHolder(place.of_shard(shard, shards=shards))
            records |= {group: held.records for group, held in (await holder.open()).groups.items()}
            holders.append(holder)
        books = place.of_books(shards=shards)
        journal, recovered = await open_patiently(books, replace(books.start(), held=records))
        await journal.close()
        content = {}
        for known in (*recovered.open, *recovered.ready):
            (data,) = await holders[known.admission.group % shards].read([known.admission])
            content[known.admission.group] = decode_group(data, routing=place.routing)
        return recovered, content
    finally:
        for holder in holders:
            await holder.close_journal()


def peek(directory, copy, *, config, checkpoint):
    """What the journal of a run that goes on holds; None where a file came or went while it was copied."""
    try:
        return read_journal(directory, copy, config=config, checkpoint=checkpoint)
    except (OSError, JournalError, ValueError, shutil.Error):
        return None


def begins_with(found, held):
    """Whether a trajectory begins with all that another one holds, its last row aside."""
    return all(f[: len(h)] == h for f, h in zip(_content(found), _content(held), strict=True))


def _content(trajectory):
    """Of each position: token, logprob, version, and row where there is one."""
    rows = trajectory.routed_experts()[: trajectory.num_rows]
    return (
        trajectory.token_ids().tolist(),
        trajectory.behaviour_logprobs().tolist(),
        trajectory.param_versions().tolist(),
        rows.tolist(),
    )
