"""The process of a replica: its host, and the client of the driver or of a rollout worker.

The nodes of a replica but the first are actors that the replica's own process starts:

    driver -> ReplicaHost (node 0) -> FollowerHost (node 1), FollowerHost (node 2), ...

Ray ends the followers when the process of the replica ends, because it started them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from async_rl.cluster.batching import BatchingClient, BatchingServer
from async_rl.cluster.rpc import ActorClient, Host
from async_rl.compat.garbage import make_collections_rare, no_collections
from async_rl.inference.nodes import NodePlace, NodeProcess, bring, reserve_ports
from async_rl.inference.replica import EngineReplica
from async_rl.inference.select import ReplicaSettings, actor_environment, start_node, start_replica
from async_rl.weights.store import LocalStore, remove_unused
from async_rl.weights.transport import Seat, UpdateError, WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError

P = ParamSpec("P")
T = TypeVar("T")
REFUSALS = (EngineError,)
"""Errors that reach a caller of a replica unchanged."""
CLOSE_S = 10.0  # bound on the end of the engine's processes of a node
LATE_S = 10.0  # from the end of a fetch, bounded by the follower, to its answer


class FollowerHost(Host):
    """The ranks of a replica on one node, in their own processes. Runs in one event loop."""

    _process: NodeProcess | None = None
    _store: LocalStore | None = None

    async def start(self, config: ReplicaSettings, place: NodePlace, *, store: Path | None, checkpoint: Path) -> str:
        """Start the processes of the engine; they then meet those of node 0. Returns the address of this node.

        Args:
            place: with index and size of this node, and address and port of node 0.
            store: see `ReplicaClient.start`.
        """
        host = ray.util.get_node_ip_address()
        self._place = replace(place, host=host, store=None if store is None else store_of_node(store))
        self._load_timeout_s = config.engine.load_timeout_s
        self._process = await start_node(config, self._place, checkpoint=checkpoint)
        return host

    async def until_dead(self) -> str:
        """Return the reason when the engine's process of this node has ended."""
        assert self._process is not None
        return await self._process.until_dead()

    async def fetch(self, update: WeightUpdate, seat: Seat | None) -> None:
        """See `async_rl.inference.nodes.Follower`."""
        assert self._place.store is not None
        if self._store is None:  # not at the start: if that failed, nothing would remove it
            self._store = open_store(self._place.store, host=self._place.host)
        try:
            await bring(self._store, update, seat, timeout_s=self._load_timeout_s)
        except (UpdateError, OSError) as error:
            raise UpdateError(str(error)) from error

    async def close(self) -> None:
        """End the engine's processes of this node and leave the store."""
        if self._process is not None:
            await self._process.stop()
        if self._store is not None:
            await asyncio.to_thread(self._store.release)


FollowerActor = cast(Any, ray.remote)(FollowerHost)


def store_of_node(store: Path) -> Path:
    """Directory of published versions of this process's node; nodes that are on one machine have their own, too."""
    return store.with_name(f"{store.name}-{ray.get_runtime_context().get_node_id()[:8]}")


def open_store(directory: Path, *, host: str) -> LocalStore:
    """The store of this node, after those of killed runs are removed."""
    remove_unused(directory.parent)
    return LocalStore(directory, host=host)


class FollowerClient(ActorClient):
    """The follower of a node, for the replica's process that starts it; see `async_rl.inference.nodes.Follower`.

    Args:
        name: name of the node.
        log: file with the output of the node.
        load_timeout_s: bound on a fetch in the follower.
    """

    def __init__(self, actor: Any, *, name: str, log: Path | None, load_timeout_s: float) -> None:
        super().__init__(actor, name=name, lost=ReplicaLostError, failed=EngineError, log=log)
        self._load_timeout_s = load_timeout_s

    @classmethod
    async def start(
        cls,
        config: ReplicaSettings,
        place: NodePlace,
        *,
        options: dict[str, Any],
        log: Path | None,
        store: Path | None,
        checkpoint: Path,
    ) -> FollowerClient:
        """Start a node of a replica, whose engine then waits for that of node 0; see `FollowerHost.start`.

        Args:
            options: Ray's options of the actor.
            log: log of the replica; each node has one next to it.

        Raises:
            EngineError: the processes did not start.
        """
        own = None if log is None else log.with_name(f"{log.stem}-node-{place.index}{log.suffix}")
        actor = FollowerActor.options(**options, max_restarts=0).remote(log=own)
        client = cls(actor, name=f"node {place.index}", log=own, load_timeout_s=config.engine.load_timeout_s)
        timeout_s = config.engine.start_timeout_s
        host = await client.ask("start", config, place, store=store, checkpoint=checkpoint, timeout_s=timeout_s)
        client.name = f"{client.name} ({host})"
        return client

    async def until_dead(self) -> str:
        """Return the reason when the engine's process of the node, or the follower itself, has ended."""
        try:
            reason = f"{self.name}: {await self.ask('until_dead')}"
        except EngineError as error:
            reason = str(error)
        return reason if self._log is None else f"{reason}; its output is in {self._log}"

    async def fetch(self, update: WeightUpdate, seat: Seat | None) -> None:
        fetched = self.actor.fetch.remote(update, seat)
        await self.answer("fetch", fetched, timeout_s=self._load_timeout_s + LATE_S, failed=UpdateError)

    async def close(self) -> None:
        with contextlib.suppress(EngineError):
            await self.ask("close", timeout_s=CLOSE_S)
        self.kill()


class ReplicaHost(BatchingServer):
    """A replica in its process, called through `BatchingClient`. Runs in one event loop."""

    async def start(
        self,
        config: ReplicaSettings,
        *,
        name: str,
        checkpoint: Path,
        store: Path | None,
        followers: Sequence[dict[str, Any]],
    ) -> str:
        """Start the engine, before any other call; returns the id of the node in the Ray cluster.

        Args:
            store: see `ReplicaClient.start`.
            followers: Ray's options of the actors on its further nodes.
        """
        starting = partial(start_replica, config, name=name, checkpoint=checkpoint)
        with no_collections():
            if followers:
                replica = await self._start_over_nodes(
                    config, starting, store=store, places=followers, checkpoint=checkpoint
                )
            else:
                replica = await starting()
        make_collections_rare()
        if store is not None:
            replica.store = open_store(store_of_node(store), host=ray.util.get_node_ip_address())
        self.serve(replica, refusals=REFUSALS)
        return ray.get_runtime_context().get_node_id()

    async def _start_over_nodes(
        self,
        config: ReplicaSettings,
        start: Callable[..., Coroutine[Any, Any, EngineReplica[Any]]],
        *,
        store: Path | None,
        places: Sequence[dict[str, Any]],
        checkpoint: Path,
    ) -> EngineReplica[Any]:
        """The replica that `start` starts, with followers in `places`; it fails when a follower ends."""
        host = ray.util.get_node_ip_address()
        reserved, port = reserve_ports(host)
        here = None if store is None else store_of_node(store)
        place = NodePlace(index=0, size=1 + len(places), host=host, leader=host, port=port, store=here)
        given: dict[str, Any] = {"log": self._log, "store": store, "checkpoint": checkpoint}
        starts = [
            FollowerClient.start(config, replace(place, index=index), options=options, **given)
            for index, options in enumerate(places, start=1)
        ]
        followers = await asyncio.gather(*starts)
        ends = [asyncio.create_task(follower.until_dead()) for follower in followers]
        replica = await _unless_ended(start(place=place), ends)
        for each in reserved:
            each.close()
        replica.followers = followers
        for end in ends:
            end.add_done_callback(lambda ended: replica.fail(ended.result()))
        self._ends = ends  # the event loop itself keeps no task alive
        return replica


async def _unless_ended(start: Coroutine[Any, Any, EngineReplica[Any]], ends: Sequence[asyncio.Task[str]]) -> Any:
    """The started replica; raises EngineError if another of its nodes ends first."""
    starting = asyncio.create_task(start)
    await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        return await starting
    starting.cancel()
    reasons = [end.result() for end in ends if end.done()]
    raise EngineError(f"the engine did not start: {reasons[0]}")


ReplicaActor = cast(Any, ray.remote)(ReplicaHost)


class ReplicaClient(ActorClient):
    """Calls the `EngineReplica` in another process; may be sent to other processes.

    A call takes as long as the replica gives signs of life: the replica bounds its control calls by
    `engine.load_timeout_s`, callers bound the rest. If a caller is cancelled, its call is cancelled in the replica too.

    Args:
        actor: handle of a `ReplicaHost`.
        name: name of the replica.
        timeout_s: silence after which the replica counts as dead, in seconds.
        log: file with the output of its process; its end becomes a note of an error of a start or a death.
        client: name of this client, unique among all clients of the replica.

    Attributes:
        node: id of its node in the Ray cluster; only `start` knows it.

    Raises:
        ReplicaLostError: from every method, if the process is dead or silent.
        EngineError: from every method, if the call failed.
    """

    def __init__(
        self, actor: Any, *, name: str, timeout_s: float, log: Path | None = None, client: str = "driver"
    ) -> None:
        super().__init__(actor, name=name, lost=ReplicaLostError, failed=EngineError, log=log)
        self.node = ""
        self._timeout_s = timeout_s
        self._calls: BatchingClient[EngineReplica[Any]] = BatchingClient(
            actor, name=client, server=name, timeout_s=timeout_s, lost=ReplicaLostError
        )

    def as_client(self, client: str) -> ReplicaClient:
        """Client of the same replica with another name, in the process that this one was sent to."""
        return ReplicaClient(self.actor, name=self.name, timeout_s=self._timeout_s, log=self._log, client=client)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ReplicaClient, self.actor, name=self.name, timeout_s=self._timeout_s, log=self._log), ()

    @classmethod
    async def start(
        cls,
        config: ReplicaSettings,
        *,
        name: str,
        checkpoint: Path,
        places: Sequence[dict[str, Any]],
        log: Path | None = None,
        store: Path | None = None,
    ) -> ReplicaClient:
        """Start the actor and its engine.

        Args:
            places: Ray's options of the actor of each node; see `engine.nodes`.
            log: file for its output; each further node has one next to it.
            store: directory of its node for published versions; None if it reads them where the trainer
                writes them.
        """
        first, *followers = places
        engine = config.engine
        environment = {"env_vars": {**config.environment, **actor_environment(engine)}}
        actor = ReplicaActor.options(**first, runtime_env=environment, max_restarts=0).remote(log=log)
        client = cls(actor, name=name, timeout_s=engine.load_timeout_s, log=log)
        given: dict[str, Any] = {"name": name, "checkpoint": checkpoint, "store": store, "followers": followers}
        bound = engine.start_timeout_s + engine.load_timeout_s
        try:
            client.node = await client.ask("start", config, **given, timeout_s=bound)
        except BaseException:
            client.kill()  # it holds the place of the next one
            raise
        return client

    async def call(
        self,
        method: Callable[Concatenate[EngineReplica[Any], P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call the replica."""
        try:
            return await self._calls.call(method, *args, **kwargs)
        except ReplicaLostError as error:
            self.explained(error)
            raise
        except EngineError:
            raise
        except Exception as cause:
            last_line = str(cause).rstrip().rpartition("\n")[2]  # of a traceback: the error
            raise EngineError(f"{self.name}: {method.__name__} failed: {last_line}") from cause

    async def forget_client(self, client: str) -> None:
        """Abort the requests of a client that died; they are gone from the engine when this returns."""
        await self.ask("forget_client", client, timeout_s=self._timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """Close the engine, and end the process whether it answers or not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.call(EngineReplica.close)
        finally:
            self.kill()
