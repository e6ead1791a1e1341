"""Packed against padded micro-batches: tokens/s of TrainerRank.train on the same sequences, with R3, in one run.

Padding is computed like any token, so that the share of real tokens in the padded micro-batches is what packing can
give: the ratio of tokens/s is at most 1 / share, but for what packing itself costs or saves. Padded micro-batches hold
sequences of similar length, as the trainer cuts them; the last column is the share where sequences are taken as they
come. Rounds alternate; brackets are 95 % bootstrap intervals over rounds.

- long tail: lengths of a log-normal distribution (median 60, sigma 1), cut at 1024 tokens,
- calculator: the lengths of the calculator's demonstrations.

    python benchmarks/packing.py [--threads 1] [--rounds 8] [--sequences 128] [--micro-batch-tokens 2048]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.batch.packing import plan_micro_batches
from async_rl.trainer.batch.training_batch import TrainingBatch, supervised_batch
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.model_info import read_model_info
from benchmarks.support import Variant, markdown_table, save_calculator, show, trainers_side_by_side
from benchmarks.train_steps import as_rollouts, paired_ratio, random_batch, time_in_turns

ADAM = OptimizerConfig(lr=1e-6)
MEDIAN, SIGMA, LONGEST = 60, 1.0, 1024


def long_tailed_lengths(count: int, *, seed: int = 0) -> list[int]:
    """Log-normal lengths; the mean is about exp(SIGMA^2 / 2) = 1.65 medians."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(drawn.round(), 2, LONGEST).astype(int).tolist()


def real_share(lengths: Sequence[int], *, max_tokens: int) -> float:
    """Real tokens over computed ones, in the padded micro-batches of one rank."""
    (plan,) = plan_micro_batches(lengths, max_tokens=max_tokens, num_ranks=1, padded=True)
    computed = sum(len(indices) * max(lengths[i] for i in indices) for indices in plan if indices)
    return sum(lengths) / computed


def share_in_arrival_order(lengths: Sequence[int], *, max_tokens: int) -> float:
    """The same where a micro-batch takes the next sequences as long as they fit."""
    computed, held = 0, list[int]()
    for length in [*lengths, max_tokens + 1]:
        if held and max([*held, length]) * (len(held) + 1) > max_tokens:
            computed += len(held) * max(held)
            held = []
        held.append(length)
    return sum(lengths) / computed


def compare(checkpoint: Path, batch: TrainingBatch, config: TrainerConfig, *, rounds: int) -> Sequence[str]:
    """A row of the table."""
    variants = {name: Variant(config=replace(config, packing=name == "packed")) for name in ("packed", "padded")}
    with trainers_side_by_side(variants, checkpoint=checkpoint, optimizer=ADAM) as trainers:
        taken = time_in_turns({name: partial(t.train, batch) for name, t in trainers.items()}, rounds=rounds)
    lengths: list[int] = batch.lengths.tolist()
    tokens, share = sum(lengths), real_share(lengths, max_tokens=config.micro_batch_tokens)
    wall, cpu = (paired_ratio(getattr(taken["padded"], c), getattr(taken["packed"], c)) for c in ("wall", "cpu"))
    return (
        f"{len(lengths)}, {tokens}",
        *(f"{tokens / statistics.median(taken[name].wall):.0f}" for name in ("packed", "padded")),
        f"{wall.value:.3f} [{wall.low:.3f}, {wall.high:.3f}]",
        f"{cpu.value:.3f} [{cpu.low:.3f}, {cpu.high:.3f}]",
        f"{share:.3f}",
        f"{1 / share:.3f}",
        f"{cpu.value * share:.3f}",
        f"{share_in_arrival_order(lengths, max_tokens=config.micro_batch_tokens):.3f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = TrainerConfig(threads=arguments.threads, micro_batch_tokens=arguments.micro_batch_tokens)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, task, routing = save_calculator(Path(folder))
        lengths = long_tailed_lengths(arguments.sequences)
        batches = {
            "long tail": random_batch(lengths, vocab=read_model_info(checkpoint).vocab_size, routing=routing),
            "calculator": as_rollouts(supervised_batch(task.demonstrations(0, arguments.sequences)), routing),
        }
        rows = [(name, *compare(checkpoint, b, config, rounds=arguments.rounds)) for name, b in batches.items()]
    header = (
        "lengths",
        "sequences, tokens",
        "packed tokens/s",
        "padded tokens/s",
        "packed / padded, wall",
        "packed / padded, CPU",
        "real tokens of the padded",
        "limit",
        "of the limit, CPU",
        "real tokens in arrival order",
    )
    show(f"micro-batches of {config.micro_batch_tokens} tokens, {config.threads} threads\n")
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
