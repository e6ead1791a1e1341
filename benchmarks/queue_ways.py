"""Ways for groups to get from the process of a rollout worker to that of a trainer, each as two ends; and limits."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import ray
from numpy.typing import NDArray

from async_rl.cluster.batching import BatchingClient, BatchingServer, Call, Reply
from async_rl.cluster.queue import REFUSALS, QueueUnavailable
from async_rl.rollout.recorded import StoredRolloutLog
from message_queue.content import ContentWriter
from message_queue.contract import Admission, Batch
from message_queue.heads import GroupHead, head_of
from message_queue.policies import build_policy
from message_queue.progress import RolloutRecord, TrajectoryClosed
from message_queue.queue import TrajectoryQueue
from message_queue.staleness import StalenessConfig
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import GroupContent, content_of
from message_queue.trajectory import PromptGroup, Trajectory

PROMPT_TOKENS = 256
AT_ONCE = 16  # groups that are on their way at most
BATCH = 4  # groups that the trainer takes together
SAVE_EVERY = 4  # batches between two checkpoints
KEPT = 64  # groups whose content stays on disk; older ones are trained
DISTINCT = 3  # groups that are made; they are sent over and over
_method = cast(Any, ray.method)  # whose stubs do not know all of its arguments
PARTITION, FIELDS = "benchmark", ("token_ids", "logprobs", "routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """trajectories of a group, each of `tokens` tokens. routing: what the rows are of."""

    name: str
    routing: RoutingSpec
    tokens: int
    trajectories: int

    @property
    def num_bytes(self) -> int:
        """Of the arrays of a group: 4 per token, 4 per logprob, and the rows as the engine gave them."""
        rows = (self.tokens - 1) * len(self.routing.layers) * self.routing.top_k * self.routing.dtype.itemsize
        return self.trajectories * (4 * self.tokens + 4 * (self.tokens - PROMPT_TOKENS) + rows)

    def contents(self, seed: int) -> list[Trajectory]:
        """Closed trajectories of a prompt and one segment."""
        return [self._trajectory(np.random.default_rng((seed, i))) for i in range(self.trajectories)]

    def _trajectory(self, rng: np.random.Generator) -> Trajectory:
        spec, sampled = self.routing, self.tokens - PROMPT_TOKENS
        first = rng.integers(spec.num_experts, size=(self.tokens - 1, len(spec.layers), 1), dtype=np.int16)
        experts = ((first + 7 * np.arange(spec.top_k, dtype=np.int16)) % spec.num_experts).astype(spec.dtype)
        made = Trajectory(routing=spec)
        made.observe(np.arange(PROMPT_TOKENS, dtype=np.int32))
        made.extend(
            TokenOutput(
                token_ids=rng.integers(150_000, size=sampled, dtype=np.int32),
                logprobs=-rng.random(sampled, dtype=np.float32),
                routed_experts=RoutedExperts(first_position=0, experts=experts),
                weights=WeightVersion(0, "0" * 64),
                stop_reason=StopReason.STOP,
                replica="replica-0",
            )
        )
        made.close(stop_reason=StopReason.STOP, reward=1.0)
        return made


def qwen3(tokens: int, trajectories: int) -> Shape:
    """Shaped like Qwen3-30B-A3B."""
    return Shape(
        name="48 x 8 of 128",
        routing=RoutingSpec(layers=tuple(range(48)), num_experts=128, top_k=8),
        tokens=tokens,
        trajectories=trajectories,
    )


def kimi_k2(tokens: int, trajectories: int) -> Shape:
    """Shaped like Kimi-K2."""
    return Shape(
        name="60 x 8 of 384",
        routing=RoutingSpec(layers=tuple(range(1, 61)), num_experts=384, top_k=8),
        tokens=tokens,
        trajectories=trajectories,
    )


Arrays = list[NDArray[Any]]


def arrays_of(contents: Sequence[Trajectory]) -> Arrays:
    """token ids, logprobs and rows of each trajectory."""
    arrays: Arrays = []
    for trajectory in contents:
        (turn,) = trajectory.turns
        (segment,) = turn.segments
        assert segment.routed_experts is not None
        tokens = np.concatenate([turn.observation, segment.token_ids])
        arrays += [tokens, segment.logprobs, segment.routed_experts.experts]
    return arrays


class End(Protocol):
    """One end of a way, in its process."""

    async def open(self, shape: Shape) -> None: ...
    async def send(self, contents: Sequence[Trajectory], arrays: Arrays) -> None: ...
    async def receive(self) -> int:
        """Take BATCH groups, as arrays or trajectories; how many groups those are."""
        ...


# ---- the queue


class PlainQueue:
    """Process of a queue without a journal."""

    def __init__(self, *, batch_groups: int, staleness: StalenessConfig, max_ready: int) -> None:
        queue = TrajectoryQueue(build_policy(staleness, batch_groups=batch_groups), max_ready=max_ready)
        self._server = BatchingServer(queue, refusals=REFUSALS)

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
        self.name, self._rollouter, self._trainer = name, rollouter, trainer
        self._calls: BatchingClient[TrajectoryQueue] = BatchingClient(
            queue, name="driver", server="the queue", timeout_s=60.0, lost=QueueUnavailable
        )
        self._contents: dict[int, Any] = {}
        self._prompt = self._step = 0

    async def run(self, groups: int) -> None:
        """Groups from the rollouter to the trainer, AT_ONCE on their way at most."""
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for number in range(groups):
                tasks.create_task(self._send(number, places))
            batch = await self._calls.call(TrajectoryQueue.take)
            for left in range(groups - BATCH, -1, -BATCH):
                following = tasks.create_task(self._calls.call(TrajectoryQueue.take)) if left else None
                await self._train(batch)
                if following is not None:
                    batch = await following

    async def _send(self, number: int, places: asyncio.Semaphore) -> None:
        async with places:
            self._prompt += 1
            admission = await self._calls.call(TrajectoryQueue.admit, self._prompt)
            head, content = self._rollouter.roll.remote(self.name, number, admission)
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
        directory: of content files, to which segments are appended first; None writes nothing.
    """

    def __init__(self, *, directory: Path | None) -> None:
        self._directory = directory
        self._writer: ContentWriter | None = None
        self._log: StoredRolloutLog | None = None
        self._written: deque[int] = deque()

    async def open(self, shape: Shape) -> None:
        if self._directory is not None:
            self._writer = await ContentWriter.open(self._directory, name="rollout", run="benchmark", fsync=False)
            self._log = StoredRolloutLog(self._writer)

    async def roll(self, contents: Sequence[Trajectory], admission: Admission) -> tuple[GroupHead, GroupContent]:
        """What a worker answers once a group is finished."""
        if self._log is not None and self._writer is not None:
            for number, trajectory in enumerate(contents):
                for record in records_of(admission, number, trajectory):
                    self._log.append(record)
            await self._log.flush()
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


def records_of(admission: Admission, number: int, trajectory: Trajectory) -> list[RolloutRecord]:
    """What a rollouter records of it."""
    (turn,) = trajectory.turns
    (segment,) = turn.segments
    end = TrajectoryClosed(stop_reason=StopReason.STOP, reward=1.0)
    steps = ((0, turn.observation), (len(turn.observation), segment), (len(trajectory), end))
    return [RolloutRecord(group=admission.group, trajectory=number, handout=0, at=at, what=what) for at, what in steps]


# ---- a plain actor with a deque


class DequeActor:
    """What people write first."""

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


class DequeEnd:
    """pickled: the arrays are pickled to bytes; otherwise they are given to Ray as they are."""

    def __init__(self, actor: Any, *, pickled: bool) -> None:
        self._actor, self._pickled = actor, pickled
        self._next: Any = None

    async def open(self, shape: Shape) -> None:
        return

    async def send(self, contents: Sequence[Trajectory], arrays: Arrays) -> None:
        await self._actor.put.remote(pickle.dumps(arrays) if self._pickled else arrays)

    async def receive(self) -> int:
        items = await (self._next or self._actor.get.remote(BATCH))
        self._next = self._actor.get.remote(BATCH)
        return len([pickle.loads(item) if self._pickled else item for item in items])


# ---- TransferQueue


class TransferQueueEnd:
    """TransferQueue's client; which samples are ready is told through a deque, so that its controller is not polled."""

    def __init__(self, ready: Any) -> None:
        self._ready = ready
        self._next: Any = None

    async def open(self, shape: Shape) -> None:
        import transfer_queue  # pyright: ignore[reportMissingImports] # no dependency of the project
        from transfer_queue.interface import _maybe_create_tq_client  # pyright: ignore

        transfer_queue.init()
        self._client: Any = _maybe_create_tq_client()

    async def send(self, contents: Sequence[Trajectory], arrays: Arrays) -> None:
        import torch
        from tensordict import TensorDict

        stacked = [np.stack(arrays[i :: len(FIELDS)]) for i in range(len(FIELDS))]
        if stacked[2].dtype == np.uint16:
            stacked[2] = stacked[2].view(np.int16)
        fields = {name: torch.from_numpy(array) for name, array in zip(FIELDS, stacked, strict=True)}
        data = TensorDict(fields, batch_size=[len(contents)])
        meta = await self._client.async_put(data, partition_id=PARTITION)
        await self._ready.put.remote(meta)

    async def receive(self) -> int:
        metas = await (self._next or self._ready.get.remote(BATCH))
        self._next = self._ready.get.remote(BATCH)
        await asyncio.gather(*map(self._take, metas))
        return len(metas)

    async def _take(self, meta: Any) -> None:
        data = await self._client.async_get_data(meta)
        assert len(data["routed_experts"])
        await self._client.async_clear_samples(meta)


# ---- limits


class ObjectStoreEnd:
    """ray.put and ray.get of the arrays in one process; as many groups are held as are on their way elsewhere."""

    async def open(self, shape: Shape) -> None:
        self._held: deque[Any] = deque(maxlen=AT_ONCE)

    async def send(self, contents: Sequence[Trajectory], arrays: Arrays) -> None:
        self._held.append(ray.get(ray.put(arrays)))

    def rest(self) -> None:
        """Hold nothing while others are measured."""
        self._held.clear()

    async def receive(self) -> int:
        raise NotImplementedError("one process does it all")


class MemcpyEnd:
    """One copy of the arrays into memory that is there."""

    async def open(self, shape: Shape) -> None:
        self._room: Arrays = []

    async def send(self, contents: Sequence[Trajectory], arrays: Arrays) -> None:
        self._room = self._room or [np.empty_like(array) for array in arrays]
        for room, array in zip(self._room, arrays, strict=True):
            np.copyto(room, array)

    async def receive(self) -> int:
        raise NotImplementedError("one process does it all")


class FileEnd:
    """The arrays into one file for each group, without a name or a checksum; KEPT files stay."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: deque[Path] = deque()

    async def open(self, shape: Shape) -> None:
        return

    async def send(self, contents: Sequence[Trajectory], arrays: Arrays) -> None:
        path = self._directory / str(time.monotonic_ns())
        with path.open("wb", buffering=0) as file:
            for array in arrays:
                file.write(array.data)
        self._written.append(path)
        if len(self._written) > KEPT:
            self._written.popleft().unlink()

    async def receive(self) -> int:
        raise NotImplementedError("one process does it all")


class Host:
    """The process of a rollouter or of a trainer: its ends, and the groups of one shape."""

    def __init__(self) -> None:
        self._shape: Shape | None = None
        self._ends: dict[str, Any] = {}

    async def open(self, name: str, end: End | RolloutEnd, shape: Shape) -> None:
        """Make an end ready, for groups of `shape`."""
        if shape != self._shape:
            contents = [shape.contents(seed) for seed in range(DISTINCT)]
            self._shape, self._groups = shape, [(c, arrays_of(c)) for c in contents]
        self._ends[name] = end
        await end.open(shape)

    async def send(self, name: str, groups: int) -> float:
        """Send so many, AT_ONCE at most on their way; the seconds it took."""
        started = time.perf_counter()
        end, places = self._ends[name], asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with places:
                await end.send(*self._groups[number % DISTINCT])

        await asyncio.gather(*(one(number) for number in range(groups)))
        seconds = time.perf_counter() - started
        if isinstance(end, ObjectStoreEnd):
            end.rest()
        return seconds

    @_method(num_returns=2)
    async def roll(self, name: str, number: int, admission: Admission) -> tuple[GroupHead, GroupContent]:
        """Head and content of one group."""
        contents, _ = self._groups[number % DISTINCT]
        return await self._ends[name].roll(contents, admission)

    async def fetch(self, contents: Sequence[Any]) -> None:
        """contents: references."""
        await asyncio.gather(*contents)

    async def receive(self, name: str, groups: int) -> None:
        """Receive so many."""
        received = 0
        while received < groups:
            received += await self._ends[name].receive()
