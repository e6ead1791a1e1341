"""The process of a replica: its host, and the client of the driver or of a rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray

from async_rl.cluster.batching import BatchingClient, ServingHost
from async_rl.cluster.follower import open_store, start_followers, store_of_node
from async_rl.cluster.rpc import ActorClient
from async_rl.compat.garbage import make_collections_rare, no_collections
from async_rl.inference.nodes import NodePlace, reserve_ports
from async_rl.inference.replica import EngineReplica
from async_rl.inference.select import actor_environment, start_replica
from message_queue.errors import EngineError, ReplicaLostError

if TYPE_CHECKING:
    from async_rl.config import RunConfig

P = ParamSpec("P")
T = TypeVar("T")
REFUSALS = (EngineError,)
"""Errors that reach a caller of a replica unchanged."""


class ReplicaHost(ServingHost):
    """A replica in its process, called through `BatchingClient`. Runs in one event loop."""

    async def start(
        self, config: RunConfig, *, name: str, checkpoint: Path, store: Path | None, followers: Sequence[dict[str, Any]]
    ) -> str:
        """Start the engine, before any other call; returns the id of the node in the Ray cluster.

        Args:
            store: see `ReplicaClient.start`.
            followers: Ray's options of the actors on its further nodes.
        """
        starting = partial(
            start_replica,
            config.engine,
            name=name,
            checkpoint=checkpoint,
            capture_routing=config.captures_routing,
            force_routing=config.forces_routing,
            capture_support=config.captures_support,
        )
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
        config: RunConfig,
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
        followers = await start_followers(
            config, place, places=places, log=self._log, store=store, checkpoint=checkpoint
        )
        ends = [asyncio.create_task(follower.until_dead()) for follower in followers]
        replica = await _unless_ended(start(place=place), ends)
        for each in reserved:
            each.close()
        replica.followers = followers
        for end in ends:
            end.add_done_callback(lambda ended: replica.fail(ended.result()))
        self._ends = ends  # the event loop itself keeps no task alive
        return replica

    async def forget_client(self, client: str) -> None:
        """Abort the requests of a client that died; they are gone from the engine when this returns."""
        if calls := self._serving().forget_client(client):
            await asyncio.wait(calls)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """How to reach a replica; may be sent to other processes."""

    actor: Any
    """Handle of a `ReplicaHost`."""
    name: str
    """Name of the replica."""
    timeout_s: float
    """Silence after which the replica counts as dead, in seconds."""
    log: Path | None = None
    """File with the output of its process; its end becomes a note of an error of a start or a death."""


class ReplicaClient(ActorClient):
    """Calls the `EngineReplica` in another process.

    A call takes as long as the replica gives signs of life: the replica bounds its control calls by
    `engine.load_timeout_s`, callers bound the rest. If a caller is cancelled, its call is cancelled in the replica too.

    Args:
        address: address of the replica.
        client: name of this client, unique among all clients of the replica.

    Attributes:
        node: id of its node in the Ray cluster; only `start` knows it.

    Raises:
        ReplicaLostError: from every method, if the process is dead or silent.
        EngineError: from every method, if the call failed.
    """

    def __init__(self, address: ReplicaAddress, *, client: str = "driver") -> None:
        super().__init__(address.actor, name=address.name, lost=ReplicaLostError, failed=EngineError, log=address.log)
        self.address = address
        self.node = ""
        self._calls: BatchingClient[EngineReplica[Any]] = BatchingClient(
            address.actor,
            name=client,
            server=address.name,
            timeout_s=address.timeout_s,
            lost=ReplicaLostError,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaClient, (self.address,)  # the process that gets it uses its address

    @classmethod
    async def start(
        cls,
        config: RunConfig,
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
        environment = {"env_vars": {**config.cluster.replica_env, **actor_environment(engine)}}
        actor = ReplicaActor.options(**first, runtime_env=environment, max_restarts=0).remote(log=log)
        client = cls(ReplicaAddress(actor=actor, name=name, timeout_s=engine.load_timeout_s, log=log))
        started = actor.start.remote(config, name=name, checkpoint=checkpoint, store=store, followers=followers)
        try:
            bound = engine.start_timeout_s + engine.load_timeout_s
            client.node = await client.answer("start", started, timeout_s=bound)
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
        forgotten = self.actor.forget_client.remote(client)
        await self.answer("forget_client", forgotten, timeout_s=self.address.timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """Close the engine, and end the process whether it answers or not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.call(EngineReplica.close)
        finally:
            self.kill()
