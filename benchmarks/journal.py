"""Speed of the journal against the disk's own sequential write, and its cost per group as a run goes on.

throughput   segments recorded through `Journal` by several rollouts at once, against one file that is written from
             start to end: as many bytes, in pieces of the same size, with as many fsyncs. Both take turns on the
             same disk; the ratio is the median over rounds.
groups       small groups from admission to checkpoint, a fixed number of them live, at several points of a run; and
             the memory of the process, the files on the disk and the time to open them again.

python benchmarks/journal.py [--mb 96] [--rounds 5] [--groups 100000] [--directory DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.support import markdown_table, say, show
from message_queue.contract import Admission
from message_queue.journal import Journal, JournalConfig, JournalStart
from message_queue.tokens import RoutedExperts, StopReason, TokenOutput, WeightVersion

AT_ONCE = 16
LIVE_BATCH = 64
POLICIES = ("never", "interval", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A segment: tokens, and MoE layers and top-k of its rows (no rows where layers is 0)."""

    name: str
    tokens: int
    layers: int
    top_k: int

    @property
    def num_bytes(self) -> int:
        return self.tokens * (8 + self.layers * self.top_k)

    def segment(self, *, first_position: int) -> TokenOutput:
        """A segment after `first_position` tokens, all of whose rows but the last of its own are held."""
        rows = np.tile(np.arange(self.top_k, dtype=np.uint8), (self.tokens, self.layers, 1)) if self.layers else None
        return TokenOutput(
            token_ids=np.zeros(self.tokens, np.int32),
            logprobs=np.zeros(self.tokens, np.float32),
            routed_experts=None if rows is None else RoutedExperts.trusted(first_position=first_position, experts=rows),
            weights=WeightVersion(0, "0" * 64),
            stop_reason=StopReason.ABORT,
            replica="replica-0",
        )


SHAPES = (
    Shape(name="512 tokens, rows 48 x 8", tokens=512, layers=48, top_k=8),
    Shape(name="64 tokens, rows 48 x 8", tokens=64, layers=48, top_k=8),
    Shape(name="64 tokens, no rows", tokens=64, layers=0, top_k=1),
)


@dataclass(frozen=True, slots=True)
class Written:
    """A run of records: seconds, bytes, and fsyncs in between."""

    seconds: float
    num_bytes: int
    syncs: int


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A folder on the disk that is measured."""
    folder = Path(tempfile.mkdtemp(prefix="journal-benchmark-", dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


async def record(folder: Path, shape: Shape, *, policy: str, num_bytes: int) -> Written:
    """AT_ONCE rollouts that record their segments, each as soon as the one before is recorded."""
    config = JournalConfig(fsync=policy)  # pyright: ignore[reportArgumentType]
    journal, _ = await Journal.open(folder, run="benchmark", config=config, start=JournalStart())
    segments = max(1, num_bytes // shape.num_bytes // AT_ONCE)
    segment = shape.segment(first_position=1)

    async def roll(group: int) -> None:
        for number in range(segments):
            await journal.sampled(group, segment, trajectory=0, at=2 + number * shape.tokens)

    async with journal:
        for group in range(AT_ONCE):
            admission = Admission(group=group, prompt=group, admitted_version=0, admitted_update=0)
            await journal.admitted(admission, trajectories=1)
            await journal.observed(group, np.zeros(2, np.int32), trajectory=0, at=0)
        before, begun = await journal.stats(), time.perf_counter()
        await asyncio.gather(*(roll(group) for group in range(AT_ONCE)))
        if policy != "never":
            await journal.sync()
        seconds, after = time.perf_counter() - begun, await journal.stats()
    return Written(seconds, after.disk_bytes - before.disk_bytes, after.syncs - before.syncs)


def write_raw(folder: Path, *, num_bytes: int, piece: int, syncs: int) -> Written:
    """One file from start to end, in pieces, with fsyncs spread evenly."""
    data, pieces = bytes(piece), max(1, num_bytes // piece)
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT)
    try:
        begun = time.perf_counter()
        for number in range(1, pieces + 1):
            os.write(descriptor, data)
            if number * syncs // pieces > (number - 1) * syncs // pieces:
                os.fdatasync(descriptor)
        return Written(time.perf_counter() - begun, pieces * piece, syncs)
    finally:
        os.close(descriptor)


def throughput_rows(directory: Path, *, num_bytes: int, rounds: int) -> list[list[str]]:
    """One row of the table for each shape and policy."""
    rows: list[list[str]] = []
    for shape in SHAPES:
        for policy in POLICIES:
            size = min(num_bytes, 20000 * shape.num_bytes) // (8 if policy == "always" else 1)
            pairs: list[tuple[Written, Written]] = []
            for _ in range(rounds):
                with scratch(directory) as folder:
                    ours = asyncio.run(record(folder / "journal", shape, policy=policy, num_bytes=size))
                    raw = write_raw(folder, num_bytes=ours.num_bytes, piece=shape.num_bytes, syncs=ours.syncs)
                pairs.append((ours, raw))
            say(f"{shape.name}, fsync {policy}: done")
            rows.append([shape.name, policy, *throughput_figures(pairs, shape)])
    return rows


def throughput_figures(pairs: list[tuple[Written, Written]], shape: Shape) -> list[str]:
    """Medians: MB/s of journal and disk, their ratio, records a second, fsyncs a record."""
    ours, raw = ([pair[which].num_bytes / pair[which].seconds / 1e6 for pair in pairs] for which in (0, 1))
    ratios = sorted(a / b for a, b in zip(ours, raw, strict=True))
    records = [pair[0].num_bytes / shape.num_bytes for pair in pairs]
    rate = statistics.median(count / pair[0].seconds for count, pair in zip(records, pairs, strict=True))
    syncs = statistics.median(pair[0].syncs / count for count, pair in zip(records, pairs, strict=True))
    return [
        f"{statistics.median(ours):.0f}",
        f"{statistics.median(raw):.0f}",
        f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
        f"{rate:.0f}",
        f"{syncs:.3f}",
    ]


def clocks() -> tuple[float, float]:
    """Seconds by the wall, and of all processors in this process."""
    return time.perf_counter(), time.process_time()


def process_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def run_group(journal: Journal, group: int, segment: TokenOutput) -> None:
    """From admission to ready: one trajectory of one segment, so that what counts is the group."""
    admission = Admission(group=group, prompt=group, admitted_version=0, admitted_update=0)
    await journal.admitted(admission, trajectories=1)
    await journal.observed(group, np.zeros(16, np.int32), trajectory=0, at=0)
    await journal.sampled(group, segment, trajectory=0, at=16)
    await journal.closed(group, trajectory=0, at=80, stop_reason=StopReason.STOP, reward=1.0)
    await journal.ready(group)


async def run_batch(journal: Journal, first: int, segment: TokenOutput) -> None:
    """LIVE_BATCH groups at once, trained; those of the batch before are settled."""
    groups, step = range(first, first + LIVE_BATCH), first // LIVE_BATCH + 1
    await asyncio.gather(*(run_group(journal, group, segment) for group in groups))
    await journal.taken(groups, update=step - 1)
    await journal.trained(groups, train_step=step)
    await journal.checkpointed(step - 1)


async def group_rows(folder: Path, *, groups: int) -> list[list[str]]:
    """Cost of the last groups before 1e3, 1e4, ... groups."""
    journal, _ = await Journal.open(folder, run="benchmark", config=JournalConfig(), start=JournalStart())
    segment, rows, done, point = SHAPES[2].segment(first_position=15), list[list[str]](), 0, 1000
    async with journal:
        while point <= groups:
            begun, begun_at, window = clocks(), done, min(point // 2, 20_000)
            while done < point:
                if begun_at < point - window <= done:
                    begun, begun_at = clocks(), done
                await run_batch(journal, done, segment)
                done += LIVE_BATCH
            wall, cpu = (1e6 * (now - then) / (done - begun_at) for now, then in zip(clocks(), begun, strict=True))
            stats = await journal.stats()
            memory = process_bytes()
            say(f"{done} groups: {wall:.0f} us a group, {cpu:.0f} us of processors")
            rows.append(
                [
                    f"{done}",
                    f"{wall:.0f}",
                    f"{cpu:.0f}",
                    f"{memory / 1e6:.0f}",
                    f"{stats.files}",
                    f"{stats.disk_bytes / 1e6:.0f}",
                    f"{stats.live_bytes / 1e6:.1f}",
                ]
            )
            point *= 10
    begun = time.perf_counter()
    start = JournalStart(train_step=done // LIVE_BATCH)
    journal, recovered = await Journal.open(folder, run="benchmark", config=JournalConfig(), start=start)
    say(f"opened again in {time.perf_counter() - begun:.2f} s: {recovered.report.lines()[0]}")
    await journal.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=96, help="of one round; an eighth of it with fsync always")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    args = parser.parse_args()
    rows = throughput_rows(args.directory, num_bytes=args.mb * 1_000_000, rounds=args.rounds)
    header = ["segment", "fsync", "journal MB/s", "disk MB/s", "ratio [min, max]", "records/s", "fsyncs/record"]
    show(markdown_table(header, rows))
    with scratch(args.directory) as folder:
        rows = asyncio.run(group_rows(folder, groups=args.groups))
    header = ["groups so far", "us/group", "CPU us/group", "process MB", "files", "disk MB", "live MB"]
    show("")
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
