"""One interface to every engine of the suite: a replica, the actions of a scenario, and its observed state."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest

from agent_loop.decoder import SegmentDecoder
from agent_loop.engine import Engine, GenerateRequest, SamplingConfig
from agent_loop.loop import TurnLimits
from async_rl.inference.gate import KVPolicy
from async_rl.inference.pool import PoolReplica, ReplicaPool
from async_rl.inference.publisher import OnUpdate, Publisher, PublishReport
from async_rl.weights.broadcast import VersionServer
from async_rl.weights.store import LocalStore
from async_rl.weights.transport import (
    Bases,
    Source,
    WeightUpdate,
    discard_updates,
    finish_update,
    read_tensors,
    update_files,
    version_folder,
    write_bucket,
)
from message_queue.tokens import RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import ResumeRouting, Trajectory
from tests.conformance.reference import Reference
from tests.helpers.fakes.rollouts import RolloutsHere
from tests.helpers.trainer_memory import HOST, TrainerMemory

T = TypeVar("T")

MODES: dict[str, tuple[OnUpdate, KVPolicy]] = {
    "resume": ("resume", "recompute"),
    "keep-recompute": ("keep", "recompute"),
    "keep-keep": ("keep", "keep"),
    "drain": ("drain", "recompute"),
}
TIMEOUT_S = 100.0  # of one call; only a hang takes that long
STEP_S = 0.02  # of an engine that is slowed down
VOCAB = 117
MARKS = [pytest.mark.numerics, pytest.mark.asyncio(loop_scope="package"), pytest.mark.filterwarnings("ignore")]
# The fake has no K/V, hence no prefix cache, no chunks of a prefill and no preemption, and a place for every request.
DRAFTS = pytest.param("vllm-drafts", marks=pytest.mark.drawn(15, of="vLLM with drafts"))
WITH_KV = pytest.mark.parametrize("server", ["vllm", DRAFTS, "sglang"], indirect=True)
ON_VLLM = pytest.mark.parametrize("server", ["vllm", DRAFTS], indirect=True)
ON_SGLANG = pytest.mark.parametrize("server", ["sglang"], indirect=True)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A request and its answer."""

    request: GenerateRequest
    answer: tuple[TokenOutput, ...]


class Truth(Protocol):
    """The models that an engine serves, computed by something else."""

    def __call__(self, parts: Sequence[tuple[int, int]], token_ids: Any, *, forced: Any) -> Reference:
        """One forward pass over `token_ids` int32 [T]; see `reference.reference_of_parts`.

        parts: (version, end) in order; each version forwards the positions up to `end`.
        """
        ...


class Probe(Protocol):
    """State of an engine other than its answers."""

    cached_tokens: list[int]
    """Prompt tokens that each request found in the prefix cache, in order of completion."""
    retractions: list[int]
    """How often each request was preempted, in order of completion; empty if the engine does not report it."""
    kv_tokens: int | None
    """Room for K/V; None for an engine without K/V."""

    async def sampled(self, running: Sequence[GenerateRequest]) -> int:
        """Tokens that the engine has sampled for `running`, all that is in flight."""
        ...

    async def all_at_work(self, running: Sequence[GenerateRequest]) -> bool:
        """Whether the engine has all of `running`, so that `sampled` counts them all."""
        ...

    async def idle(self) -> bool:
        """Whether the engine has no request, now or a moment later."""
        ...

    async def slow_down(self, step_s: float | None) -> None:
        """Make each step of the engine take at least `step_s` seconds, None for full speed, if it can be slowed down.

        An engine in a separate process may otherwise end all requests before a test on a busy machine looks.
        """
        ...


class RunFolder:
    """A folder that all nodes see. Versions take `updates` in turn, and are written as by a trainer of one rank.

    delta: most versions are written as changes, as with `sync.delta`.
    """

    def __init__(self, directory: Path, updates: Sequence[WeightUpdate], *, delta: bool) -> None:
        self.written: dict[int, WeightUpdate] = {}
        """Version -> update."""
        self._directory = directory
        self._updates = updates
        self._bases = Bases() if delta else None

    def write(self, version: int) -> None:
        """Write a version and remove those that no replica may need."""
        folder = version_folder(self._directory, version)
        base = None if self._bases is None else self._bases.base_of_next()
        discard_updates(self._directory, keep_version=version - 1, spare_for=folder if base is None else None)
        files = update_files(self._updates[version % len(self._updates)].path)
        buckets = [write_bucket(folder, i, read_tensors(file), bases=self._bases) for i, file in enumerate(files)]
        if self._bases is not None:
            self._bases.published(version)
        self.written[version] = finish_update(folder, version=version, buckets=buckets, base=base)


class EngineUnderTest:
    """A replica that records its requests and answers; the versions take `updates` in turn.

    Staged versions need three updates, because each replaces the weights of the version before the last. exchanges: the
    answers, in order of completion; replicas share it if trajectories move between them.
    """

    def __init__(
        self,
        replica: PoolReplica,
        *,
        routing: RoutingSpec | None,
        updates: Sequence[WeightUpdate],
        truth: Truth,
        probe: Probe,
        exchanges: list[Exchange] | None = None,
    ) -> None:
        self.name = replica.name
        self.replica = replica
        assert routing is not None, "the suite is about routing"
        self.routing = routing
        self.truth = truth
        self.probe = probe
        self.exchanges = [] if exchanges is None else exchanges
        self.kept: dict[int, KVPolicy] = {}
        """Version -> treatment of the K/V of requests in flight by its load."""
        self._updates = updates
        self._version = -1
        self._server: VersionServer | None = None
        self._folder: RunFolder | None = None
        self._memory: TrainerMemory | None = None
        self._running: list[GenerateRequest] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._slow: asyncio.Task[None] | None = None

    # ---- generating

    async def generate(self, request: GenerateRequest) -> list[TokenOutput]:
        """As `agent_loop.engine.Engine.generate`; recorded."""
        self._running.append(request)
        try:
            answer = await self.replica.generate(request)
        finally:
            self._running.remove(request)
        self.exchanges.append(Exchange(request, tuple(answer)))
        return answer

    async def ask(self, name: str, token_ids: Any, *, max_new_tokens: int = 24, **fields: Any) -> Exchange:
        """One request that nothing but its budget stops."""
        request = GenerateRequest(
            request_id=f"{name}.", token_ids=token_ids, max_new_tokens=max_new_tokens, session=name, **fields
        )
        return Exchange(request, tuple(await self.generate(request)))

    def rollout(self, name: str, **options: Any) -> Rollout:
        """A trajectory on this engine."""
        return Rollout(name, engine=self, routing=self.routing, **options)

    def start_rollouts(
        self, prompts: Sequence[Any], *, max_new_tokens: int, name: str = "rollout", **options: Any
    ) -> tuple[list[Rollout], list[asyncio.Task[StopReason]]]:
        """Trajectories `name`-0, `name`-1, ..., decoding while the test runs."""
        rollouts = [self.rollout(f"{name}-{i}", **options) for i in range(len(prompts))]
        turns = zip(rollouts, prompts, strict=True)
        return rollouts, [self.start(rollout.turn(ids, max_new_tokens=max_new_tokens)) for rollout, ids in turns]

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` while the test runs, on an engine that is slow until a publish."""
        if self._slow is None:
            self._slow = asyncio.create_task(self.probe.slow_down(STEP_S))
        slow = self._slow

        async def slowly() -> T:
            await asyncio.shield(slow)  # then all that was started goes to the engine at once
            return await work

        task = asyncio.create_task(slowly())
        self._tasks.append(task)
        return task

    async def end(self) -> None:
        """Cancel the work of a failed test, so that it reaches no other test."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.full_speed()

    async def full_speed(self) -> None:
        """Slow the engine down no longer."""
        if self._slow is not None:
            await self._slow
            await self.probe.slow_down(None)
            self._slow = None

    async def until_sampled(self, tokens: int) -> None:
        """Return when the requests in flight have sampled `tokens` together, before all that was started has ended."""
        while await self.probe.sampled(self._running) < tokens:
            await self._pause(f"{tokens} tokens were in flight")

    async def until_more(self, tokens: int) -> None:
        """As `until_sampled`, of tokens after the last load."""
        while not await self.probe.all_at_work(self._running):
            await self._pause("all were at work again")
        await self.until_sampled(await self.probe.sampled(self._running) + tokens)

    def of_session(self, name: str) -> list[Exchange]:
        """Exchanges of one trajectory."""
        return [exchange for exchange in self.exchanges if exchange.request.session == name]

    async def _pause(self, awaited: str) -> None:
        assert not all(task.done() for task in self._tasks), f"all ended before {awaited}"
        await asyncio.sleep(0.0 if self.probe.kv_tokens is None else 0.004)

    # ---- weights

    def update(self, version: int) -> WeightUpdate:
        """A version as the trainer would publish it."""
        if self._memory is not None:
            return self.keep(version)
        if self._folder is not None and version in self._folder.written:
            return self._folder.written[version]
        source = self._updates[version % len(self._updates)]
        made = replace(source, weights=WeightVersion(version, source.weights.digest))
        if self._server is None:
            return made
        return replace(made, sources=(Source(self._server.address, tuple(range(len(source.buckets)))),))

    @contextlib.contextmanager
    def broadcast(self, directory: Path) -> Generator[None]:
        """Publish by broadcast in this block. directory: of the node of the replica."""
        server = VersionServer(HOST, self._updates[0].path.parent)
        with contextlib.closing(server) as self._server, self._store(directory):
            yield
        self._server = None

    @contextlib.contextmanager
    def direct(self) -> Generator[TrainerMemory]:
        """Publish from the memory of two trainer ranks in this block."""
        count = len(self._updates[0].buckets)
        with contextlib.closing(TrainerMemory([range(0, count, 2), range(1, count, 2)])) as self._memory:
            yield self._memory
        self._memory = None

    def keep(self, version: int) -> WeightUpdate:
        """Keep a version in the memory of `direct`, and forget those that no replica may need."""
        assert self._memory is not None
        for held in self._memory.ranks:
            held.discard(keep_version=version - 1)
        files = update_files(self._updates[version % len(self._updates)].path)
        return self._memory.publish(version, [list(read_tensors(file)) for file in files])

    @contextlib.contextmanager
    def folder(self, directory: Path, folder: RunFolder) -> Generator[None]:
        """Publish by a folder in this block. directory: of the node of the replica."""
        self._folder = folder
        with self._store(directory):
            yield
        self._folder = None

    @contextlib.contextmanager
    def _store(self, directory: Path) -> Generator[None]:
        self.replica.store = LocalStore(directory, host=HOST)
        try:
            yield
        finally:
            self.replica.store.release()
            self.replica.store = None

    async def freeze(self) -> int:
        """Pause and freeze; returns how many requests are frozen."""
        await self.replica.pause()
        return await self.replica.freeze()

    async def load(self, version: int, *, kv: KVPolicy = "recompute") -> None:
        await self.replica.load(self.update(version), kv=kv)
        self._version, self.kept[version] = version, kv

    async def resume(self) -> None:
        await self.replica.resume()
        await self.full_speed()

    async def publish(
        self, mode: str = "resume", *, version: int | None = None, stays_slow: bool = False, staged: bool = False
    ) -> PublishReport:
        """Load the next version, or a given one, by the publisher of a run.

        stays_slow: another publish follows that must find the requests in flight. staged: the requests continue during
        the load, and pause for the exchange.
        """
        on_update, kv = MODES[mode]
        self._version = self._version + 1 if version is None else version
        if self._folder is not None:
            self._folder.write(self._version)
        report = await self.publisher(on_update, kv, staged=staged).publish(self.update(self._version))
        if not stays_slow:
            await self.full_speed()
        self.kept[self._version] = kv
        return report

    def publisher(self, on_update: OnUpdate, kv: KVPolicy, *, staged: bool) -> Publisher:
        return Publisher(
            ReplicaPool([self.replica]),
            on_update=on_update,
            kv=kv,
            rollouts=RolloutsHere(),
            staged=staged,
            timeout_s=TIMEOUT_S,
        )


class Rollout:
    """A trajectory that is decoded turn by turn, by the decoder of the agent loops."""

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        routing: RoutingSpec,
        resume_routing: ResumeRouting = "append",
        cache_salt: str = "",
        stop_token_ids: Sequence[int] = (),
        sampling: SamplingConfig | None = None,
        segment_tokens: int = 4096,
    ) -> None:
        self.name = name
        self.trajectory = Trajectory(routing=routing, resume_routing=resume_routing)
        self.cache_salt = cache_salt
        self._stop_token_ids = tuple(stop_token_ids)
        self._sampling = sampling or SamplingConfig()
        self._limits = TurnLimits(
            max_turns=1,
            max_tokens=1 << 20,
            segment_tokens=segment_tokens,
            generate_timeout_s=TIMEOUT_S,
            max_refused_answers=0,  # a good engine is never refused
        )
        self.decoder = self._decoder(engine)

    async def turn(self, token_ids: Any, *, max_new_tokens: int) -> StopReason:
        """Show `token_ids` and decode."""
        self.trajectory.observe(token_ids)
        return await self.decoder.decode(self.trajectory, max_new_tokens=max_new_tokens)

    async def resume(self, *, max_new_tokens: int) -> StopReason:
        """Decode more in the same turn."""
        return await self.decoder.decode(self.trajectory, max_new_tokens=max_new_tokens)

    def move(self, engine: Engine, *, trajectory: Trajectory) -> None:
        """Continue on another engine, with the stored trajectory."""
        self.trajectory = trajectory
        self.decoder = self._decoder(engine)

    def _decoder(self, engine: Engine) -> SegmentDecoder:
        return SegmentDecoder(
            engine,
            sampling=self._sampling,
            stop_token_ids=self._stop_token_ids,
            session=self.name,
            cache_salt=self.cache_salt,
            limits=self._limits,
        )


def tokens(count: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """int32 [count], any but the first few ids."""
    return np.random.default_rng(seed).integers(3, VOCAB, count).astype(np.int32)


def prompts(count: int, *, length: int = 20, step: int = 0) -> list[np.ndarray[Any, Any]]:
    """Different prompts, each `step` tokens longer than the one before."""
    return [tokens(length + step * i, seed=i) for i in range(count)]
