"""Speed and memory of a version that travels through shared memory, against a copy of the same bytes.

A process writes the bfloat16 layers of a model in buckets, as an owner does. Then it reads, verifies and copies them
into parameters, as an engine of one rank does. Each round also copies the bytes once from tensors into parameters.
The ratio of a copy over a write and a read is the median over rounds, with its 95 % bootstrap interval. Extra memory is
the growth of the process's own memory while it writes once more, without the files in shared memory.

The second table is of engines with more ranks, each of which is a process that copies its part of each tensor: seconds
until the last rank has loaded and CPU seconds of all ranks, medians over rounds, and what a rank hashes.

python benchmarks/publish_files.py [--mb 100 1000] [--bucket-mb 64] [--rounds 9] [--ranks 1 2] [--directory /dev/shm]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.weights.checksum import value_sums
from async_rl.weights.digest import load_share, mapped, read_tensors
from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.transport import WeightUpdate, discard_updates, update_files, version_folder
from benchmarks.support import FloatArray, bootstrap, markdown_table, say, show
from tests.helpers.updates import write_update

COLUMNS = 4096  # of a weight, which has a quarter of a bucket
NEW_FILES = 2  # the first versions, which have no files of a removed version to overwrite; they are not counted


def table_row(directory: Path, *, num_bytes: int, bucket_bytes: int, rounds: int) -> list[str]:
    """Rates and extra memory of a model with about `num_bytes`."""
    weights = model_weights(num_bytes, bucket_bytes=bucket_bytes)
    files = MappedFiles()
    parameters = {name: torch.zeros_like(tensor) for name, tensor in weights}
    total, seconds = sum(tensor.nbytes for _, tensor in weights), list[tuple[float, ...]]()
    for version in range(rounds + NEW_FILES):
        copied = timed(lambda: put(iter(weights), parameters))
        written = timed(lambda v=version: publish(directory, v, weights, files=files, bucket_bytes=bucket_bytes))
        folder = version_folder(directory, version)
        hashed = timed(lambda f=folder: load(f, parameters, sums=lambda tensor: []))
        read = timed(lambda f=folder: load(f, parameters))
        say(
            f"{total / 1e6:.0f} MB, round {version}: copy {copied:.3f} s, write {written:.3f} s, "
            f"read {read:.3f} s, {hashed:.3f} s without sums"
        )
        if version >= NEW_FILES:
            seconds.append((copied, written, hashed, read))
    with own_memory() as growth:
        publish(directory, rounds + NEW_FILES, weights, files=files, bucket_bytes=bucket_bytes)
    times = np.array(seconds)
    rates = total / np.median(times, axis=0) / 1e9
    found = [
        bootstrap(lambda drawn, r=copy / (written + read): medians(r, drawn), units=rounds)
        for copy, written, read in ((times[:, 0], times[:, 1], times[:, column]) for column in (2, 3))
    ]
    return [
        f"{total / 1e6:.0f} MB",
        *(f"{rate:.1f}" for rate in rates),
        *(f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" for ratio in found),
        f"{growth[0] / bucket_bytes:.1f}",
    ]


def publish(
    directory: Path, version: int, weights: list[tuple[str, Tensor]], *, files: MappedFiles, bucket_bytes: int
) -> WeightUpdate:
    """Write a version after the previous one is loaded; the one before that is removed."""
    discard_updates(directory, keep_version=version - 1, spare_for=version_folder(directory, version))
    return write_update(directory, version=version, tensors=weights, bucket_bytes=bucket_bytes, files=files)


def model_weights(num_bytes: int, *, bucket_bytes: int) -> list[tuple[str, Tensor]]:
    """About `num_bytes` of bfloat16 weights of equal size, four of them in a bucket."""
    rows = bucket_bytes // 4 // (2 * COLUMNS)
    number = max(1, round(num_bytes / (rows * COLUMNS * 2)))
    return [
        (f"model.layers.{i:04}.weight", torch.randn(rows, COLUMNS).to(torch.bfloat16).contiguous())
        for i in range(number)
    ]


def sums_of(tensor: Tensor) -> list[list[int]]:
    """As of an engine with the dtype of the published weights."""
    return [value_sums(tensor)]


def load(
    folder: Path,
    parameters: dict[str, Tensor],
    *,
    rank: int = 0,
    ranks: int = 1,
    sums: Callable[[Tensor], list[list[int]]] = sums_of,
) -> None:
    """Load a version on a rank, whose parameters are the rows of its part of each tensor."""

    def put_part(tensors: Iterator[tuple[str, Tensor]]) -> None:
        put(((name, tensor.chunk(ranks)[rank]) for name, tensor in tensors), parameters)

    files = update_files(folder)
    load_share(mapped(files), put_part, sums=sums, rank=rank, ranks=ranks, ahead=len(files))


def ranks_row(folder: Path, *, ranks: int, rounds: int) -> list[str]:
    """Seconds and CPU seconds of a load of a version on all ranks of an engine."""
    context = multiprocessing.get_context("spawn")
    barrier, seconds = context.Barrier(ranks), context.SimpleQueue()
    processes = [
        context.Process(target=load_rounds, args=(folder, rank, ranks, rounds, barrier, seconds))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = np.array([seconds.get() for _ in processes])  # [ranks, 2, rounds]
    for process in processes:
        process.join()
    total = sum(file.stat().st_size for file in update_files(folder))
    last, cpu = np.median(found[:, 0].max(axis=0)), np.median(found[:, 1].sum(axis=0))
    return [str(ranks), f"{total / 1e6:.0f} MB", f"{total / ranks / 1e6:.0f} MB", f"{last:.3f}", f"{cpu:.3f}"]


def load_rounds(folder: Path, rank: int, ranks: int, rounds: int, barrier: Any, seconds: Any) -> None:
    """Body of the process of a rank. The first round is not counted."""
    torch.set_num_threads(1)
    files = update_files(folder)
    parameters = {
        name: torch.zeros_like(tensor.chunk(ranks)[rank]) for file in files for name, tensor in read_tensors(file)
    }
    found = list[tuple[float, float]]()
    for _ in range(rounds + 1):
        barrier.wait()
        started = time.process_time()
        found.append((timed(lambda: load(folder, parameters, rank=rank, ranks=ranks)), time.process_time() - started))
    seconds.put(list(zip(*found[1:], strict=True)))


def put(tensors: Iterator[tuple[str, Tensor]], parameters: dict[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same name."""
    for name, tensor in tensors:
        parameters[name].copy_(tensor)


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work`."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def medians(values: FloatArray, drawn: FloatArray) -> FloatArray:
    """Median of each row of draws [B, units] of the values [units]."""
    return np.array([float(np.median(np.repeat(values, row.astype(int)))) for row in drawn])


@contextmanager
def own_memory() -> Generator[list[int]]:
    """Largest growth inside the block, in bytes, of the memory that only this process has; sampled each millisecond."""
    process, ended, found = psutil.Process(), threading.Event(), [0]

    def now() -> int:
        held = process.memory_info()
        return held.rss - held.shared

    start = now()

    def sample() -> None:
        while not ended.wait(0.001):
            found[0] = max(found[0], now() - start)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="of the models")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="of the engines of the second table")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        rows = [
            table_row(Path(directory), num_bytes=mb * 1_000_000, bucket_bytes=args.bucket_mb << 20, rounds=args.rounds)
            for mb in args.mb
        ]
    header = ["model", "copy GB/s", "write GB/s", "hashed read GB/s", "read GB/s"]
    header += ["copy / (write + hashed read)", "copy / (write + read)", "extra memory, buckets"]
    show(markdown_table(header, rows))
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        weights = model_weights(args.mb[-1] * 1_000_000, bucket_bytes=args.bucket_mb << 20)
        folder = write_update(Path(directory), version=0, tensors=weights, bucket_bytes=args.bucket_mb << 20).path
        of_ranks = [ranks_row(folder, ranks=ranks, rounds=args.rounds) for ranks in args.ranks]
    show("\n" + markdown_table(["ranks", "model", "hashed by a rank", "load, s", "CPU, s"], of_ranks))


if __name__ == "__main__":
    main()
