"""Brings a new version of the weights into every replica. Owns nothing of the trainer and nothing of the rollouts.

resume: pause -> abort (partials return to their agent loops) -> load -> resume (the loops go on, on new weights)
keep:   pause -> freeze (held inside the engine)              -> load -> resume (they go on there, in a new segment)
drain:  pause -> what is in flight finishes                   -> load -> resume

Replicas load side by side, so for a moment some serve the new version and others the one before. A rollout that loses
its replica in that moment may go on under the older version: its tokens then go back by one version. The contract
allows it, as every token names its own version. The staleness bound holds too: groups are admitted by a version only
when all replicas serve it, so no replica is older than the admission of any group that it can be given.
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
from async_rl.engines.replica import KeptKV
from async_rl.rollout.fleet import FleetReplica, Member, ReplicaFleet
from async_rl.weights.transport import WeightUpdate

T = TypeVar("T")
OnUpdate = Literal["resume", "keep", "drain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """seconds: first pause to last resume. pause_seconds: longest pause of one replica.

    aborted: partial segments. frozen: requests that were held inside an engine.
    """

    seconds: float
    pause_seconds: float
    aborted: int
    frozen: int = 0

    def metrics(self) -> dict[str, float]:
        return {"sync/seconds": self.seconds, "sync/pause_seconds": self.pause_seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One replica's part of a publish. checksum: of what its model holds now."""

    replica: str
    checksum: str
    pause_seconds: float
    aborted: int
    frozen: int


class Rollouts(Protocol):
    """What a publish asks of the rollouts; see `async_rl.rollout.dispatcher.Dispatcher`."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...


class Publisher:
    """Loads a version on all replicas side by side.

    A replica that is lost meanwhile, or does not take the version in time, leaves the fleet; the others go on.

    Args:
        kv: K/V of the requests that are frozen with `keep`; see `async_rl.engines.replica.Replica.load`.
        rollouts: start no tool while the replicas are paused.
        timeout_s: bound on one replica's pause, abort, freeze or drain, load and resume together.
    """

    def __init__(
        self,
        replicas: ReplicaFleet | Sequence[FleetReplica],
        *,
        on_update: OnUpdate,
        kv: KeptKV = "recompute",
        rollouts: Rollouts,
        timeout_s: float,
    ) -> None:
        self._fleet = ReplicaFleet.of(replicas)
        self._rollouts = rollouts
        self._on_update: OnUpdate = on_update
        self._kv: KeptKV = kv
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()  # a replica joins before a publish or after it
        self._newest: WeightUpdate | None = None
        self._held: _Load | None = None  # by a replica that loaded the newest version

    async def publish(self, update: WeightUpdate, *, probe: Callable[[Member], None] | None = None) -> PublishReport:
        """Return when every replica that is left serves `update`.

        `probe` is called with each as soon as it is paused: what it asks is decoded first under the new weights.

        A caller that is cancelled waits all the same: a load that is cut off leaves a replica without good weights.

        Raises:
            EngineError: a replica refused the version, loaded something else, or holds other parameters than another.
            ReplicaLostError: no replica is left.
        """
        async with self._turn:
            self._newest = update
            return await _to_its_end(self._publish(update, probe))

    async def bring_up(self, replica: FleetReplica, *, slot: int) -> None:
        """Load the newest version on a replica that was just started, and let it join the fleet.

        Raises:
            EngineError: it refused the version, or loaded something else. ReplicaLostError: it died, or took too long.
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
            self._fleet.join(replica, slot=slot)

    async def interrupt(self) -> None:
        """End what is in flight as partial segments and hold the replicas until `go_on`, or until the next publish.

        Returns when all of it has ended, as far as that takes no longer than a publish may.
        """
        async with self._turn, asyncio.TaskGroup() as interrupts:
            for member in self._fleet.live:
                interrupts.create_task(self._interrupt(member))

    async def go_on(self) -> None:
        """Let the replicas serve after `interrupt`."""
        async with self._turn, asyncio.TaskGroup() as resumes:
            for member in self._fleet.live:
                resumes.create_task(self._control(member, member.replica.resume, what="did not resume"))

    async def _interrupt(self, member: Member) -> None:
        async def abort() -> None:
            await member.replica.pause()
            await member.replica.abort()
            await member.replica.drain()

        await self._control(member, abort, what="did not end its requests")

    async def _control(self, member: Member, call: Callable[[], Awaitable[None]], *, what: str) -> None:
        with contextlib.suppress(ReplicaLostError):  # the fleet has noted it
            async with self._fleet.calling(member, timeout_s=self._timeout_s, late=f"{what} (sync.timeout_s)"):
                await call()

    async def _publish(self, update: WeightUpdate, probe: Callable[[Member], None] | None) -> PublishReport:
        begun = time.monotonic()
        self._held = None
        await self._rollouts.pause()
        try:
            async with asyncio.TaskGroup() as loads:
                tasks = [loads.create_task(self._load_or_lose(member, update, probe)) for member in self._fleet.live]
        finally:
            await self._rollouts.resume()
        done = [load for task in tasks if (load := task.result()) is not None]
        self._fleet.require_any()
        self._require_alike(done, update)
        return PublishReport(
            seconds=time.monotonic() - begun,
            pause_seconds=max((load.pause_seconds for load in done), default=0.0),
            aborted=sum(load.aborted for load in done),
            frozen=sum(load.frozen for load in done),
        )

    async def _load_or_lose(
        self, member: Member, update: WeightUpdate, probe: Callable[[Member], None] | None
    ) -> _Load | None:
        """None where the replica was lost."""
        late = f"did not load version {update.weights.version} (sync.timeout_s)"
        try:
            async with self._fleet.calling(member, timeout_s=self._timeout_s, late=late):
                return await self._load(
                    member.replica, update, paused=None if probe is None else partial(probe, member)
                )
        except ReplicaLostError:
            return None

    async def _load(
        self, replica: FleetReplica, update: WeightUpdate, *, paused: Callable[[], None] | None = None
    ) -> _Load:
        begun, aborted, frozen = time.monotonic(), 0, 0
        kv: KeptKV = "recompute"
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
            pause_seconds=time.monotonic() - begun,
            aborted=aborted,
            frozen=frozen,
        )

    def _require_alike(self, loads: Sequence[_Load], update: WeightUpdate) -> None:
        """Compare the replicas, which all have one configuration, by what they hold of the newest version.

        Raises:
            EngineError: two of them hold different parameters.
        """
        for load in loads:
            held = self._held = self._held or load
            if load.checksum != held.checksum:
                raise EngineError(
                    f"{load.replica} holds parameters with checksum {load.checksum} of version "
                    f"{update.weights.version}, but {held.replica} holds {held.checksum}; one of them does not serve "
                    "what was published"
                )


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`. Where the caller is cancelled, `work` ends first and the cancellation goes on then."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # what ends the caller is more than what became of its publish
        raise
