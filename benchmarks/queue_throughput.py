"""Groups from the process of a rollout worker to that of a trainer: the queue against peers and against limits.

    queue             as in a run: the driver puts heads into the queue's actor, content is in the object store
    queue, journaled  the same; every segment is written to content files first, and the queue stores its events
    deque of pickles  a plain Ray actor with a deque; the arrays are pickled to bytes and back
    deque of arrays   the same actor; the arrays are given to Ray as they are
    TransferQueue     the package of PyPI, where it can be imported; two storage units
    ray put + get     limit: the arrays into Ray's object store and back, in one process
    memcpy            limit: one copy of the arrays in one process
    file              limit of the journal: the arrays into files, of which as many are kept as of the journal

All ways send the same arrays, take turns in one run, and take 4 groups together, 16 on their way at most. Brackets are
quartiles over rounds of the ratio in the same round. Bytes copied are counted by the raylet (objects made in the
object store) and by the kernel (sent over the loopback interface), per byte of the arrays; copies within a process
are not counted.

    python benchmarks/queue_throughput.py [--rounds 7] [--tokens 1024 4096 32768] [--trajectories 4] [--mb 128]
        [--directory DIR] [--transfer-queue DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.cluster.queue import QueueActor
from benchmarks.queue_ways import (
    AT_ONCE,
    BATCH,
    DequeActor,
    DequeEnd,
    End,
    FileEnd,
    Host,
    MemcpyEnd,
    ObjectStoreEnd,
    PlainQueue,
    QueueWay,
    RolloutEnd,
    Shape,
    TransferQueueEnd,
    kimi_k2,
    qwen3,
)
from benchmarks.support import markdown_table, say, show
from message_queue.recovery import JournalPlace
from message_queue.staleness import StalenessConfig

ROOT = Path(__file__).resolve().parent.parent
QUEUE, JOURNALED = "queue", "queue, journaled"
NO_BOUND = StalenessConfig(max_staleness=1_000_000)
STORE_BYTES = 2 << 30
MAX_GROUPS = 64  # of one round


@dataclass(frozen=True, slots=True)
class Way:
    """From process to process."""

    name: str
    send: End
    """The rollouter's end."""
    receive: End | None
    """The trainer's end; None if the rollouter's process does it all."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Both processes."""

    rollouter: Any
    """Actor of a Host."""
    trainer: Any
    """Actor of a Host."""
    shape: Shape
    """Of the groups."""


@dataclass(slots=True)
class Seen:
    """What was measured of one way, one entry for each round. stored, sent: bytes per byte of the arrays."""

    seconds: list[float] = field(default_factory=list[float])
    stored: list[float] = field(default_factory=list[float])
    sent: list[float] = field(default_factory=list[float])


class Counters:
    """Bytes that were made in the object store, and that went over the loopback interface, since it was made."""

    def __init__(self) -> None:
        self._node = ray.nodes()[0]
        self._started = self._now()

    def since(self) -> tuple[float, float]:
        return tuple(now - then for now, then in zip(self._now(), self._started, strict=True))  # pyright: ignore

    def _now(self) -> tuple[int, int]:
        from ray._private.internal_api import node_stats

        node = self._node
        stats: Any = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
        return stats.store_stats.cumulative_created_bytes, psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def start(*, transfer_queue: Path | None) -> None:
    """Ray on this machine; its processes find this checkout, and TransferQueue."""
    paths = [str(ROOT), *([str(transfer_queue)] if transfer_queue else []), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TQ_LOGGING_LEVEL": "ERROR"}
    ray.init(
        address="local",
        num_cpus=16,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


async def open_queue(stack: AsyncExitStack, name: str, *, directory: Path | None, hosts: Hosts) -> QueueWay:
    """A queue with a journal and content files if there is a directory."""
    options = {"batch_groups": BATCH, "staleness": NO_BOUND, "max_ready": AT_ONCE}
    folder = None
    if directory is None:
        queue: Any = ray.remote(PlainQueue).options(max_concurrency=64).remote(**options)
    else:
        folder = _folder(stack, directory)
        queue = QueueActor.remote(**options)
        await queue.open.remote(JournalPlace(directory=folder, run="benchmark"))
    stack.callback(ray.kill, queue)
    content = None if folder is None else folder / "content"
    await hosts.rollouter.open.remote(name, RolloutEnd(directory=content), hosts.shape)
    return QueueWay(name, queue, rollouter=hosts.rollouter, trainer=hosts.trainer)


def _folder(stack: AsyncExitStack, directory: Path) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="queue-benchmark-", dir=directory))).resolve()


async def make_ways(stack: AsyncExitStack, *, directory: Path, with_peer: bool, hosts: Hosts) -> list[Way | QueueWay]:
    """All ways, ready to be used."""

    def deque_actor() -> Any:
        actor: Any = ray.remote(DequeActor).options(max_concurrency=64).remote()
        stack.callback(ray.kill, actor)
        return actor

    ways: list[Way] = []
    for name, pickled in (("deque of pickles", True), ("deque of arrays", False)):
        actor = deque_actor()
        ways.append(Way(name, DequeEnd(actor, pickled=pickled), DequeEnd(actor, pickled=pickled)))
    if with_peer:
        actor = deque_actor()
        ways.append(Way("TransferQueue", TransferQueueEnd(actor), TransferQueueEnd(actor)))
    folder = _folder(stack, directory)
    ways += [
        Way("ray put + get", ObjectStoreEnd(), None),
        Way("memcpy", MemcpyEnd(), None),
        Way("file", FileEnd(folder), None),
    ]
    for way in ways:
        await hosts.rollouter.open.remote(way.name, way.send, hosts.shape)
        if way.receive is not None:
            await hosts.trainer.open.remote(way.name, way.receive, hosts.shape)
    queues = [
        await open_queue(stack, name, directory=folder, hosts=hosts)
        for name, folder in ((QUEUE, None), (JOURNALED, directory))
    ]
    return [*queues, *ways]


async def burst(way: Way | QueueWay, *, hosts: Hosts, groups: int) -> float:
    """Seconds for so many groups; of a limit those in its process."""
    started = time.perf_counter()
    if isinstance(way, QueueWay):
        await way.run(groups)
    elif way.receive is None:
        return await hosts.rollouter.send.remote(way.name, groups)
    else:
        await asyncio.gather(
            hosts.rollouter.send.remote(way.name, groups), hosts.trainer.receive.remote(way.name, groups)
        )
    return time.perf_counter() - started


async def measure(shape: Shape, *, rounds: int, groups: int, directory: Path, with_peer: bool) -> dict[str, Seen]:
    """Way -> what was measured; the order turns with the round, and a first round warms up."""
    async with AsyncExitStack() as stack:
        rollouter, trainer = (ray.remote(Host).options(max_concurrency=64).remote() for _ in range(2))
        for actor in (rollouter, trainer):
            stack.callback(ray.kill, actor)
        hosts = Hosts(rollouter, trainer, shape)
        ways = await make_ways(stack, directory=directory, with_peer=with_peer, hosts=hosts)
        found = {way.name: Seen() for way in ways}
        for number in range(-1, rounds):
            shift = number % len(ways)
            for way in ways[shift:] + ways[:shift]:
                counters = Counters()
                seconds = await burst(way, hosts=hosts, groups=groups)
                if number >= 0:
                    stored, sent = (count / groups / shape.num_bytes for count in counters.since())
                    seen = found[way.name]
                    seen.seconds.append(seconds)
                    seen.stored.append(stored)
                    seen.sent.append(sent)
        return found


def rows_of(shape: Shape, found: dict[str, Seen], *, groups: int) -> list[list[str]]:
    """One row for each way: its figures, and both queues against it."""
    rows: list[list[str]] = []
    for name, seen in found.items():
        seconds = float(np.median(seen.seconds))
        rows.append(
            [
                f"{shape.name}, {shape.trajectories} x {shape.tokens} tokens, {shape.num_bytes / 1e6:.1f} MB",
                name,
                f"{groups / seconds:.0f}",
                f"{groups * shape.num_bytes / seconds / 1e9:.2f}",
                f"{np.median(seen.stored):.2f}",
                f"{np.median(seen.sent):.2f}",
                *(ratio(found[queue].seconds, seen.seconds) for queue in (QUEUE, JOURNALED)),
            ]
        )
    return rows


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How many times as fast: median and quartiles over rounds."""
    low, middle, high = np.quantile([b / a for a, b in zip(ours, theirs, strict=True)], (0.25, 0.5, 0.75))
    return f"{middle:.2f} [{low:.2f} .. {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 32768])
    parser.add_argument("--trajectories", type=int, default=4, help="of a group")
    parser.add_argument("--mb", type=int, default=128, help="that a way sends in a round, about")
    parser.add_argument("--directory", type=Path, default=Path(), help="of the journal")
    parser.add_argument("--transfer-queue", type=Path, help="folder that holds the package transfer_queue")
    args = parser.parse_args()
    if args.transfer_queue:
        sys.path.append(str(args.transfer_queue))
    with_peer = importlib.util.find_spec("transfer_queue") is not None
    if not with_peer:
        say("TransferQueue is left out: no package transfer_queue; pip install --no-deps --target DIR TransferQueue")
    rows: list[list[str]] = []
    start(transfer_queue=args.transfer_queue)
    try:
        for shape in (make(tokens, args.trajectories) for tokens in args.tokens for make in (qwen3, kimi_k2)):
            groups = max(BATCH, min(MAX_GROUPS, args.mb * 1_000_000 // shape.num_bytes) // BATCH * BATCH)
            found = asyncio.run(
                measure(
                    shape,
                    rounds=args.rounds,
                    groups=groups,
                    directory=args.directory,
                    with_peer=with_peer,
                )
            )
            rows += (table := rows_of(shape, found, groups=groups))
            say("\n".join(" | ".join(row) for row in table))
    finally:
        ray.shutdown()
    header = ["groups", "way", "groups/s", "GB/s", "stored", "sockets", "queue / way", "journaled / way"]
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
