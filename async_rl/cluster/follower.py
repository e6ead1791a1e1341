"""The nodes of a replica but the first, each in an actor that the replica's own process starts.

    driver -> ReplicaHost (node 0) -> FollowerHost (node 1), FollowerHost (node 2), ...

Ray ends the followers when the process of the replica ends, because it started them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from async_rl.cluster.rpc import ActorClient, Host
from async_rl.inference.nodes import NodePlace, NodeProcess, bring
from async_rl.inference.select import start_node
from async_rl.weights.store import LocalStore, remove_unused
from async_rl.weights.transport import Seat, UpdateError, WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError

if TYPE_CHECKING:
    from async_rl.config import RunConfig

CLOSE_S = 10.0  # bound on the end of the engine's processes of a node
LATE_S = 10.0  # from the end of a fetch, bounded by the follower, to its answer


class FollowerHost(Host):
    """The ranks of a replica on one node, in their own processes. Runs in one event loop."""

    _process: NodeProcess | None = None
    _store: LocalStore | None = None

    async def start(self, config: RunConfig, place: NodePlace, *, store: Path | None, checkpoint: Path) -> str:
        """Start the processes of the engine; they then meet those of node 0. Returns the address of this node.

        Args:
            place: with index and size of this node, and address and port of node 0.
            store: see `ReplicaClient.start`.
        """
        host = ray.util.get_node_ip_address()
        self._place = replace(place, host=host, store=None if store is None else store_of_node(store))
        self._load_timeout_s = config.engine.load_timeout_s
        self._process = await start_node(
            config.engine,
            self._place,
            checkpoint=checkpoint,
            capture_routing=config.captures_routing,
            capture_support=config.captures_support,
        )
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

    async def start(self, config: RunConfig, place: NodePlace, *, store: Path | None, checkpoint: Path) -> None:
        """See `FollowerHost.start`.

        Raises:
            EngineError: the processes did not start.
        """
        started = self.actor.start.remote(config, place, store=store, checkpoint=checkpoint)
        host = await self.answer("start", started, timeout_s=config.engine.start_timeout_s)
        self.name = f"{self.name} ({host})"

    async def until_dead(self) -> str:
        """Return the reason when the engine's process of the node, or the follower itself, has ended."""
        try:
            reason = f"{self.name}: {await self.answer('until_dead', self.actor.until_dead.remote())}"
        except EngineError as error:
            reason = str(error)
        return reason if self._log is None else f"{reason}; its output is in {self._log}"

    async def fetch(self, update: WeightUpdate, seat: Seat | None) -> None:
        fetched = self.actor.fetch.remote(update, seat)
        await self.answer("fetch", fetched, timeout_s=self._load_timeout_s + LATE_S, failed=UpdateError)

    async def close(self) -> None:
        with contextlib.suppress(EngineError):
            await self.answer("close", self.actor.close.remote(), timeout_s=CLOSE_S)
        self.kill()


async def start_followers(
    config: RunConfig,
    place: NodePlace,
    *,
    places: Sequence[dict[str, Any]],
    log: Path | None,
    store: Path | None,
    checkpoint: Path,
) -> list[FollowerClient]:
    """Start the other nodes of a replica, whose engines then wait for that of this process.

    Args:
        place: place of this node.
        places: Ray's options of the actor of each other node.
        log: log of the replica; each node has one next to it.
        store: see `ReplicaClient.start`.

    Raises:
        EngineError: one did not start.
    """
    followers: list[FollowerClient] = []
    for index, resources in enumerate(places, start=1):
        own = None if log is None else log.with_name(f"{log.stem}-node-{index}{log.suffix}")
        actor = FollowerActor.options(**resources, max_restarts=0).remote(log=own)
        timeout_s = config.engine.load_timeout_s
        followers.append(FollowerClient(actor, name=f"node {index}", log=own, load_timeout_s=timeout_s))
    await asyncio.gather(
        *(
            follower.start(config, replace(place, index=index), store=store, checkpoint=checkpoint)
            for index, follower in enumerate(followers, start=1)
        )
    )
    return followers
