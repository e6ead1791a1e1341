"""Time to open and to filter the page of 100,000 rollouts, measured inside the page in headless Chromium.

The rollouts are demonstrations of the calculator with values for each token, in files of 256 trajectories, and one in
50 failed. The page is written as by `python -m async_rl.view`. Goals: it opens in 2 s and filters in 200 ms.

    python benchmarks/pages.py [--trajectories 100000] [--rounds 5] [--routing-bytes 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.files.rollouts import FOLDER, FailedRollout, FailedRollouts, RecordConfig, write_step
from async_rl.metrics.viewer import write_page
from async_rl.trainer.batch.training_batch import RecordedGroups
from async_rl.trainer.recording import rollout_table
from benchmarks.recording import GROUP, head_of_group, in_groups
from benchmarks.support import save_calculator, show
from benchmarks.train_throughput import demonstrations
from tests.helpers.chromium import Page, browser

SEQUENCES = 256
FILTERS = {
    "text of the rollouts": ("text", "<answer>7"),
    "text without a match": ("text", "zebra"),
    "error": ("error", "all"),
    "least reward": ("reward_from", "1"),
    "order by reward": ("order", "-reward"),
}


def write_rollouts(directory: Path, *, trajectories: int, routing_bytes: int) -> Any:
    """Write a run's rollouts; returns the tokenizer."""
    checkpoint, task, routing = save_calculator(directory)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    batch = in_groups(demonstrations(task, routing, sequences=SEQUENCES))
    heads = {group: head_of_group(batch, group) for group in range(SEQUENCES // GROUP)}
    batch = replace(batch, recorded=RecordedGroups(train_step=0, heads=heads))
    rng = np.random.default_rng(0)
    values = {n: rng.uniform(-3, 0, (4, int(tokens))) for n, tokens in enumerate(batch.num_loss_tokens)}
    for of_sequence in values.values():
        of_sequence[2:] = np.abs(of_sequence[2:]) * [[1e-5], [0]]
    table = rollout_table(batch, values, tokenizer=tokenizer, moe_layers=routing.layers, routing_bytes=routing_bytes)
    failed = FailedRollouts(directory / FOLDER, config=RecordConfig(steps=1 << 30, trajectories=1 << 30))
    for step in range(1, trajectories // SEQUENCES + 1):
        first = step * SEQUENCES
        groups = pa.array(np.arange(SEQUENCES) // GROUP + first, pa.int64())
        prompts = pa.array([f"{text} {step}" for text in table["prompt"].to_pylist()])
        rewards = pa.array(rng.choice([0.0, 0.5, 1.0], SEQUENCES))
        of_step = table
        for name, column in (("group", groups), ("prompt", prompts), ("reward", rewards)):
            of_step = of_step.set_column(of_step.column_names.index(name), name, column)
        write_step(directory / FOLDER, of_step, train_step=step, keep=1 << 30)
        for number in range(SEQUENCES // 50):
            failed.add(
                FailedRollout(
                    group=first + SEQUENCES + number,
                    trajectory=0,
                    prompt_index=number,
                    admitted_version=step,
                    error=f"ValueError: no unit in {number} (/task.py:{number} in score)",
                    error_kind="ValueError",
                    error_line=f"/task.py:{number} in score",
                    tokens=9,
                    prompt="1+1",
                    turns=[{"text": "2", "tool_calls": [], "reply": ""}],
                ),
                train_step=step,
            )
    return tokenizer


async def measure(page: Page, url: str, *, rounds: int) -> dict[str, list[float]]:
    """Milliseconds from the start of the navigation until the page is ready and can search, and of each filter."""
    opened: list[float] = []
    prepared: list[float] = []
    filtered: dict[str, list[float]] = {name: [] for name in FILTERS}
    for _ in range(rounds):
        await page.open(url)
        opened.append(float(await page.run("document.body.dataset.ready")))
        await page.until("document.body.dataset.searchable")
        prepared.append(float(await page.run("document.body.dataset.searchable")))
        for name, (field, value) in FILTERS.items():
            for chosen in (value, "step" if field == "order" else ""):
                await page.run("delete document.body.dataset.filterMs")
                await page.run(
                    f"document.querySelector('[name={field}]').value = {json.dumps(chosen)};"
                    "document.getElementById('filters').dispatchEvent(new Event('input'))"
                )
                await page.until("document.body.dataset.filterMs")
                if chosen == value:
                    filtered[name].append(float(await page.run("document.body.dataset.filterMs")))
    assert not page.errors, page.errors
    return {"open": opened, "text search prepared": prepared, **filtered}


async def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tokenizer = write_rollouts(
            directory, trajectories=arguments.trajectories, routing_bytes=arguments.routing_bytes
        )
        path, started = directory / "rollouts.html", time.monotonic()
        write_page(directory, path, decode=lambda token: str(tokenizer.decode([token])))
        show(f"page of {path.stat().st_size / 1e6:.0f} MB, written in {time.monotonic() - started:.0f} s")
        async with browser(directory / "profile") as page:
            found = await measure(page, path.as_uri(), rounds=arguments.rounds)
            rows = await page.run("document.getElementById('count').textContent")
    show(f"{rows}; median [lowest, highest] of {arguments.rounds} rounds")
    for name, times in found.items():
        show(f"{name:<22} {statistics.median(times):7.0f} ms [{min(times):.0f}, {max(times):.0f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--routing-bytes", type=int, default=1_000_000, help="rollout.record.routing_bytes")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
