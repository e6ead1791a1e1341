"""A train step whose rollouts are written to disk against one without, on the model and batch size of the default run.

A recorded step includes the file: columns, text, compression and fsync, though in a run they overlap with later work.
Both ways train the same batch in turns, so that a busy machine slows both; there the ratio of CPU time is the steadier.

    python benchmarks/recording.py [--threads 2] [--rounds 8] [--sequences 256] [--trajectories 64]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.files.rollouts import RecordConfig, recorded_steps
from async_rl.trainer.batch.training_batch import RecordedGroups, TrainingBatch
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.rank import TrainerRank
from async_rl.trainer.recording import RolloutRecorder
from benchmarks.support import save_calculator, show
from benchmarks.train_steps import paired_ratio, time_in_turns
from benchmarks.train_throughput import ADAM, demonstrations
from message_queue.heads import GroupHead, SequenceHead, TrajectoryHead
from message_queue.tokens import StopReason

GOAL = 1.02
GROUP = 8


def in_groups(batch: TrainingBatch) -> TrainingBatch:
    """A batch of one group, cut into groups of GROUP trajectories."""
    content = batch.content(0)
    index = batch.index.copy()
    index[:, 0], index[:, 1] = batch.index[:, 1] // GROUP, batch.index[:, 1] % GROUP
    parts = [content[at : at + GROUP] for at in range(0, len(content), GROUP)]
    return replace(batch, contents=parts, index=index, admitted_updates=[0] * len(parts))


def head_of_group(batch: TrainingBatch, group: int) -> GroupHead:
    """The head of a group of the batch."""
    trajectories = tuple(
        TrajectoryHead(
            length=len(sequence),
            sequences=(SequenceHead(len(sequence), ((0, len(sequence.logprobs)),)),),
            num_segments=len(sequence.runs),
            num_aborts=0,
            row_bytes=0,
            missing_rows=0,
            reward=1.0,
            stop_reason=StopReason.STOP,
            info={"turns": float(len(sequence.runs)), "reward/right": 1.0},
        )
        for (sequence,) in batch.content(group)
    )
    return GroupHead(group=group, prompt=group, admitted_version=0, admitted_update=0, trajectories=trajectories)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--trajectories", type=int, default=64, help="recorded ones")
    arguments = parser.parse_args()
    config = TrainerConfig(threads=arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, task, routing = save_calculator(Path(folder))
        recorder = RolloutRecorder(
            Path(folder) / "rollouts",
            config=RecordConfig(steps=500),
            tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        )
        trainer = TrainerRank(
            config=config,
            optimizer=ADAM,
            loss=DecoupledPPO(),
            checkpoint=checkpoint,
            rank=0,
            world_size=1,
            recorder=recorder,
        )
        batch = in_groups(demonstrations(task, routing, sequences=arguments.sequences))
        groups = range(max(1, arguments.trajectories // GROUP))
        heads = {group: head_of_group(batch, group) for group in groups}
        compare(trainer, recorder, batch, heads, rounds=arguments.rounds)
        files = recorded_steps(Path(folder) / "rollouts").values()
        show(f"{statistics.median(path.stat().st_size for path in files) / 1024:.0f} KiB for each step")
        trainer.close()


def compare(
    trainer: TrainerRank,
    recorder: RolloutRecorder,
    batch: TrainingBatch,
    heads: dict[int, GroupHead],
    *,
    rounds: int,
) -> None:
    """Print the ratios of recorded over plain steps, medians over rounds with 95 % bootstrap intervals."""
    steps = iter(range(1, rounds + 2))

    def recorded() -> None:
        trainer.train(replace(batch, recorded=RecordedGroups(train_step=next(steps), heads=heads)))
        recorder.flush()

    taken = time_in_turns({"plain": lambda: trainer.train(batch), "recorded": recorded}, rounds=rounds)
    count = sum(len(head.trajectories) for head in heads.values())
    show(f"{count} of {len(batch)} trajectories recorded, {int(batch.lengths.sum())} tokens in the batch")
    show(f"plain step  {statistics.median(taken['plain'].wall) * 1000:8.0f} ms")
    for what, clock in (("wall time", "wall"), ("CPU time", "cpu")):
        ratio = paired_ratio(getattr(taken["recorded"], clock), getattr(taken["plain"], clock))
        show(f"ratio by {what:<10} {ratio.value:8.3f} [{ratio.low:.3f}, {ratio.high:.3f}]   (goal {GOAL})")


if __name__ == "__main__":
    main()
