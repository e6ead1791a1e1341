"""Loads a new version of the weights on every replica.

resume: pause -> abort (partial segments return to their agent loops)  -> load -> resume (the loops continue them)
keep:   pause -> freeze (requests stay in the engine)                  -> load -> resume (each in a new segment)
drain:  pause -> wait until in-flight requests have finished           -> load -> resume

at_once: all replicas load concurrently, and no tool starts until the last has resumed
rolling: at most `max_paused` replicas are paused at a time; new and aborted requests go to the others, and tools start
staged:  all replicas load next to the weights that serve, while they generate; then all exchange the weights at once

    three replicas, max_paused=1      replica-0  | load |
                                      replica-1         | load |
                                      replica-2                | load |

Some replicas serve the new version while others serve the previous one, for a short time with `at_once` and for most of
a publish with `rolling`. An aborted rollout, or one of a replica that dies, may continue on a replica with the previous
version: 4 tokens of version 7 are then followed by tokens of version 6. The data contract allows this, because every
token records its own version. The staleness bound holds too: a group is admitted with version v only after all replicas
serve v, so a replica that serves the group has at least v.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, assert_never

from agent_loop.timeline import OpenSpan
from async_rl.files.logs import notes_of
from async_rl.inference.delivery import Deliveries
from async_rl.inference.gate import KVPolicy
from async_rl.inference.pool import Member, PoolReplica, ReplicaPool
from async_rl.inference.replica import DeliveryError, EngineReplica
from async_rl.metrics.trace import Trace
from async_rl.weights.transport import Backend, WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError

OnUpdate = Literal["resume", "keep", "drain"]
SyncMode = Literal["at_once", "rolling", "staged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """Durations and counts of one publish, or of one replica's part in it."""

    seconds: float
    """Seconds from the first pause, or from the start of the staging, to the last resume; of a replica its pause."""
    pause_seconds: float
    """Seconds of the longest pause of one replica."""
    aborted: int
    """Partial segments, over all replicas."""
    frozen: int = 0
    """Requests that stayed in an engine during the load, over all replicas."""

    def metrics(self) -> dict[str, float]:
        """The durations under their keys in `async_rl.metrics.registry.METRICS`."""
        return {"sync/seconds": self.seconds, "sync/pause_seconds": self.pause_seconds}


@dataclass(slots=True)
class _Publish:
    """A version that goes to the replicas, or the newest one that they have."""

    update: WeightUpdate
    """The version."""
    first_load: tuple[str, str] | None = None
    """The first replica that loaded it, and the checksum of its parameters; None before."""
    cancelled: bool = False
    """Whether no further replica is paused; those that are paused finish."""

    @property
    def version(self) -> int:
        """`param_version`."""
        return self.update.weights.version

    def compare(self, replica: str, checksum: str) -> None:
        """Compare the parameters that a replica has loaded with those of the first one, before it resumes.

        Raises:
            EngineError: they differ, although all replicas have the same configuration.
        """
        first, expected = self.first_load = self.first_load or (replica, checksum)
        if checksum != expected:
            raise EngineError(
                f"{replica} has parameters with checksum {checksum} for version {self.version}, but {first} has "
                f"{expected}; one replica does not serve the published weights"
            )


class _WrongLoad(EngineError):
    """A replica refused the version, or loaded other weights. It serves nothing until a load succeeds."""


class Rollouts(Protocol):
    """The part of the rollouts that a publish uses; see `async_rl.rollout.dispatcher.Dispatcher`."""

    async def pause(self) -> None:
        """Start no further tool calls."""
        ...

    async def resume(self) -> None:
        """Let tools start."""
        ...

    async def avoid(self, replicas: Collection[str]) -> None:
        """Send requests to these replicas only if no other is live; replaces the earlier names."""
        ...


class Publisher:
    """Loads a version on all replicas, concurrently or a few at a time.

    A replica that dies, or does not load the version within `timeout_s`, leaves the pool. The publish continues with
    the remaining replicas. A replica that refuses the version or loads other weights leaves too, unless it is the last.
    So does one that misses a bucket, unless it came to no replica: then they all wait for the next publish.

    Args:
        pool: the replicas that serve the run.
        on_update: how requests in flight are treated; see the top of this module.
        kv: K/V of the requests that are frozen with `keep`; see `async_rl.inference.replica.EngineReplica.load`.
        rollouts: `at_once` pauses their tools during a publish; `rolling` has them avoid the paused replicas.
        max_paused: most replicas that a publish pauses at a time, so that of N live replicas N - max_paused serve; None
            for `at_once` and `staged`.
        staged: whether the replicas load a version before their pause.
        backend: gloo or nccl, for `sync.route=broadcast`.
        timeout_s: bound on the whole publish of one replica, from pause to resume.
        trace: gets the time spans of the replicas; None for none.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        on_update: OnUpdate,
        kv: KVPolicy = "recompute",
        rollouts: Rollouts,
        max_paused: int | None = None,
        staged: bool = False,
        backend: Backend = "gloo",
        timeout_s: float,
        trace: Trace | None = None,
    ) -> None:
        self._pool = pool
        self._deliveries = Deliveries(pool, backend=backend, timeout_s=timeout_s)
        self._rollouts = rollouts
        self._on_update: OnUpdate = on_update
        self._kv: KVPolicy = kv
        self._max_paused = max_paused
        self._staged = staged
        self._timeout_s = timeout_s
        self._trace = trace or Trace(None)
        self._turn = asyncio.Lock()  # a replica must not join during a publish
        self._newest: _Publish | None = None
        self._undelivered: dict[Member, DeliveryError] = {}  # during the loads of the last publish

    async def publish(self, update: WeightUpdate, *, probe: Callable[[Member], None] | None = None) -> PublishReport:
        """Return when every remaining replica serves `update`.

        If the caller is cancelled, the replicas that are paused finish before the cancellation is raised, because an
        interrupted load would leave a replica with a mixture of weights. No further replica is paused.

        Args:
            update: the version.
            probe: called with each replica after its pause; requests that it sends are decoded first by the new
                version.

        Raises:
            DeliveryError: a bucket came to no replica, or to no node.
            EngineError: the last replica refused the version or loaded other weights, or one has other parameters than
                another, and either may be wrong.
            ReplicaLostError: no replica remains.
            ValueError: the version was published before with other weights, or a newer one was.
        """
        async with self._turn:
            members, begun = self._pool.live, self._begun(update)
            publish = asyncio.create_task(self._publish(begun, members, probe))
            try:
                return await asyncio.shield(publish)
            except asyncio.CancelledError:
                begun.cancelled = True
                await asyncio.wait({publish})
                if not publish.cancelled():
                    publish.exception()  # retrieved, so that asyncio does not log it: the cancellation takes precedence
                raise

    def _begun(self, update: WeightUpdate) -> _Publish:
        """The publish of a version; raises ValueError if the newest version does not precede it."""
        if self._newest is not None:
            weights, before = update.weights, self._newest.update.weights
            if weights.version <= before.version and weights != before:
                raise ValueError(f"{weights} is published after {before}; a version has one set of weights")
        self._newest = _Publish(update)
        return self._newest

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
            if self._newest is not None:
                update = self._newest.update
                try:
                    async with asyncio.timeout(self._timeout_s):
                        if update.sources:
                            await self._deliveries.bring_to(replica, update)
                        await replica.call(EngineReplica.fetch, update)
                        await self._load(replica, self._newest)
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
        """Resume the replicas after `abort_all`, but those that lack buckets of a version."""
        async with self._turn, asyncio.TaskGroup() as resumes:
            for member in set(self._pool.live) - self._undelivered.keys():
                resumes.create_task(
                    self._control(member, partial(member.replica.call, EngineReplica.resume), what="did not resume")
                )

    async def _interrupt(self, member: Member) -> None:
        async def abort() -> None:
            await member.replica.call(EngineReplica.pause)
            await member.replica.call(EngineReplica.abort)
            await member.replica.call(EngineReplica.drain)

        await self._control(member, abort, what="did not end its requests")

    async def _control(self, member: Member, call: Callable[[], Awaitable[None]], *, what: str) -> None:
        with contextlib.suppress(ReplicaLostError):  # the pool has removed the replica
            async with self._pool.calling(member, timeout_s=self._timeout_s, late=f"{what} (sync.timeout_s)"):
                await call()

    async def _publish(
        self, publish: _Publish, members: Sequence[Member], probe: Callable[[Member], None] | None
    ) -> PublishReport:
        started = time.monotonic()
        unstaged, self._undelivered = dict[Member, DeliveryError](), {}
        if publish.update.sources:
            await self._deliveries.deliver(publish.update, members)
        async with asyncio.TaskGroup() as stagings:
            for member in members:
                stagings.create_task(self._stage(member, publish.update, unstaged))
        self._blame(unstaged, members)
        async with self._prepared_rollouts():
            done = await self._load_all(publish, [member for member in members if member.lost is None], probe)
        self._blame(self._undelivered, members)
        self._pool.require_any()
        return PublishReport(
            seconds=time.monotonic() - started,
            pause_seconds=max((load.pause_seconds for load in done), default=0.0),
            aborted=sum(load.aborted for load in done),
            frozen=sum(load.frozen for load in done),
        )

    async def _stage(self, member: Member, update: WeightUpdate, unstaged: dict[Member, DeliveryError]) -> None:
        """Have a replica do what needs no pause: fetch the version, and stage it if versions are staged."""
        late = f"did not {'stage' if self._staged else 'fetch'} version {update.weights.version} (sync.timeout_s)"
        try:
            async with self._pool.calling(member, timeout_s=self._timeout_s, late=late):
                with self._span("fetch", member.replica, update):
                    await member.replica.call(EngineReplica.fetch, update)
                if self._staged:
                    with self._span("stage", member.replica, update):
                        await member.replica.call(EngineReplica.stage, update)
        except DeliveryError as error:
            unstaged[member] = error
        except EngineError as error:
            self._lose(member, error)

    @contextlib.asynccontextmanager
    async def _prepared_rollouts(self) -> AsyncGenerator[None]:
        """Context of the pauses: no tool starts, unless the publish is rolling."""
        if self._max_paused is None:
            await self._rollouts.pause()
        try:
            yield
        finally:
            if self._max_paused is None:
                await self._rollouts.resume()
            else:
                await self._rollouts.avoid(())

    async def _load_all(
        self, publish: _Publish, members: Sequence[Member], probe: Callable[[Member], None] | None
    ) -> list[PublishReport]:
        """Load the version on each replica, at most `max_paused` at a time."""
        done, paused = list[PublishReport](), set[str]()
        places = asyncio.Semaphore(len(members) if self._max_paused is None else self._max_paused)
        late = f"did not load version {publish.version} (sync.timeout_s)"

        async def load(member: Member) -> None:
            await places.acquire()
            if publish.cancelled:
                places.release()
                return
            paused.add(member.name)
            if self._max_paused is not None:
                await self._rollouts.avoid(frozenset(paused))  # first, so that an aborted request does not come back
            try:
                async with self._pool.calling(member, timeout_s=self._timeout_s, late=late):
                    on_pause = None if probe is None else partial(probe, member)
                    done.append(await self._load(member.replica, publish, on_pause=on_pause))
            except DeliveryError as error:
                self._undelivered[member] = error
            except (ReplicaLostError, _WrongLoad) as error:
                self._lose(member, error)
            paused.remove(member.name)
            places.release()  # after any other error no further replica is paused

        async with asyncio.TaskGroup() as loads:
            for member in members:
                loads.create_task(load(member))
        return done

    def _blame(self, undelivered: Mapping[Member, DeliveryError], members: Collection[Member]) -> None:
        """Lose the replicas that miss a bucket, if it came to another member.

        Raises:
            DeliveryError: it came to none.
        """
        failed = {member: error for member, error in undelivered.items() if member.lost is None}
        if failed and failed.keys() >= {member for member in members if member.lost is None}:
            raise next(iter(failed.values()))
        for member, error in failed.items():
            self._lose(member, error)

    def _lose(self, member: Member, error: EngineError) -> None:
        """Remove a replica that died or refused the version; raise the refusal if no other is left."""
        if not isinstance(error, ReplicaLostError) and self._pool.live_or_none == (member,):
            raise error
        self._pool.lose(member, reason=str(error), notes=notes_of(error))

    async def _load(
        self, replica: PoolReplica, publish: _Publish, *, on_pause: Callable[[], None] | None = None
    ) -> PublishReport:
        update = publish.update
        started, aborted, frozen = time.monotonic(), 0, 0
        kv: KVPolicy = "recompute"
        with self._span("pause", replica, update) as pause:
            await replica.call(EngineReplica.pause)
            if on_pause is not None:
                on_pause()
            match self._on_update:
                case "resume":
                    with self._span("abort", replica, update, inside=pause):
                        aborted = await replica.call(EngineReplica.abort)
                case "keep":
                    with self._span("freeze", replica, update, inside=pause):
                        frozen, kv = await replica.call(EngineReplica.freeze), self._kv
                case "drain":
                    with self._span("drain", replica, update, inside=pause):
                        await replica.call(EngineReplica.drain)
                case _:
                    assert_never(self._on_update)
            pause.args |= {"aborted": aborted, "held": frozen}
            with self._span("load", replica, update, inside=pause):
                await self._load_weights(replica, update, kv=kv)
            publish.compare(replica.name, await replica.call(EngineReplica.checksum))
            await replica.call(EngineReplica.resume)
        seconds = time.monotonic() - started
        return PublishReport(seconds=seconds, pause_seconds=seconds, aborted=aborted, frozen=frozen)

    async def _load_weights(self, replica: PoolReplica, update: WeightUpdate, *, kv: KVPolicy) -> None:
        try:
            loaded = await replica.call(EngineReplica.load, update, kv=kv)
        except (ReplicaLostError, DeliveryError):
            raise
        except EngineError as error:
            raise _WrongLoad(str(error)) from error
        if loaded != update.weights:
            raise _WrongLoad(f"{replica.name} loaded {loaded}, but {update.weights} was published")

    def _span(
        self, kind: str, replica: PoolReplica, update: WeightUpdate, *, inside: OpenSpan | None = None
    ) -> AbstractContextManager[OpenSpan]:
        """Context of a span of a replica, on its lane of publishes."""
        version = update.weights.version
        return self._trace.span(kind, process=replica.name, track="publish", inside=inside, version=version)
