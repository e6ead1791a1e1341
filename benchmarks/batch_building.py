"""How fast a batch is built, and how much memory that takes, on one thread and long-tailed lengths.

    driver   heads of groups -> advantages, metrics, mini-batches and the plan for all ranks
    rank     content of a rank's groups -> its micro-batches, with the routing rows of all layers, without rotary tables

Lengths are log-normal, clipped: 1.7k tokens on average, at most 9.8k. Rows are of 48 layers with 8 of 128 experts.
Tokens/s are by CPU time, medians over rounds. Peak memory is what resident memory grows by at most during the first
round, over the real tokens of the part.

    python benchmarks/batch_building.py [--trajectories 4096] [--rank-trajectories 128] [--rounds 5]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.controller.prepare import prepare
from async_rl.trainer.batch.advantage import AdvantageConfig
from async_rl.trainer.batch.micro_batch import Coordinates
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.planning import BatchPlan, Planner
from async_rl.trainer.step import MicroBatchBuilder, MicroBatches
from benchmarks.support import markdown_table, resident_bytes, show
from message_queue.contract import Batch
from message_queue.heads import GroupHead, SequenceHead, TrajectoryHead
from message_queue.routing_rows import RowRun
from message_queue.tokens import RoutingSpec, StopReason
from message_queue.training_sequence import GroupContent, SampledRun, TrainingSequence

ROUTING = RoutingSpec(layers=tuple(range(48)), num_experts=128, top_k=8)
MEDIAN, SIGMA, LONGEST = 1250, 0.85, 9800
PROMPT, GROUP, VOCAB = 100, 16, 150_000
RANKS = 8  # data parallel, of the plan
UPDATES = {0: 0, 1: 1}


def long_tailed_lengths(count: int, *, seed: int = 0) -> list[int]:
    """Tokens of each trajectory."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(drawn.round(), 2 * PROMPT, LONGEST).astype(int).tolist()


def heads_of(lengths: Sequence[int]) -> list[GroupHead]:
    """Groups of trajectories that versions 0 and 1 sampled half each, with rewards in turn 0 and 1."""
    return [
        GroupHead(
            group=start // GROUP,
            prompt=start // GROUP,
            admitted_version=0,
            admitted_update=0,
            trajectories=tuple(_head(length, number) for number, length in enumerate(lengths[start : start + GROUP])),
        )
        for start in range(0, len(lengths), GROUP)
    ]


def _head(length: int, number: int) -> TrajectoryHead:
    first = (length - PROMPT) // 2
    return TrajectoryHead(
        length=length,
        sequences=(SequenceHead(length, ((0, first), (1, length - PROMPT - first))),),
        num_segments=2,
        num_aborts=1,
        row_bytes=(length - 1) * ROUTING.row_shape[0] * ROUTING.top_k,
        missing_rows=0,
        reward=float(number % 2),
        stop_reason=StopReason.STOP,
    )


def content_of_head(head: GroupHead, *, seed: int) -> GroupContent:
    """Random tokens and rows as the head says."""
    random = np.random.default_rng(seed)

    def sequence(length: int, spans: Sequence[tuple[int, int]]) -> TrainingSequence:
        first = random.integers(0, ROUTING.num_experts, (length - 1, len(ROUTING.layers), 1), dtype=np.uint8)
        starts = np.cumsum([PROMPT, *(tokens for _, tokens in spans)]).tolist()
        return TrainingSequence(
            token_ids=random.integers(0, VOCAB, length, dtype=np.int32),
            runs=tuple(SampledRun(at, tokens, v) for at, (v, tokens) in zip(starts, spans, strict=False)),
            logprobs=-random.random(length - PROMPT, dtype=np.float32),
            rows=(first + np.arange(ROUTING.top_k, dtype=np.uint8)) % np.uint8(ROUTING.num_experts),
            row_runs=(RowRun(starts[1], 0), RowRun(length - 1 - starts[1], 1)),
        )

    return tuple(tuple(sequence(s.length, s.spans) for s in t.sequences) for t in head.trajectories)


def plan_of(heads: Sequence[GroupHead], contents: Sequence[Any], *, ranks: int) -> BatchPlan:
    """The driver's part."""
    prepared = prepare(
        Batch(groups=heads, update=1, version_updates=UPDATES),
        contents,
        advantage=AdvantageConfig(),
        version_updates=UPDATES,
        retained_kv=False,
    )
    return Planner(config=TrainerConfig(ranks=ranks, micro_batch_tokens=16_384), loss=DecoupledPPO()).policy(
        prepared.batch
    )


class NoRotary:
    """Stands for `async_rl.trainer.model.attention.Rotary`."""

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return positions, positions


def micro_batches_of(plan: BatchPlan) -> MicroBatches:
    """The part of rank 0."""
    (update,) = plan.updates
    assert update is not None
    rotary: Any = NoRotary()
    builder = MicroBatchBuilder(
        plan.batch,
        update,
        at=Coordinates(),
        device=torch.device("cpu"),
        packing=True,
        replay="R3",
        routing=ROUTING,
        layers=ROUTING.layers,
        rotary=rotary,
    )
    return MicroBatches(builder, update.micro_batches[0])


def build_each(micro_batches: MicroBatches) -> None:
    """Build one after the other, as a pass does: one exists beside the one that is built."""
    for _ in micro_batches:
        pass


def measure(build: Callable[[], object], *, tokens: int, rounds: int) -> tuple[float, float]:
    """Tokens per second of CPU time, and bytes of peak memory per token."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    kept = build()
    peak = resident_bytes("VmHWM") - before
    del kept
    seconds: list[float] = []
    for _ in range(rounds):
        begin = time.process_time()
        build()
        seconds.append(time.process_time() - begin)
    return tokens / statistics.median(seconds), peak / tokens


def table(*, trajectories: int, rank_trajectories: int, rounds: int) -> str:
    """A row for the driver and one for a rank."""
    lengths, on_rank = long_tailed_lengths(trajectories), long_tailed_lengths(rank_trajectories, seed=1)
    heads, heads_on_rank = heads_of(lengths), heads_of(on_rank)
    contents = [content_of_head(head, seed=number) for number, head in enumerate(heads_on_rank)]
    plan = plan_of(heads_on_rank, contents, ranks=1)
    parts = {
        "driver": (sum(lengths), lambda: plan_of(heads, [None] * len(heads), ranks=RANKS)),
        "rank": (sum(on_rank), lambda: build_each(micro_batches_of(plan))),
    }
    rows: list[Sequence[str]] = []
    for name, (tokens, build) in parts.items():
        speed, memory = measure(build, tokens=tokens, rounds=rounds)
        rows.append((name, f"{tokens / 1e6:.1f}M", f"{speed / 1e6:.1f}M", f"{memory:.1f}"))
    return markdown_table(("part", "tokens", "tokens/s", "bytes of peak memory per token"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=4096, help="of the driver's batch")
    parser.add_argument("--rank-trajectories", type=int, default=128, help="that one rank trains")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    show(table(trajectories=args.trajectories, rank_trajectories=args.rank_trajectories, rounds=args.rounds))


if __name__ == "__main__":
    main()
