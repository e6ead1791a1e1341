"""Speed of a version that is sent to other processes, against a broadcast of the same bytes by gloo.

One process is the trainer, each of the others is a node, or a rank of one engine. In each round the trainer broadcasts
the tensors of a model in buckets to all with gloo alone. Then it writes a version, and all nodes receive it into their
memory and verify it, as with `sync.route=broadcast`. At last it copies and hashes the version in its memory,
and all ranks receive it, hash their share and copy their part of each tensor, as with `sync.route=direct`. The ratio of
the seconds is the median over rounds, with its 95 % bootstrap interval. `broadcast` and `direct` are from the start of
the write or the copy until the last process has verified the version; `delivery` and `sent` are without it.

    python benchmarks/broadcast.py [--mb 100 1000] [--bucket-mb 64] [--nodes 2] [--rounds 9] [--directory /dev/shm]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.inference.loads import RankLoad, difference
from async_rl.weights.broadcast import VersionServer
from async_rl.weights.digest import digest_of, load_share
from async_rl.weights.group import received
from async_rl.weights.overwrite import MappedFiles
from async_rl.weights.snapshots import Snapshots
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import (
    Direct,
    Seat,
    Source,
    WeightUpdate,
    readable_by_ranks,
    update_of,
    version_folder,
)
from benchmarks.publish_files import NEW_FILES, medians, model_weights, publish, timed
from benchmarks.support import bootstrap, markdown_table, say, show

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=300)


def table_row(directory: Path, *, num_bytes: int, bucket_bytes: int, nodes: int, rounds: int) -> list[str]:
    """Rates of a model with about `num_bytes`."""
    weights = model_weights(num_bytes, bucket_bytes=bucket_bytes)
    buckets = [weights[first : first + 4] for first in range(0, len(weights), 4)]
    total, seconds = sum(tensor.nbytes for _, tensor in weights), list[tuple[float, ...]]()
    meeting = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    spawn, pipes = multiprocessing.get_context("spawn"), list[Connection]()
    processes = list[Any]()
    for index in range(nodes):
        ours, theirs = spawn.Pipe()
        arguments = (theirs, meeting.port, index + 1, nodes + 1, total // len(weights), directory / f"node-{index}")
        processes.append(spawn.Process(target=be_a_node, args=arguments))
        processes[-1].start()
        pipes.append(ours)
    group = gloo(meeting.port, rank=0, size=nodes + 1)
    server, held = VersionServer(HOST, directory / "trainer"), Snapshots()
    owner = VersionServer(HOST, held)

    def ask(work: Any) -> None:
        for pipe in pipes:
            pipe.send(work)

    def answers() -> None:
        for pipe in pipes:
            assert pipe.recv() == "done"

    def plain() -> None:
        ask(len(weights))
        for _, tensor in weights:
            broadcast(group, tensor)
        answers()

    def deliver(update: WeightUpdate) -> None:
        sources = (Source(server.address, tuple(range(len(update.buckets)))),)
        for index, pipe in enumerate(pipes):
            name = f"round {update.weights.version}"
            seat = Seat(delivery=name, index=index, size=nodes, sources=sources, backend="gloo", timeout_s=300.0)
            pipe.send((update, seat))
        answers()

    def copied(version: int) -> WeightUpdate:
        held.discard(keep_version=version - 1)
        copies = [held.start(version, number, bucket) for number, bucket in enumerate(buckets)]
        digests = [digest_of(copy.tensors()) for copy in copies]
        update = update_of(version_folder(directory, version), version=version, buckets=digests)
        sources = (Source(owner.address, tuple(range(len(buckets)))),)
        return replace(update, direct=Direct(sources, "gloo"))

    def send(update: WeightUpdate) -> None:
        ask(readable_by_ranks(update, timeout_s=300.0))
        found = [RankLoad.of(pipe.recv()) for pipe in pipes]
        assert difference(update, found) is None

    files = MappedFiles()
    for version in range(rounds + NEW_FILES):
        alone = timed(plain)
        updates: list[WeightUpdate] = []
        written = timed(
            lambda v=version, u=updates: u.append(
                publish(directory / "trainer", v, weights, files=files, bucket_bytes=bucket_bytes)
            )
        )
        delivered = timed(lambda u=updates: deliver(u[0]))
        copying = timed(lambda v=version, u=updates: u.append(copied(v)))
        sent = timed(lambda u=updates: send(u[1]))
        say(
            f"{total / 1e6:.0f} MB, round {version}: gloo {alone:.3f} s, "
            f"write {written:.3f}, delivery {delivered:.3f}, copy {copying:.3f}, sent {sent:.3f}"
        )
        if version >= NEW_FILES:
            seconds.append((alone, written + delivered, delivered, copying + sent, sent))
    ask(None)
    for process in processes:
        process.join()
    server.close()
    owner.close()
    times = np.array(seconds)
    rates = total / np.median(times, axis=0) / 1e9
    intervals = [
        bootstrap(lambda drawn, of=times[:, 0] / times[:, column]: medians(of, drawn), units=rounds)
        for column in (1, 2, 3, 4)
    ]
    return [
        f"{total / 1e6:.0f} MB",
        *(f"{rate:.2f}" for rate in rates),
        *(f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" for found in intervals),
    ]


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
                broadcast(group, buffer)
        elif isinstance(work, str):
            pipe.send(load(work, parameters, rank=rank - 1, ranks=size - 1))
            continue
        else:
            store.receive(*work)
        pipe.send("done")
    store.release()


def load(version: str, parameters: dict[str, Tensor], *, rank: int, ranks: int) -> dict[str, Any]:
    """Report of a rank that receives a version and copies its rows of each tensor."""

    def put(tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            part = tensor.chunk(ranks)[rank]
            parameters.setdefault(name, torch.empty_like(part)).copy_(part)

    place = {"rank": rank, "ranks": ranks}
    with closing(received(json.loads(version), device=torch.device("cpu"), **place)) as buckets:
        report = load_share(buckets, put, sums=lambda _: [], **place)
    return report | {"parameters": {}}


def gloo(port: int, *, rank: int, size: int) -> Any:
    """A group of all processes."""
    store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    return dist.ProcessGroupGloo(PrefixStore("plain", store), rank, size, TIMEOUT)


def broadcast(group: Any, tensor: Tensor) -> None:
    """One tensor of rank 0 to all."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait(TIMEOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="of the models")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    for mb in args.mb:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            sizes = {"num_bytes": mb * 1_000_000, "bucket_bytes": args.bucket_mb << 20}
            rows.append(table_row(Path(directory), **sizes, nodes=args.nodes, rounds=args.rounds))
    routes = ["broadcast", "delivery", "direct", "sent"]
    header = ["model", "gloo GB/s", *(f"{route} GB/s" for route in routes), *(f"{route} / gloo" for route in routes)]
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
