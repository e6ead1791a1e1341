"""The process of a rollout worker: its host, its view of the replicas, and the driver's client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError

from agent_loop.boundary import USER_THREADS
from async_rl.cluster.replica import ReplicaClient
from async_rl.cluster.rpc import ActorClient, Host, Ref
from async_rl.compat.garbage import make_collections_rare, no_collections
from async_rl.inference.pool import Member, PoolReplica, ReplicaPool
from async_rl.rollout.dispatcher import WorkerLostError
from async_rl.rollout.worker import LostReplica, RolledGroup, RolloutWorker, WorkerEvent

if TYPE_CHECKING:
    from agent_loop.loop import Prompt
    from async_rl.config import ClusterConfig, RunConfig
    from message_queue.training_sequence import Content, GroupContent
    from message_queue.trajectory import Admission, Trajectory

P = ParamSpec("P")
T = TypeVar("T")
MAX_ROLLOUTS = 1 << 16  # concurrent calls of a rollout worker: one per group that it rolls out
EVENTS_S = 10.0  # longest wait of a rollout worker for something to report
GONE_S = 0.05  # time between two looks whether a killed process is dead


class WorkerReplicaPool(ReplicaPool):
    """The replicas as a worker sees them. The driver names them, and hears which ones the worker finds lost.

    Args:
        client: name of the worker, unique among all clients of the replicas.
    """

    def __init__(self, replicas: Sequence[PoolReplica], *, client: str) -> None:
        self._client = client
        super().__init__([cast(ReplicaClient, replica).as_client(client) for replica in replicas])
        self.supervise()  # the driver starts others: a request waits for one
        self.report: Callable[[WorkerEvent], None] = lambda _event: None

    def lose(self, member: Member, *, reason: str, notes: Sequence[str] = ()) -> None:
        """See ReplicaPool."""
        if member.lost is None:
            self.report(LostReplica(name=member.name, reason=reason, notes=tuple(notes)))
        super().lose(member, reason=reason, notes=notes)

    def follow(self, replicas: Sequence[PoolReplica]) -> None:
        """Use exactly these, without those that this worker found lost."""
        names = {replica.name for replica in replicas}
        for member in self.members:
            if member.name not in names:
                super().lose(member, reason="the driver has taken it out")
        known = {member.name for member in self.members}
        for replica in replicas:
            if replica.name not in known:
                self.join(cast(ReplicaClient, replica).as_client(self._client), slot=0)


class RolloutHost(Host):
    """A rollout worker in its process. Runs in one event loop."""

    def __init__(self, *, log: Path | None = None) -> None:
        super().__init__(log=log)
        with no_collections():
            from async_rl.cluster.build_worker import build_worker  # imports tokenizers, for seconds
        self._build = build_worker

    async def start(self, config: RunConfig, **given: Any) -> None:
        """`serve` in the worker's own process."""
        asyncio.get_running_loop().set_default_executor(USER_THREADS)  # as user code may call asyncio.to_thread
        with no_collections():
            self.serve(config, **given)
        make_collections_rare()

    def serve(
        self,
        config: RunConfig,
        *,
        name: str,
        checkpoint: Path,
        replicas: Sequence[PoolReplica],
        teachers: Mapping[str, Sequence[PoolReplica]] | None = None,
    ) -> None:
        """Build the worker, and take calls for it."""
        pool = WorkerReplicaPool(replicas, client=name)
        pools = {teacher: WorkerReplicaPool(each, client=name) for teacher, each in (teachers or {}).items()}
        self._worker = self._build(config, name=name, checkpoint=checkpoint, pool=pool, teachers=pools)
        for each in (pool, *pools.values()):
            each.report = self._worker.report

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Result of a method of this class, else of the worker."""
        return await (getattr(self, method, None) or getattr(self._worker, method))(*args, **kwargs)

    @cast(Any, ray.method)(num_returns=2)
    async def roll(
        self, prompt: Prompt, admission: Admission, existing: Sequence[Trajectory] = (), *, handout: int
    ) -> tuple[RolledGroup, Content]:
        """See `RolloutWorker.roll`. The driver owns the reference to the second result, which outlives this process."""
        return await self._worker.roll(prompt, admission, existing, handout=handout)

    async def events(self) -> list[WorkerEvent]:
        """See `RolloutWorker.events`; empty after `EVENTS_S` without one, as a sign of life."""
        try:
            async with asyncio.timeout(EVENTS_S):
                return await self._worker.events()
        except TimeoutError:
            return []


RolloutActor = cast(Any, ray.remote)(max_concurrency=MAX_ROLLOUTS)(RolloutHost)


class WorkerClient(ActorClient):
    """Driver side of a worker in another process.

    Args:
        timeout_s: silence after which the worker counts as lost.
        stop_timeout_s: the same while rollouts end: a tool or reward that blocks the worker does not hold up a stop.
        log: file with the output of the process; its end becomes a note of an error.

    Raises:
        WorkerLostError: from every call, if the worker is dead or silent.
    """

    def __init__(
        self, actor: Any, *, name: str, timeout_s: float, stop_timeout_s: float, log: Path | None = None
    ) -> None:
        super().__init__(actor, name=name, lost=WorkerLostError, refusals=(Exception,), log=log)
        self._timeout_s = timeout_s
        self._bounds: dict[str, float | None] = {  # of calls whose bound is not `timeout_s`
            "roll": None,  # `events` notices a worker that is silent in a call without a bound
            "validate": None,
            "events": EVENTS_S + timeout_s,
            "flush": stop_timeout_s,
            "end": stop_timeout_s,
        }

    @classmethod
    def create(
        cls, config: ClusterConfig, *, name: str, options: dict[str, Any], log: Path | None = None
    ) -> WorkerClient:
        """Start the process; it imports for seconds. `start` comes before all other calls."""
        actor = RolloutActor.options(**options, max_restarts=0).remote(log=log)
        return cls(actor, name=name, timeout_s=config.call_timeout_s, stop_timeout_s=config.stop_timeout_s, log=log)

    async def start(
        self,
        config: RunConfig,
        *,
        checkpoint: Path,
        replicas: Sequence[PoolReplica],
        teachers: Mapping[str, Sequence[PoolReplica]] | None = None,
    ) -> None:
        """Build the worker in the process.

        Args:
            teachers: teacher -> its live replicas.

        Raises:
            WorkerLostError: the process did not start. Exception: an error of the task.
        """
        given = {"name": self.name, "checkpoint": checkpoint, "replicas": replicas, "teachers": teachers}
        try:
            await self.ask("start", config, **given, timeout_s=config.cluster.start_timeout_s)
        except BaseException:
            self.kill()
            raise

    async def call(
        self,
        method: Callable[Concatenate[RolloutWorker, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call the worker. The content that `roll` returns is a reference: it stays on the node of the worker."""
        name = method.__name__
        if name == "roll":
            return cast(T, await self._roll(*args, **kwargs))
        bound = self._bounds.get(name, self._timeout_s)
        return await self.answer(name, self.actor.call.remote(name, *args, **kwargs), timeout_s=bound)

    async def _roll(self, *args: Any, **kwargs: Any) -> tuple[RolledGroup, Ref[GroupContent]]:
        """Call `RolloutHost.roll`. If the caller is cancelled, the rollouts of the group end too."""
        rolled, content = self.actor.roll.remote(*args, **kwargs)
        try:
            return await self.answer("roll", rolled), content
        except asyncio.CancelledError:
            admission: Admission = args[1]
            self.actor.call.remote(RolloutWorker.stop.__name__, admission.group)
            raise

    async def close(self, *, timeout_s: float) -> None:
        """End the rollouts of a worker that answers, then the process; returns once it is dead."""
        try:
            if not self.is_lost:
                await self.call(RolloutWorker.end)
        finally:
            self.kill()
            await self._gone(timeout_s)

    async def _gone(self, timeout_s: float) -> None:
        """Return once Ray knows that the killed process is dead, at the latest after `timeout_s`.

        A process that Ray cannot reach is not dead: it may write and send requests until the kill arrives. Its records
        replace nothing of its successor (see `content_reader`), but its requests would have the same names.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:  # Ray has no event for it
                    try:
                        await self.ask("pid")
                    except WorkerLostError as error:
                        if not isinstance(error.__cause__, ActorUnavailableError):
                            return
                    await asyncio.sleep(GONE_S)
