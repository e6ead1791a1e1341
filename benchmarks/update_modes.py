"""Trainer against engine over trajectories that two weight versions sampled, for every way to take an update.

Held-out prompts of the calculator task are rolled out while the weights go from A to B (B is A after --updates
optimizer updates), once for every rollout.on_update and rollout.resume_routing. The trainer replays the rows of the
rollout (R3) and computes the logprobs of the tokens that A sampled at the weights A, and of tokens that B sampled at B:
what is left of d = trainer - engine logprob is not staleness, but K/V and rows that trainer and engine do not share.

    k3 of A          tokens sampled before the update, in trajectories that went over it
    k3 of B          tokens sampled after it, whose context A began
    resumed          trajectories that have tokens of both
    sequences        that the trainer forwards per trajectory

Intervals are 95 % bootstrap over trajectories.

    python benchmarks/update_modes.py [--engine vllm|sglang] [--checkpoint DIR] [--trajectories N] [--updates K]
        [--dtype float32|bfloat16]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from agent_loop.tools.tool import PauseGate
from async_rl.config import RunConfig, load_config
from async_rl.inference.gate import KVPolicy
from async_rl.inference.pool import ReplicaPool
from async_rl.inference.publisher import OnUpdate, Publisher
from async_rl.inference.select import actor_environment, start_replica
from async_rl.rollout.rollouter import Rollouter
from async_rl.rollout.task import Task, build_task
from async_rl.trainer.batch.advantage import batch_rewards
from async_rl.trainer.batch.training_batch import TrainingBatch, training_batch
from async_rl.weights.model_info import read_model_info
from async_rl.weights.transport import WeightUpdate
from benchmarks.equal_weights import batch_of
from benchmarks.support import (
    FloatArray,
    Mismatch,
    markdown_table,
    roll_groups,
    say,
    show,
    start_rank,
    warm_start,
)
from message_queue.heads import head_of
from message_queue.training_sequence import content_of
from message_queue.trajectory import PromptGroup, ResumeRouting
from tests.helpers.fakes.rollouts import RolloutsHere

WARM_STEPS = 120
Way = tuple[OnUpdate, KVPolicy, ResumeRouting]  # to take the update
Cells = dict[Way, list[PromptGroup]]  # groups of one trajectory
Updates = tuple[WeightUpdate, WeightUpdate]  # versions 0 (A) and 1 (B)
UPDATE_AT = 0.4  # of the time that a rollout without update takes
MODES: tuple[tuple[OnUpdate, KVPolicy], ...] = (
    ("resume", "recompute"),
    ("keep", "recompute"),
    ("keep", "keep"),
    ("drain", "recompute"),
)


class Rollouts:
    """Rolls out the same prompts repeatedly, on one replica that holds either version."""

    def __init__(self, config: RunConfig, *, replica: Any, task: Task, checkpoint: Path) -> None:
        self._config = config
        self._replica = replica
        self._task = task
        self._routing = read_model_info(checkpoint).routing
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._first_group = 0

    def rollouter(self, trajectories: int, *, gate: PauseGate, resume_routing: ResumeRouting = "append") -> Rollouter:
        """Rolls out groups of `trajectories`."""
        rollout = self._config.rollout
        loop = self._task.build_loop(
            engine=self._replica,
            tokenizer=self._tokenizer,
            sampling=rollout.sampling,
            limits=rollout.limits,
            gate=gate,
        )
        return Rollouter(
            loop=loop, routing=self._routing, trajectories_per_group=trajectories, resume_routing=resume_routing
        )

    async def roll(
        self, count: int, updates: Updates, *, cell: Way, after_s: float | None
    ) -> tuple[list[PromptGroup], float]:
        """Groups of one trajectory that start under A, and the seconds taken; B arrives after `after_s`."""
        on_update, kv, resume_routing = cell
        gate, timeout_s = PauseGate(), self._config.sync.timeout_s
        pool, tools = ReplicaPool([self._replica]), RolloutsHere(gate)
        to_second = Publisher(pool, on_update=on_update, kv=kv, rollouts=tools, timeout_s=timeout_s)
        await Publisher(pool, on_update="drain", rollouts=tools, timeout_s=timeout_s).publish(updates[0])
        rollouter = self.rollouter(1, gate=gate, resume_routing=resume_routing)
        prompts, started = self._task.validation_prompts(count), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            groups = tasks.create_task(roll_groups(rollouter, prompts, first_group=self._first_group, at_once=count))
            if after_s is not None:
                await asyncio.sleep(after_s)
                await to_second.publish(updates[1])
        self._first_group += count
        return groups.result(), time.monotonic() - started


async def roll_all(rollouts: Rollouts, updates: Updates, *, trajectories: int) -> Cells:
    """Every cell of the table."""
    plain = ("drain", "recompute", "append")
    await rollouts.roll(trajectories, updates, cell=plain, after_s=None)  # warms up
    _, seconds = await rollouts.roll(trajectories, updates, cell=plain, after_s=None)
    say(f"a rollout without update takes {seconds:.2f} s")
    cells: Cells = {}
    for on_update, kv in MODES:
        for routing in get_args(ResumeRouting):
            cell = on_update, kv, routing
            groups, _ = await rollouts.roll(trajectories, updates, cell=cell, after_s=UPDATE_AT * seconds)
            cells[cell] = groups
            say(f"{on_update} {kv} {routing}: {sum(map(is_mixed, groups))} of {trajectories} resumed")
    return cells


def is_mixed(group: PromptGroup) -> bool:
    """Whether both versions sampled."""
    return len(head_of(group).tokens_per_version()) > 1


def tensors(groups: Sequence[PromptGroup], config: RunConfig) -> TrainingBatch:
    """The batch of `groups`; every sequence is evaluated, whatever its reward."""
    heads = [head_of(group) for group in groups]
    advantages = batch_rewards(heads, config.advantage).advantages()
    informative = np.ones_like(advantages.informative)
    return training_batch(
        heads,
        [content_of(group) for group in groups],
        advantages=replace(advantages, informative=informative),
        current_update=1,
        version_updates={0: 0, 1: 1},
    )


def mismatch(rank: Any, batch: TrainingBatch, *, version: int) -> Mismatch:
    """d over the tokens that `version` sampled, at the weights that the rank holds."""
    d: list[FloatArray] = []
    of: list[NDArray[np.int64]] = []
    for number, found in enumerate(rank.logprobs(batch)):
        loss = batch.loss_tokens(number)
        sampled = loss.lag == 1 - version
        d.append((found.numpy().astype(np.float64) - loss.logprobs)[sampled])
        of.append(np.full(int(sampled.sum()), batch.trajectory[number]))
    return Mismatch(np.concatenate(d), np.concatenate(of), batch.num_trajectories)


def table(cells: Cells, found: dict[int, list[Mismatch]], batches: Sequence[TrainingBatch]) -> str:
    """A row per cell."""
    header = (
        *("on_update", "kv", "resume_routing", "resumed", "sequences"),
        *("k3 of A", "max abs d of A", "k3 of B", "max abs d of B", "tokens of B"),
    )
    rows: list[Sequence[str]] = []
    for ((on_update, kv, routing), groups), before, after, batch in zip(
        cells.items(), found[0], found[1], batches, strict=True
    ):
        mixed = sum(map(is_mixed, groups))
        rows.append(
            (
                on_update,
                kv if on_update == "keep" else "",
                routing,
                f"{mixed / len(groups):.0%}",
                f"{len(batch) / max(1, mixed):.2f}",
                *described(before),
                *described(after),
                str(len(after.d)),
            )
        )
    return markdown_table(header, rows)


def described(found: Mismatch) -> tuple[str, str]:
    """k3 with its interval, and the largest |d|."""
    if not len(found.d):
        return "none", "none"
    return f"{found.mean(found.k3):.2e}", f"{np.abs(found.d).max():.2e}"


def train_b(rank: Any, groups: Sequence[PromptGroup], config: RunConfig, *, updates: int) -> None:
    """Take `updates` optimizer updates on groups that A sampled."""
    size = len(groups) // updates
    for update in range(updates):
        part = groups[update * size : (update + 1) * size]
        metrics = rank.train(batch_of(part, config, update=update))
        say(f"update {update + 1}: {metrics['tokens']:.0f} tokens, gradient norm {metrics['grad_norm']:.3f}")


async def run(config: RunConfig, *, checkpoint: Path, folder: Path, task: Task, args: argparse.Namespace) -> str:
    """Roll, train, roll again, evaluate."""
    rank = start_rank(config.trainer, config.loss, checkpoint=checkpoint, optimizer=config.optimizer)
    replica = await start_replica(config.replica_settings, name="replica-0", checkpoint=checkpoint)
    try:
        rank.save(folder / "a")
        first: WeightUpdate = rank.export(folder / "weights", version=0)
        rollouts = Rollouts(config, replica=replica, task=task, checkpoint=checkpoint)
        rollouter = rollouts.rollouter(config.rollout.trajectories_per_group, gate=PauseGate())
        per_update = config.rollout.groups_per_batch
        prompts = [task.train_prompt(i) for i in range(args.updates * per_update)]
        training = await roll_groups(rollouter, prompts, first_group=1 << 20, at_once=per_update)
        train_b(rank, training, config, updates=args.updates)
        rank.save(folder / "b")
        second: WeightUpdate = rank.export(folder / "weights", version=1)
        cells = await roll_all(rollouts, (first, second), trajectories=args.trajectories)
    finally:
        await replica.close()
    batches = [tensors([g for g in groups if is_mixed(g)], config) for groups in cells.values()]
    found: dict[int, list[Mismatch]] = {}
    for version, state in ((0, "a"), (1, "b")):
        rank.restore(folder / state)
        found[version] = [mismatch(rank, batch, version=version) for batch in batches]
    rank.close()
    return table(cells, found, batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder of the task's model; default: warm start")
    parser.add_argument("--trajectories", type=int, default=96, help="of a cell, each of another prompt; at least 2")
    parser.add_argument("--updates", type=int, default=4, help="optimizer updates from A to B")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of engine and trainer")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    config = load_config(
        [
            f"engine={args.engine}",
            f"engine.dtype={args.dtype}",
            f"trainer.dtype={args.dtype}",
            f"warm_start.steps={WARM_STEPS}",
            "rollout.groups_per_batch=16",
        ]
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(actor_environment(config.engine))
    task = build_task(config.task, seed=config.seed)
    with tempfile.TemporaryDirectory(prefix="async_rl-") as name:
        folder = Path(name)
        checkpoint = args.checkpoint or warm_start(config, task=task, folder=folder)
        say(f"checkpoint {checkpoint}")
        found = asyncio.run(run(config, checkpoint=checkpoint, folder=folder, task=task, args=args))
    show(f"{args.engine}, {args.dtype}, {args.trajectories} trajectories per row, {args.updates} updates from A to B\n")
    show(found)


if __name__ == "__main__":
    main()
