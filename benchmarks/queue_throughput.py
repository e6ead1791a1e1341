"""Groups from the process of a rollout worker to that of a trainer: the queue against peers that write nothing to disk.

    queue             as in a run: the driver puts heads into the queue's actor, content is in the object store
    queue, journaled  the same; every segment is written to content files first, and the queue stores its events
    pickles           a plain Ray actor with a deque; the arrays are pickled to bytes and back
    arrays            the same actor; the arrays are given to Ray as they are
    TransferQueue     the package of PyPI, where it can be imported; two storage units

All ways send the same arrays, take turns in one run, and take 4 groups together, 16 on their way at most. Ratios are
medians over rounds with their 95 % bootstrap intervals.

    python benchmarks/queue_throughput.py [--rounds 7] [--tokens 1024 4096 32768] [--trajectories 4] [--mb 128]
        [--directory DIR] [--transfer-queue DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import pickle
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from async_rl.cluster.batching import BatchingClient, BatchingServer, Call, Reply
from async_rl.cluster.queue import REFUSALS, QueueActor, QueueUnavailable
from async_rl.config import QueueConfig
from async_rl.rollout.content.writer import ContentWriter
from async_rl.rollout.recorded import RolloutLog
from benchmarks.support import in_turns, markdown_table, paired_ratio, say, show
from message_queue.heads import GroupHead, head_of
from message_queue.policies import StalenessConfig, build_policy
from message_queue.queue import Batch, TrajectoryQueue
from message_queue.recovery import JournalPlace
from message_queue.tokens import RoutingSpec
from message_queue.training_sequence import GroupContent, content_of
from message_queue.trajectory import Admission, PromptGroup, Trajectory
from tests.helpers.groups import routed, segment, trajectory
from tests.helpers.stored import records_of

ROOT = Path(__file__).resolve().parent.parent
QUEUE, JOURNALED = "queue", "queue, journaled"
PROMPT_TOKENS = 256
AT_ONCE = 16  # groups that are on their way at most
BATCH = 4  # groups that the trainer takes together
SAVE_EVERY = 4  # batches between two checkpoints
KEPT = 64  # groups whose content stays on disk; older ones are trained
MAX_GROUPS = 64  # of one round
STORE_BYTES = 2 << 30
NO_BOUND = StalenessConfig(max_staleness=1_000_000)
PARTITION, FIELDS = "benchmark", ("token_ids", "logprobs", "routed_experts")
LAYERS = {  # as Qwen3-30B-A3B and Kimi-K2 have them
    "48 x 8 of 128": RoutingSpec(layers=tuple(range(48)), num_experts=128, top_k=8),
    "60 x 8 of 384": RoutingSpec(layers=tuple(range(1, 61)), num_experts=384, top_k=8),
}
Arrays = list[NDArray[Any]]
Shape = tuple[str, int, int]
_method = cast(Any, ray.method)  # whose stubs do not know all of its arguments


def make_group(layers: str, tokens: int, trajectories: int) -> tuple[list[Trajectory], Arrays]:
    """Closed trajectories of a prompt and one segment; token ids, logprobs and rows of each."""
    spec, made, arrays = LAYERS[layers], list[Trajectory](), Arrays()
    for _ in range(trajectories):
        part = replace(segment(tokens - PROMPT_TOKENS), routed_experts=routed(0, tokens - 1, spec=spec))
        assert part.routed_experts is not None
        made.append(trajectory(part, prompt=PROMPT_TOKENS, routing=spec))
        ids = np.concatenate([made[-1].turns[0].observation, part.token_ids])
        arrays += [ids, part.logprobs, part.routed_experts.experts]
    return made, arrays


# ---- the queue


class PlainQueue:
    """Process of a queue without a journal."""

    def __init__(self) -> None:
        queue = TrajectoryQueue(build_policy(NO_BOUND, batch_groups=BATCH), max_ready=AT_ONCE)
        self._server = BatchingServer()
        self._server.serve(queue, refusals=REFUSALS)

    async def exchange(self, client: str, calls: Sequence[Call], cancelled: Sequence[int]) -> list[Reply]:
        return await self._server.exchange(client, calls, cancelled)

    async def collect(self, client: str) -> list[Reply]:
        return await self._server.collect(client)


class QueueWay:
    """A run: the driver has groups rolled out, puts their heads into the queue, and gives the trainer references.

    The driver takes a batch while the trainer fetches the one before.

    Args:
        queue: actor of a QueueHost or a PlainQueue.
        rollouter: actor of the Host whose end `name` is a RolloutEnd.
        trainer: actor of a Host.
    """

    def __init__(self, name: str, queue: Any, *, rollouter: Any, trainer: Any) -> None:
        self._name, self._rollouter, self._trainer = name, rollouter, trainer
        self._calls: BatchingClient[TrajectoryQueue] = BatchingClient(
            queue, name="driver", server="the queue", timeout_s=60.0, lost=QueueUnavailable
        )
        self._contents: dict[int, Any] = {}
        self._prompt = self._step = 0

    async def run(self, groups: int) -> None:
        """Groups from the rollouter to the trainer, AT_ONCE on their way at most."""
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(groups):
                tasks.create_task(self._send(places))
            batch = await self._calls.call(TrajectoryQueue.take)
            for left in range(groups - BATCH, -1, -BATCH):
                following = tasks.create_task(self._calls.call(TrajectoryQueue.take)) if left else None
                await self._train(batch)
                if following is not None:
                    batch = await following

    async def _send(self, places: asyncio.Semaphore) -> None:
        async with places:
            self._prompt += 1
            admission = await self._calls.call(TrajectoryQueue.admit, self._prompt)
            head, content = self._rollouter.roll.remote(self._name, admission)
            self._contents[admission.group] = content
            await self._calls.call(TrajectoryQueue.put, await head)

    async def _train(self, batch: Batch) -> None:
        groups = [head.group for head in batch.groups]
        await self._trainer.fetch.remote([self._contents.pop(group) for group in groups])
        self._step += 1
        await self._calls.call(TrajectoryQueue.trained, groups, train_step=self._step)
        if self._step % SAVE_EVERY == 0:
            await self._calls.call(TrajectoryQueue.checkpointed, self._step)


class RolloutEnd:
    """Head and content of groups in the process of a rollout worker.

    Args:
        directory: folder of content files, to which segments are appended first; None writes nothing.
    """

    def __init__(self, *, directory: Path | None) -> None:
        self._directory = directory
        self._writer: ContentWriter | None = None
        self._written: deque[int] = deque()

    async def open(self) -> None:
        if self._directory is not None:
            self._writer = await ContentWriter.open(self._directory, name="rollout", run="benchmark", fsync=False)

    async def roll(self, contents: Sequence[Trajectory], admission: Admission) -> tuple[GroupHead, GroupContent]:
        """Answer of a worker whose group is finished."""
        if self._writer is not None:
            log = RolloutLog(self._writer)
            for number, each in enumerate(contents):
                for record in records_of(each, group=admission.group, number=number):
                    log.append(record)
            await log.flush()
            self._written.append(admission.group)
            if len(self._written) >= KEPT + BATCH:
                await self._writer.forget([self._written.popleft() for _ in range(BATCH)])
        group = PromptGroup(
            group=admission.group,
            prompt=admission.prompt,
            admitted_version=admission.admitted_version,
            admitted_update=admission.admitted_update,
            trajectories=list(contents),
        )
        return head_of(group), content_of(group)


# ---- peers and limits


class DequeActor:
    """A deque with a condition."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = asyncio.Condition()

    async def put(self, item: Any) -> None:
        async with self._changed:
            self._items.append(item)
            self._changed.notify()

    async def get(self, count: int) -> list[Any]:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._items) >= count)
            return [self._items.popleft() for _ in range(count)]


class End:
    """One end of a way with a DequeActor, in its process: arrays as they are, the next batch on its way."""

    def __init__(self, deque_actor: Any) -> None:
        self._actor = deque_actor
        self._next: Any = None

    async def open(self) -> None: ...

    async def send(self, arrays: Arrays) -> None:
        """Send a group."""
        await self._actor.put.remote(await self.pack(arrays))

    async def receive(self) -> None:
        """Take BATCH groups."""
        items = await (self._next or self._actor.get.remote(BATCH))
        self._next = self._actor.get.remote(BATCH)
        await asyncio.gather(*map(self.unpack, items))

    async def pack(self, arrays: Arrays) -> Any:
        return arrays

    async def unpack(self, item: Any) -> None:
        del item


class PickleEnd(End):
    """The arrays are pickled to bytes."""

    async def pack(self, arrays: Arrays) -> bytes:
        return pickle.dumps(arrays)

    async def unpack(self, item: bytes) -> None:
        pickle.loads(item)


class TransferQueueEnd(End):
    """TransferQueue's client; the deque tells about samples that are ready, so that its controller is not polled."""

    async def open(self) -> None:
        import transfer_queue  # pyright: ignore[reportMissingImports] # no dependency of the project
        from transfer_queue.interface import _maybe_create_tq_client  # pyright: ignore

        transfer_queue.init()
        self._client: Any = _maybe_create_tq_client()

    async def pack(self, arrays: Arrays) -> Any:
        import torch
        from tensordict import TensorDict

        stacked = [np.stack(arrays[i :: len(FIELDS)]) for i in range(len(FIELDS))]
        if stacked[2].dtype == np.uint16:
            stacked[2] = stacked[2].view(np.int16)
        fields = {name: torch.from_numpy(array) for name, array in zip(FIELDS, stacked, strict=True)}
        return await self._client.async_put(TensorDict(fields, batch_size=[len(stacked[0])]), partition_id=PARTITION)

    async def unpack(self, item: Any) -> None:
        data = await self._client.async_get_data(item)
        assert len(data["routed_experts"])
        await self._client.async_clear_samples(item)


class Host:
    """The process of a rollouter or of a trainer, with a group that it sends repeatedly. shape: see `make_group`."""

    def __init__(self, shape: Shape) -> None:
        self._group = make_group(*shape)
        self._ends: dict[str, Any] = {}

    async def open(self, name: str, end: End | RolloutEnd) -> None:
        """Make an end ready."""
        self._ends[name] = end
        await end.open()

    async def send(self, name: str, groups: int) -> None:
        """Send so many, AT_ONCE at most on their way."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with places:
                await self._ends[name].send(self._group[1])

        await asyncio.gather(*(one() for _ in range(groups)))

    @_method(num_returns=2)
    async def roll(self, name: str, admission: Admission) -> tuple[GroupHead, GroupContent]:
        """Head and content of one group."""
        return await self._ends[name].roll(self._group[0], admission)

    async def fetch(self, contents: Sequence[Any]) -> None:
        """contents: references."""
        await asyncio.gather(*contents)

    async def receive(self, name: str, groups: int) -> None:
        """Receive so many."""
        for _ in range(0, groups, BATCH):
            await self._ends[name].receive()


# ---- measurement


def actor(stack: AsyncExitStack, cls: type, *arguments: Any) -> Any:
    """A Ray actor of a class of this benchmark."""
    remote: Any = ray.remote(cls)
    made = remote.options(max_concurrency=64).remote(*arguments)
    stack.callback(ray.kill, made)
    return made


async def make_ways(stack: AsyncExitStack, shape: Shape, folder: Path, *, with_peer: bool) -> dict[str, Any]:
    """Name -> coroutine function of a number of groups."""
    rollouter, trainer = actor(stack, Host, shape), actor(stack, Host, shape)
    sizes, of_queue = SimpleNamespace(groups_per_batch=BATCH, updates_per_batch=1), QueueConfig(max_ready=AT_ONCE)
    config = SimpleNamespace(rollout=sizes, trainer=sizes, staleness=NO_BOUND, queue=of_queue)
    journaled: Any = QueueActor.remote(config)
    stack.callback(ray.kill, journaled)
    await journaled.open.remote(JournalPlace(directory=folder, run="benchmark"))
    ways: dict[str, Any] = {}
    for name, queue, content in ((QUEUE, actor(stack, PlainQueue), None), (JOURNALED, journaled, folder / "content")):
        await rollouter.open.remote(name, RolloutEnd(directory=content))
        ways[name] = QueueWay(name, queue, rollouter=rollouter, trainer=trainer).run

    async def through(name: str, groups: int) -> None:
        await asyncio.gather(rollouter.send.remote(name, groups), trainer.receive.remote(name, groups))

    peers = {"pickles": PickleEnd, "arrays": End} | ({"TransferQueue": TransferQueueEnd} if with_peer else {})
    for name, end in peers.items():
        ready = actor(stack, DequeActor)
        await rollouter.open.remote(name, end(ready))
        await trainer.open.remote(name, end(ready))
        ways[name] = partial(through, name)
    return ways


async def measure(shape: Shape, folder: Path, rounds: int, groups: int, *, with_peer: bool) -> dict[str, list[float]]:
    """Way -> seconds of each round."""
    async with AsyncExitStack() as stack:
        ways = await make_ways(stack, shape, folder, with_peer=with_peer)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number, name in in_turns(ways, rounds=rounds):
            started = time.perf_counter()
            await ways[name](groups)
            if number >= 0:
                found[name].append(time.perf_counter() - started)
        return found


def start_ray(transfer_queue: Path | None) -> None:
    """Ray on this machine; its processes find this checkout, and TransferQueue."""
    paths = [str(ROOT), *([str(transfer_queue)] if transfer_queue else []), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TQ_LOGGING_LEVEL": "ERROR"}
    quiet: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(address="local", num_cpus=16, object_store_memory=STORE_BYTES, **quiet)


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
    start_ray(args.transfer_queue)
    try:
        for tokens, layers in ((tokens, layers) for tokens in args.tokens for layers in LAYERS):
            shape = (layers, tokens, args.trajectories)
            num_bytes = sum(array.nbytes for array in make_group(*shape)[1])
            groups = max(BATCH, min(MAX_GROUPS, args.mb * 1_000_000 // num_bytes) // BATCH * BATCH)
            with tempfile.TemporaryDirectory(prefix="queue-benchmark-", dir=args.directory.resolve()) as folder:
                found = asyncio.run(measure(shape, Path(folder), args.rounds, groups, with_peer=with_peer))
            group = f"{layers}, {args.trajectories} x {tokens} tokens, {num_bytes / 1e6:.1f} MB"
            for name, seconds in found.items():
                speed = f"{groups * num_bytes / median(seconds) / 1e9:.2f}"
                ratios = (f"{paired_ratio(seconds, found[queue]):.2f}" for queue in (QUEUE, JOURNALED))
                rows.append([group, name, speed, *ratios])
                say(" | ".join(rows[-1]))
    finally:
        ray.shutdown()
    show(markdown_table(["a group", "way", "GB/s", "queue / way", "journaled / way"], rows))


if __name__ == "__main__":
    main()
