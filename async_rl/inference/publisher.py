"""Loads a new version of the weights on every replica.

resume: pause -> abort (partial segments return to their agent loops)  -> load -> resume (the loops continue them)
keep:   pause -> freeze (requests stay in the engine)                  -> load -> resume (each in a new segment)
drain:  pause -> wait until in-flight requests have finished           -> load -> resume

Replicas load concurrently, so for a short time some serve the new version and others the previous one. If a replica
dies in that time, its rollouts may continue on a replica with the previous version: 4 tokens of version 7 are then
followed by tokens of version 6. The data contract allows this, because every token records its own version. The
staleness bound holds too: a group is admitted with version v only after all replicas serve v, so a replica that serves
the group has at least v.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, assert_never

from agent_loop.engine import EngineError, ReplicaLostError
from async_rl.inference.pool import Member, PoolReplica, ReplicaPool
from async_rl.inference.replica import KVPolicy
from async_rl.weights.transport import WeightUpdate

T = TypeVar("T")
OnUpdate = Literal["resume", "keep", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """Durations and counts of one publish."""

    seconds: float
    """Seconds from the first pause to the last resume."""
    pause_seconds: float
    """Seconds of the longest pause of one replica."""
    aborted: int
    """Partial segments, over all replicas."""
    frozen: int = 0
    """Requests that stayed in an engine during the load, over all replicas."""

    def metrics(self) -> dict[str, float]:
        """The durations under their keys in `async_rl.metrics.registry.METRICS`."""
        return {"sync/seconds": self.seconds, "sync/pause_seconds": self.pause_seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One replica's part of a publish."""

    replica: str
    """Name of the replica."""
    checksum: str
    """Checksum of all parameters after the load."""
    pause_seconds: float
    """Seconds from pause to resume."""
    aborted: int
    """Partial segments."""
    frozen: int
    """Requests that stayed in the engine."""


class Rollouts(Protocol):
    """The part of the rollouts that a publish uses; see `async_rl.rollout.dispatcher.Dispatcher`."""

    async def pause(self) -> None:
        """Start no further tool calls."""
        ...

    async def resume(self) -> None:
        """Start tool calls again."""
        ...


class Publisher:
    """Loads a version on all replicas concurrently.

    A replica that dies, or does not load the version within `timeout_s`, leaves the pool. The publish continues with
    the remaining replicas.

    Args:
        replicas: the replicas that serve the run.
        on_update: how requests in flight are treated; see the top of this module.
        kv: K/V of the requests that are frozen with `keep`; see `async_rl.inference.replica.EngineReplica.load`.
        rollouts: paused during a publish, so that they start no tool.
        timeout_s: bound on the whole publish of one replica, from pause to resume.
    """

    def __init__(
        self,
        replicas: ReplicaPool | Sequence[PoolReplica],
        *,
        on_update: OnUpdate,
        kv: KVPolicy = "recompute",
        rollouts: Rollouts,
        timeout_s: float,
    ) -> None:
        self._pool = ReplicaPool.of(replicas)
        self._rollouts = rollouts
        self._on_update: OnUpdate = on_update
        self._kv: KVPolicy = kv
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()  # a replica must not join during a publish
        self._newest: WeightUpdate | None = None
        self._first_load: _Load | None = None  # first load of the newest version, which later loads must equal

    async def publish(self, update: WeightUpdate, *, probe: Callable[[Member], None] | None = None) -> PublishReport:
        """Return when every remaining replica serves `update`.

        If the caller is cancelled, the publish finishes before the cancellation is raised: an interrupted load would
        leave a replica with a mixture of weights.

        Args:
            update: the version.
            probe: called with each replica after its pause; requests that it sends are decoded first by the new
                version.

        Raises:
            EngineError: a replica refused the version, loaded other weights, or has other parameters than another
                replica.
            ReplicaLostError: no replica remains.
        """
        async with self._turn:
            self._newest = update
            return await _to_its_end(self._publish(update, probe))

    async def bring_up(self, replica: PoolReplica, *, slot: int) -> None:
        """Load the newest version on a started replica and add it to the pool.

        Args:
            replica: not a member of the pool yet.
            slot: place in the pool that it takes.

        Raises:
            EngineError: it refused the version, or loaded other weights.
            ReplicaLostError: it died, or did not load the version within `timeout_s`.
        """
        async with self._turn:
            if (update := self._newest) is not None:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        loaded = await self._load(replica, update)
                        self._require_alike([loaded], update)
                except TimeoutError as error:
                    raise ReplicaLostError(
                        f"{replica.name} did not load version {update.weights.version} (sync.timeout_s) within "
                        f"{self._timeout_s} s"
                    ) from error
            self._pool.join(replica, slot=slot)

    async def abort_all(self) -> None:
        """Abort all requests in flight and keep the replicas paused until `resume` or the next publish.

        Returns when all requests have ended as partial segments. A replica that needs longer than `timeout_s` leaves
        the pool.
        """
        async with self._turn, asyncio.TaskGroup() as interrupts:
            for member in self._pool.live:
                interrupts.create_task(self._interrupt(member))

    async def resume(self) -> None:
        """Resume the replicas after `abort_all`."""
        async with self._turn, asyncio.TaskGroup() as resumes:
            for member in self._pool.live:
                resumes.create_task(self._control(member, member.replica.resume, what="did not resume"))

    async def _interrupt(self, member: Member) -> None:
        async def abort() -> None:
            await member.replica.pause()
            await member.replica.abort()
            await member.replica.drain()

        await self._control(member, abort, what="did not end its requests")

    async def _control(self, member: Member, call: Callable[[], Awaitable[None]], *, what: str) -> None:
        with contextlib.suppress(ReplicaLostError):  # the pool has removed the replica
            async with self._pool.calling(member, timeout_s=self._timeout_s, late=f"{what} (sync.timeout_s)"):
                await call()

    async def _publish(self, update: WeightUpdate, probe: Callable[[Member], None] | None) -> PublishReport:
        started = time.monotonic()
        self._first_load = None
        await self._rollouts.pause()
        try:
            async with asyncio.TaskGroup() as loads:
                tasks = [loads.create_task(self._load_or_lose(member, update, probe)) for member in self._pool.live]
        finally:
            await self._rollouts.resume()
        done = [load for task in tasks if (load := task.result()) is not None]
        self._pool.require_any()
        self._require_alike(done, update)
        return PublishReport(
            seconds=time.monotonic() - started,
            pause_seconds=max((load.pause_seconds for load in done), default=0.0),
            aborted=sum(load.aborted for load in done),
            frozen=sum(load.frozen for load in done),
        )

    async def _load_or_lose(
        self, member: Member, update: WeightUpdate, probe: Callable[[Member], None] | None
    ) -> _Load | None:
        """None if the replica died or was too slow."""
        late = f"did not load version {update.weights.version} (sync.timeout_s)"
        try:
            async with self._pool.calling(member, timeout_s=self._timeout_s, late=late):
                return await self._load(
                    member.replica, update, paused=None if probe is None else partial(probe, member)
                )
        except ReplicaLostError:
            return None

    async def _load(
        self, replica: PoolReplica, update: WeightUpdate, *, paused: Callable[[], None] | None = None
    ) -> _Load:
        started, aborted, frozen = time.monotonic(), 0, 0
        kv: KVPolicy = "recompute"
        await replica.pause()
        if paused is not None:
            paused()
        match self._on_update:
            case "resume":
                aborted = await replica.abort()
            case "keep":
                frozen, kv = await replica.freeze(), self._kv
            case "drain":
                await replica.drain()
            case _:
                assert_never(self._on_update)
        loaded = await replica.load(update, kv=kv)
        if loaded != update.weights:
            raise EngineError(f"{replica.name} loaded {loaded}, but {update.weights} was published")
        checksum = await replica.checksum()
        await replica.resume()
        return _Load(
            replica=replica.name,
            checksum=checksum,
            pause_seconds=time.monotonic() - started,
            aborted=aborted,
            frozen=frozen,
        )

    def _require_alike(self, loads: Sequence[_Load], update: WeightUpdate) -> None:
        """Compare the parameters of the replicas, which must be equal because all have the same configuration.

        Raises:
            EngineError: two replicas have different parameters.
        """
        for load in loads:
            first = self._first_load = self._first_load or load
            if load.checksum != first.checksum:
                raise EngineError(
                    f"{load.replica} has parameters with checksum {load.checksum} for version "
                    f"{update.weights.version}, but {first.replica} has {first.checksum}; one replica does not serve "
                    "the published weights"
                )


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`. If the caller is cancelled, `work` finishes before the cancellation is raised."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it: the cancellation takes precedence
        raise
