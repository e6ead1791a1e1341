"""What a checkpoint costs the trainer: a train step with a save, against one without, in one run.

The save either ends before the step begins, or its thread writes while the step runs. Rounds alternate; brackets are
95 % bootstrap intervals over rounds.

    python benchmarks/checkpoints.py [--model 70m] [--threads 1] [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.rank import TrainerRank
from benchmarks.replay_overhead import ADAM, SIZES, load_batch
from benchmarks.support import Variant, markdown_table, show, trainers_side_by_side
from benchmarks.train_steps import paired_ratio

WAYS = ("no save", "save, then step", "step beside the save")


def seconds_of_round(trainer: TrainerRank, batch: TrainingBatch, folder: Path) -> list[float]:
    """Seconds of a step, of each of WAYS, and then those of the copy and of the whole save beside the step."""
    taken: list[float] = []
    for way in WAYS:
        started = time.perf_counter()
        written = None if way == WAYS[0] else trainer.save(folder)
        copied = time.perf_counter()
        if way == WAYS[1] and written is not None:
            written.result()
        trainer.train(batch)
        taken.append(time.perf_counter() - started)
        if way == WAYS[2] and written is not None:
            written.result()
            taken += [copied - started, time.perf_counter() - started]
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="70m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checkpoint, batch = load_batch(arguments.model, Path(name))
        config = TrainerConfig(threads=arguments.threads, micro_batch_tokens=SIZES[arguments.model][2])
        with trainers_side_by_side({"one": Variant(config=config)}, checkpoint=checkpoint, optimizer=ADAM) as trainers:
            folder = Path(name) / "state"
            seconds_of_round(trainers["one"], batch, folder)  # warm up
            rounds = [seconds_of_round(trainers["one"], batch, folder) for _ in range(arguments.rounds)]
        size = sum(path.stat().st_size for path in folder.iterdir())
    *ways, copies, saves = zip(*rounds, strict=True)
    rows: list[Sequence[str]] = []
    for way, taken in zip(WAYS, ways, strict=True):
        ratio = paired_ratio(taken, ways[0])
        more = "" if way == WAYS[0] else f"{ratio.value - 1:+.0%} [{ratio.low - 1:+.0%}, {ratio.high - 1:+.0%}]"
        rows.append((way, f"{statistics.median(taken):.2f} s", more))
    show(
        f"{size / 1e6:.0f} MB, {arguments.threads} threads, {arguments.rounds} rounds; median of the copy "
        f"{statistics.median(copies):.2f} s, of the save beside the step {statistics.median(saves):.2f} s\n"
    )
    show(markdown_table(("step", "seconds", "more than without a save"), rows))


if __name__ == "__main__":
    main()
