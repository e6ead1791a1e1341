"""Speed of the content store against sequential writes of the same bytes to one file.

Several rollouts append their segments, each as soon as the one before is written. Both ways take turns on the same
disk, and each round ends with a sync of what it wrote, so that the disk is measured. The ratio is the median over
rounds, with its 95 % bootstrap interval.

python benchmarks/journal.py [--mb 96] [--rounds 9] [--directory DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.rollout.content.records import RolloutRecord
from async_rl.rollout.content.writer import ContentWriter
from benchmarks.support import bootstrap, markdown_table, say, show
from message_queue.tokens import RoutedExperts, StopReason, TokenOutput, WeightVersion

AT_ONCE = 16  # rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A segment."""

    name: str
    """Of the row of the table."""
    tokens: int
    """Sampled tokens."""
    layers: int
    """MoE layers of its rows; 0 without rows."""
    top_k: int = 8
    """Experts of a row and layer."""
    fsync: bool = False
    """Whether each write is synced: of the store, and of the file."""

    @property
    def num_bytes(self) -> int:
        return self.tokens * (8 + self.layers * self.top_k)

    def segment(self) -> TokenOutput:
        """Random content, as the disk may compress."""
        rng = np.random.default_rng(0)
        experts = rng.integers(0, 128, (self.tokens, self.layers, self.top_k), np.uint8)
        return TokenOutput(
            token_ids=rng.integers(0, 150_000, self.tokens, np.int32),
            logprobs=-rng.random(self.tokens, np.float32),
            routed_experts=RoutedExperts.trusted(first_position=1, experts=experts) if self.layers else None,
            weights=WeightVersion(0, "0" * 64),
            stop_reason=StopReason.ABORT,
            replica="replica-0",
        )


SHAPES = (
    Shape(name="1,024 tokens, rows 48 x 8", tokens=1024, layers=48),
    Shape(name="64 tokens, rows 48 x 8", tokens=64, layers=48),
    Shape(name="64 tokens, no rows", tokens=64, layers=0),
    Shape(name="1,024 tokens, rows 48 x 8, fsync", tokens=1024, layers=48, fsync=True),
)


async def append_seconds(folder: Path, shape: Shape, segments: int) -> float:
    """Of the store, until its files are on the disk."""
    writer = await ContentWriter.open(folder, name="writer", run="benchmark", fsync=shape.fsync)
    segment = shape.segment()

    async def roll(group: int) -> None:
        for number in range(segments // AT_ONCE):
            record = RolloutRecord(group=group, trajectory=0, handout=0, at=2 + number * shape.tokens, what=segment)
            await writer.append([record])

    started = time.perf_counter()
    await asyncio.gather(*(roll(group) for group in range(AT_ONCE)))
    await writer.close()
    sync_files(folder)
    return time.perf_counter() - started


def write_seconds(folder: Path, shape: Shape, segments: int) -> float:
    """Of one file written from start to end, a segment at a time; with fsync, one sync for as many as run at once."""
    data = os.urandom(shape.num_bytes)
    started = time.perf_counter()
    with (folder / "raw").open("wb", buffering=0) as file:
        for number in range(1, segments // AT_ONCE * AT_ONCE + 1):
            file.write(data)
            if shape.fsync and number % AT_ONCE == 0:
                os.fdatasync(file.fileno())
    sync_files(folder)
    return time.perf_counter() - started


def sync_files(folder: Path) -> None:
    """Return once all files are on the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fdatasync(file.fileno())


def table_row(directory: Path, shape: Shape, *, num_bytes: int, rounds: int) -> list[str]:
    """Medians over rounds."""
    segments = max(AT_ONCE, min(num_bytes // shape.num_bytes, 20_000))
    seconds: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=directory) as one, tempfile.TemporaryDirectory(dir=directory) as other:
            ways = [
                lambda folder=Path(one): asyncio.run(append_seconds(folder, shape, segments)),
                lambda folder=Path(other): write_seconds(folder, shape, segments),
            ]
            order = [0, 1] if number % 2 else [1, 0]
            taken = {which: ways[which]() for which in order}
        if number:  # the first warms up
            seconds.append((taken[0], taken[1]))
    say(f"{shape.name}: done")
    store, raw = np.array(seconds).T

    def ratios(drawn: np.ndarray) -> np.ndarray:
        return np.array([np.median(np.repeat(raw / store, counts.astype(int))) for counts in drawn])

    ratio = bootstrap(ratios, units=rounds)
    written = segments // AT_ONCE * AT_ONCE
    rates = [f"{written * shape.num_bytes / np.median(taken) / 1e6:.0f}" for taken in (store, raw)]
    interval = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    return [shape.name, *rates, interval, f"{written / np.median(store):.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=96, help="of one round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    args = parser.parse_args()
    rows = [table_row(args.directory, s, num_bytes=args.mb * 1_000_000, rounds=args.rounds) for s in SHAPES]
    show(markdown_table(["segment", "store MB/s", "file MB/s", "ratio", "segments/s"], rows))


if __name__ == "__main__":
    main()
