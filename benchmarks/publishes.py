"""Speed of a published version, without engines: each part against a plain transfer of the same bytes, round by round.

    files      a process writes the bfloat16 layers of a model into shared memory in buckets, as an owner does. Then it
               reads, verifies and copies them into parameters, as an engine of one rank does. The peer is one copy
    broadcast  a process sends a version to others. With `sync.route=broadcast` it writes the version, and all nodes
               receive it into their memory and verify it; with `sync.route=direct` it copies and hashes it in memory,
               and all ranks of an engine receive it, hash their share and copy their part. The peer is gloo alone.
               `delivery` and `sent` are without the write and the copy
    delta      size and speed of a version as changes. The weights are N(0, 0.02); each version is a step of Adam with
               random gradients, rounded to bfloat16. The size is compared with the dense bytes and with the entropy of
               the change: that of "changed or not", plus that of the steps of the changed values

Figures are medians over rounds; ratios have 95 % bootstrap intervals.

    python benchmarks/publishes.py [--cases files broadcast delta] [--mb 100 1000] [--rounds 9] [--nodes 2]
        [--lr 1e-6 3e-6 1e-5] [--bucket-mb 64] [--directory /dev/shm]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.inference.loads import RankLoad, difference
from async_rl.weights.broadcast import VersionServer
from async_rl.weights.checksum import value_sums
from async_rl.weights.delta import decode, encode
from async_rl.weights.digest import digest_of, load_share, mapped
from async_rl.weights.group import received
from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.snapshots import Snapshots
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import (
    Direct,
    Seat,
    Source,
    WeightUpdate,
    discard_updates,
    readable_by_ranks,
    update_files,
    update_of,
    version_folder,
)
from benchmarks.support import markdown_table, paired_ratio, say, show
from tests.helpers.updates import write_update

COLUMNS = 4096  # of a weight, which has a quarter of a bucket
NEW_FILES = 2  # the first versions, which have no files of a removed version to overwrite; they are not counted
DELTA_BYTES = 32_000_000
BETAS = 0.9, 0.999
T = TypeVar("T")
HOST, TIMEOUT = "127.0.0.1", timedelta(seconds=300)
Weights = list[tuple[str, Tensor]]
Sums = Callable[[Tensor], list[list[int]]]


# ---- shared memory


def files(args: argparse.Namespace, directory: Path, mb: int) -> list[str]:
    """Rates of a model."""
    weights, mapped_files = model_weights(mb, args), MappedFiles()
    parameters = {name: torch.zeros_like(tensor) for name, tensor in weights}
    seconds: list[tuple[float, ...]] = []
    for version in range(args.rounds + NEW_FILES):
        copied = timed(lambda: put(iter(weights), parameters))
        written, update = timed_result(lambda v=version: publish(directory, v, weights, mapped_files, args))
        hashed = timed(lambda u=update: load(u.path, parameters, sums=lambda _: []))
        read = timed(lambda u=update: load(u.path, parameters))
        say(f"{mb} MB, round {version}: {copied:.3f} s, {written:.3f} s, {hashed:.3f} s, {read:.3f} s")
        if version >= NEW_FILES:
            seconds.append((copied, written, hashed, read))
    copy, write, *reads = np.array(seconds).T
    ratios = (paired_ratio(copy, write + read) for read in reads)
    return [*rates(weights, (copy, write, *reads)), *(f"{ratio:.2f}" for ratio in ratios)]


def publish(
    directory: Path, version: int, weights: Weights, mapped_files: MappedFiles, args: argparse.Namespace
) -> WeightUpdate:
    """Write a version after the previous one is loaded; the one before that is removed."""
    discard_updates(directory, keep_version=version - 1, spare_for=version_folder(directory, version))
    bucket_bytes = args.bucket_mb << 20
    return write_update(directory, version=version, tensors=weights, bucket_bytes=bucket_bytes, files=mapped_files)


def model_weights(mb: int, args: argparse.Namespace) -> Weights:
    """About `mb` megabytes of bfloat16 weights of equal size, four in a bucket."""
    rows = (args.bucket_mb << 20) // 4 // (2 * COLUMNS)
    number = max(1, round(mb * 1_000_000 / (rows * COLUMNS * 2)))
    return [(f"model.layers.{i:04}.weight", torch.randn(rows, COLUMNS).to(torch.bfloat16)) for i in range(number)]


def rates(weights: Weights, seconds: Sequence[Any]) -> list[str]:
    """Size of a model, and GB/s of each way."""
    total = sum(tensor.nbytes for _, tensor in weights)
    return [f"{total / 1e6:.0f} MB", *(f"{total / np.median(taken) / 1e9:.2f}" for taken in seconds)]


def sums_of(tensor: Tensor) -> list[list[int]]:
    """As of an engine with the dtype of the published weights."""
    return [value_sums(tensor)]


def load(folder: Path, parameters: dict[str, Tensor], *, sums: Sums = sums_of) -> None:
    """Load a version into parameters, as an engine of one rank does."""
    paths = update_files(folder)
    load_share(mapped(paths), lambda tensors: put(tensors, parameters), sums=sums, rank=0, ranks=1, ahead=len(paths))


def put(tensors: Iterator[tuple[str, Tensor]], parameters: dict[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same name."""
    for name, tensor in tensors:
        parameters.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def timed_result(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds and result of `work`."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work`."""
    return timed_result(work)[0]


# ---- broadcast


def broadcast(args: argparse.Namespace, directory: Path, mb: int) -> list[str]:
    """Rates of a model."""
    weights, mapped_files = model_weights(mb, args), MappedFiles()
    buckets = [weights[first : first + 4] for first in range(0, len(weights), 4)]
    meeting = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    spawn, pipes, processes = multiprocessing.get_context("spawn"), list[Connection](), list[Any]()
    for index in range(args.nodes):
        ours, theirs = spawn.Pipe()
        given = (theirs, meeting.port, index + 1, args.nodes + 1, weights[0][1].nbytes, directory / f"node-{index}")
        processes.append(spawn.Process(target=be_a_node, args=given))
        processes[-1].start()
        pipes.append(ours)
    group, held = gloo(meeting.port, rank=0, size=args.nodes + 1), Snapshots()
    server, owner = VersionServer(HOST, directory / "trainer"), VersionServer(HOST, held)

    def ask(work: Any) -> None:
        for pipe in pipes:
            pipe.send(work)

    def answers() -> None:
        for pipe in pipes:
            assert pipe.recv() == "done"

    def plain() -> None:
        ask(len(weights))
        for _, tensor in weights:
            send_tensor(group, tensor)
        answers()

    def deliver(update: WeightUpdate) -> None:
        sources = (Source(server.address, tuple(range(len(update.buckets)))),)
        name, size = f"round {update.weights.version}", args.nodes
        for index, pipe in enumerate(pipes):
            seat = Seat(delivery=name, index=index, size=size, sources=sources, backend="gloo", timeout_s=300.0)
            pipe.send((update, seat))
        answers()

    def copied(version: int) -> WeightUpdate:
        held.discard(keep_version=version - 1)
        copies = [held.start(version, number, bucket) for number, bucket in enumerate(buckets)]
        digests = [digest_of(copy.tensors()) for copy in copies]
        update = update_of(version_folder(directory, version), version=version, buckets=digests)
        return replace(update, direct=Direct((Source(owner.address, tuple(range(len(buckets)))),), "gloo"))

    def send(update: WeightUpdate) -> None:
        ask(readable_by_ranks(update, timeout_s=300.0))
        found = [RankLoad.of(pipe.recv()) for pipe in pipes]
        assert difference(update, found) is None

    seconds: list[tuple[float, ...]] = []
    for version in range(args.rounds + NEW_FILES):
        alone = timed(plain)
        write, update = timed_result(lambda v=version: publish(directory / "trainer", v, weights, mapped_files, args))
        delivery = timed(lambda u=update: deliver(u))
        copy, update = timed_result(lambda v=version: copied(v))
        sent = timed(lambda u=update: send(u))
        say(f"{mb} MB, {version}: gloo {alone:.3f} s, {write:.3f} + {delivery:.3f} s, {copy:.3f} + {sent:.3f} s")
        if version >= NEW_FILES:
            seconds.append((alone, write + delivery, delivery, copy + sent, sent))
    ask(None)
    for process in processes:
        process.join()
    server.close()
    owner.close()
    alone, *others = np.array(seconds).T
    return [*rates(weights, (alone, *others)), *(f"{paired_ratio(alone, other):.2f}" for other in others)]


def be_a_node(pipe: Connection, port: int, rank: int, size: int, tensor_bytes: int, directory: Path) -> None:
    """Take part in broadcasts (a number of tensors) and deliveries until None comes.

    The work of a node is an update and a seat; that of a rank is a version as `readable_by_ranks` describes it.
    """
    torch.set_num_threads(1)
    group, store = gloo(port, rank=rank, size=size), LocalStore(directory, host=HOST)
    buffer, parameters = torch.empty(tensor_bytes // 2, dtype=torch.bfloat16), dict[str, Tensor]()
    while (work := pipe.recv()) is not None:
        if isinstance(work, int):
            for _ in range(work):
                send_tensor(group, buffer)
        elif isinstance(work, str):
            pipe.send(receive(work, parameters, rank=rank - 1, ranks=size - 1))
            continue
        else:
            store.receive(*work)
        pipe.send("done")
    store.release()


def receive(version: str, parameters: dict[str, Tensor], *, rank: int, ranks: int) -> dict[str, Any]:
    """Report of a rank that receives a version and copies its rows of each tensor."""

    def put_part(tensors: Iterator[tuple[str, Tensor]]) -> None:
        put(((name, tensor.chunk(ranks)[rank]) for name, tensor in tensors), parameters)

    place = {"rank": rank, "ranks": ranks}
    with closing(received(json.loads(version), device=torch.device("cpu"), **place)) as buckets:
        return load_share(buckets, put_part, sums=lambda _: [], **place) | {"parameters": {}}


def gloo(port: int, *, rank: int, size: int) -> Any:
    """A group of all processes."""
    store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    return dist.ProcessGroupGloo(PrefixStore("plain", store), rank, size, TIMEOUT)


def send_tensor(group: Any, tensor: Tensor) -> None:
    """A tensor of rank 0 to all."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait(TIMEOUT)


# ---- delta


def adam_versions(num_values: int, *, lr: float, versions: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield bfloat16 [num_values] of the base and then of each version."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(num_values, generator=generator) * 0.02
    mean, square = torch.zeros(num_values), torch.zeros(num_values)
    yield master.bfloat16()
    for step in range(1, versions + 1):
        gradient = torch.randn(num_values, generator=generator)
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient * gradient, 1 - BETAS[1])
        scale = (square / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
        master.addcdiv_(mean, scale, value=-lr / (1 - BETAS[0] ** step))
        yield master.bfloat16()


def change_entropy(old: Tensor, new: Tensor) -> float:
    """Entropy in bytes of the change between two bfloat16 tensors [n].

    This is n times the entropy of "changed or not", plus the empirical entropy of the steps of all changed values.
    """
    before, after = (t.reshape(-1).view(torch.int16).numpy().astype(np.int64) for t in (old, new))
    steps = np.where(after < 0, -32769 - after, after) - np.where(before < 0, -32769 - before, before)
    changed = np.count_nonzero(steps)
    counts = np.unique(steps[steps != 0], return_counts=True)[1]
    return _bits(np.array([changed, len(steps) - changed])) / 8 + _bits(counts) / 8


def _bits(counts: np.ndarray) -> float:
    """Number of values times the entropy of their histogram."""
    present = counts[counts > 0]
    return float(-(present * np.log2(present / present.sum())).sum())


def delta(args: argparse.Namespace, _directory: Path, lr: float) -> list[str]:
    """Sizes and rates under a learning rate. The first version is the warm-up."""
    old, *states = adam_versions(DELTA_BYTES // 2, lr=lr, versions=args.rounds + 1)
    found: list[tuple[float, ...]] = []
    for new in states:
        base = {"weight": old}
        copied = timed(new.clone)
        encoded, data = timed_result(lambda b=base, n=new: encode([("weight", n)], base=b, base_digest="base"))
        decoded, tensors = timed_result(lambda b=base, d=data: decode(d, base=b, base_digest="base"))
        assert torch.equal(tensors[0][1].view(torch.int16), new.view(torch.int16))
        changed = float((new.view(torch.int16) != old.view(torch.int16)).double().mean())
        sizes = changed, len(data) / new.nbytes, len(data) / change_entropy(old, new)
        found.append((*sizes, new.nbytes / encoded / 1e9, new.nbytes / decoded / 1e9, new.nbytes / copied / 1e9))
        old = new
    changed, of_dense, of_entropy, *speeds = np.median(found[1:], axis=0)
    worst = max(each[2] for each in found[1:])
    sizes = f"{changed:.2%}", f"{of_dense:.2%}", f"{of_entropy:.3f} (at most {worst:.3f})"
    return [f"{lr:g}", *sizes, *(f"{speed:.2f}" for speed in speeds)]


# ---- command line

Case = Callable[[argparse.Namespace, Path, Any], list[str]]
ROUTES = ("broadcast", "delivery", "direct", "sent")
FILES = "model, copy GB/s, write GB/s, hashed read GB/s, read GB/s, copy / (write + hashed read), copy / (write + read)"
SIZES = "learning rate, changed, of the bytes, of the entropy, encode GB/s, decode GB/s, copy GB/s"
CASES: dict[str, tuple[Case, str, Sequence[str]]] = {
    "files": (files, "mb", FILES.split(", ")),
    "broadcast": (
        broadcast,
        "mb",
        ("model", "gloo GB/s", *(f"{route} GB/s" for route in ROUTES), *(f"{route} / gloo" for route in ROUTES)),
    ),
    "delta": (delta, "lr", SIZES.split(", ")),
}
"""Name -> (row of a value, argument with the values, header)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="sizes of the models")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    for name, default in (("rounds", 9), ("nodes", 2), ("bucket-mb", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.cases:
        row, values, header = CASES[name]
        rows: list[list[str]] = []
        for value in getattr(args, values):
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                rows.append(row(args, Path(directory), value))
        show(f"\n{name}\n\n{markdown_table(header, rows)}")


if __name__ == "__main__":
    main()
