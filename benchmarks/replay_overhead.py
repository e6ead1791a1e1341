"""What router replay costs: the time of a train step with R3 and with R2 against one without replay, in one run.

The rows replayed are what the live router chooses, so that the experts get the same work in every mode. R2 makes a
forward pass of its own to record them, which is not replay: it is compared with a step without replay that makes the
same pass (loss m2po, which needs the logprobs of the start of the batch). Rounds alternate; brackets are 95 % bootstrap
intervals over rounds. On a busy machine the ratio of CPU time is the steadier.

    python benchmarks/replay_overhead.py [--models calculator 70m] [--threads 1] [--rounds 12]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.batch.training_batch import TrainingBatch, supervised_batch
from async_rl.trainer.loss.losses import M2PO, DecoupledPPO, LossConfig
from async_rl.trainer.model.model import RouterReplayMode, TrainerConfig
from async_rl.trainer.rank import TrainerRank
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.model_info import read_model_info
from benchmarks.equal_weights import save_random
from benchmarks.routing_mismatch import evaluate
from benchmarks.support import Variant, markdown_table, save_calculator, show, trainers_side_by_side
from benchmarks.train_steps import as_rollouts, paired_ratio, random_batch, time_in_turns, with_rows, with_sequences

ADAM = OptimizerConfig(lr=1e-9)  # the live router goes on choosing the rows
GOAL = 0.02
ONE_PASS, TWO_PASSES = DecoupledPPO(), M2PO()
STEPS: dict[str, tuple[RouterReplayMode, LossConfig]] = {
    "none": ("none", ONE_PASS),
    "R3": ("R3", ONE_PASS),
    "none, recording pass": ("none", TWO_PASSES),
    "R2": ("R2", TWO_PASSES),
}
BASE = {"R3": "none", "R2": "none, recording pass"}
# Sequences, tokens of each (None: the task's own), tokens of a micro-batch.
SIZES = {"calculator": (128, None, 4096), "70m": (8, 128, 512)}


def load_batch(name: str, folder: Path) -> tuple[Path, TrainingBatch]:
    """Checkpoint and batch, its rows random."""
    sequences, length, _ = SIZES[name]
    if length is None:
        checkpoint, task, routing = save_calculator(folder)
        return checkpoint, as_rollouts(supervised_batch(task.demonstrations(0, sequences)), routing)
    checkpoint = save_random(name, folder)
    info = read_model_info(checkpoint)
    assert info.routing is not None
    return checkpoint, random_batch([length] * sequences, vocab=info.vocab_size, routing=info.routing)


def with_live_rows(trainer: TrainerRank, batch: TrainingBatch) -> TrainingBatch:
    """The batch with the rows that the live router chooses, for all but the last token of each sequence."""
    _, chosen = evaluate(trainer, batch, replay="R2")
    return with_sequences(batch, lambda sequence, number: with_rows(sequence, chosen[number].astype(np.uint8)))


def variants(*, threads: int, tokens: int) -> dict[str, Variant]:
    """The trainer of each of STEPS."""
    return {
        name: Variant(
            config=TrainerConfig(threads=threads, micro_batch_tokens=tokens, router_replay=replay),
            loss=loss,
        )
        for name, (replay, loss) in STEPS.items()
    }


def compare(name: str, trainers: dict[str, TrainerRank], batch: TrainingBatch, *, rounds: int) -> list[Sequence[str]]:
    """Rows of the table, one for each mode that replays."""
    batch = with_live_rows(trainers["R3"], batch)
    overlap = trainers["R3"].train(batch)["routing/overlap"]
    taken = time_in_turns({n: partial(t.train, batch) for n, t in trainers.items()}, rounds=rounds)
    rows: list[Sequence[str]] = []
    for mode, base in BASE.items():
        wall, cpu = (paired_ratio(getattr(taken[mode], c), getattr(taken[base], c)) for c in ("wall", "cpu"))
        rows.append(
            (
                name,
                f"{int(batch.lengths.sum())}",
                f"{mode} against {base}",
                *(f"{statistics.median(taken[n].wall):.2f} s" for n in (base, mode)),
                *(f"{r.value - 1:+.1%} [{r.low - 1:+.1%}, {r.high - 1:+.1%}]" for r in (wall, cpu)),
                f"{overlap:.1%}",
            )
        )
    return rows


def parse(description: str | None) -> argparse.Namespace:
    """Models, threads and rounds from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    return parser.parse_args()


def main() -> None:
    arguments = parse(__doc__)
    torch.manual_seed(0)
    rows: list[Sequence[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            checkpoint, batch = load_batch(name, Path(folder))
            ways = variants(threads=arguments.threads, tokens=SIZES[name][2])
            with trainers_side_by_side(ways, checkpoint=checkpoint, optimizer=ADAM) as trainers:
                rows += compare(name, trainers, batch, rounds=arguments.rounds)
    header = (
        "model",
        "tokens",
        "step",
        "without",
        "with",
        "more wall time",
        "more CPU time",
        "rows as the live router",
    )
    show(f"{arguments.threads} threads, {arguments.rounds} rounds; goal for R3: at most {GOAL:.0%} more\n")
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
