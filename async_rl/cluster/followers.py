"""The nodes of a replica but the first, each in an actor that the replica's own process starts.

    driver -> ReplicaHost (node 0) -> FollowerHost (node 1), FollowerHost (node 2), ...

Ray ends the followers when the process of the replica ends, which started them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from async_rl.cluster.actors import FollowerActor
from async_rl.cluster.clients import answer
from async_rl.inference.nodes import NodePlace
from async_rl.inference.select import EngineConfig
from async_rl.weights.transport import Seat, UpdateError, WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError

CLOSE_S = 10.0  # bound on the end of the engine's processes of a node
LATE_S = 10.0  # from the end of a fetch, which the follower bounds, to its answer


class FollowerClient:
    """The follower of a node, for the replica's process, which starts it; see `async_rl.inference.nodes.Follower`.

    Args:
        name: of the replica and the node.
        log: file with the output of the node.
    """

    def __init__(self, actor: Any, *, name: str, log: Path | None, load_timeout_s: float) -> None:
        self._actor = actor
        self._name = name
        self._log = log
        self._load_timeout_s = load_timeout_s

    async def start(self, config: EngineConfig, place: NodePlace, **options: Any) -> None:
        """See `FollowerHost.start`.

        Raises:
            EngineError: the processes did not start.
        """
        started = self._actor.start.remote(config, place, **options)
        host = await answer(
            started,
            who=self._name,
            what="start",
            timeout_s=config.start_timeout_s,
            error=EngineError,
            dead=ReplicaLostError,
        )
        self._name = f"{self._name} ({host})"

    async def until_dead(self) -> str:
        """Return the reason when the engine's process of the node, or the follower itself, has ended."""
        try:
            reason = await self._actor.until_dead.remote()
        except RayError as error:
            reason = f"the process of the node died: {type(error).__name__}"
        return f"{self._name}: {reason}{'' if self._log is None else f'; its output is in {self._log}'}"

    async def fetch(self, update: WeightUpdate, seat: Seat | None) -> None:
        await answer(
            self._actor.fetch.remote(update, seat),
            who=self._name,
            what="fetch",
            timeout_s=self._load_timeout_s + LATE_S,
            error=UpdateError,
            dead=ReplicaLostError,
        )

    async def close(self) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._actor.close.remote()
        ray.kill(self._actor)


async def start_followers(
    config: EngineConfig,
    place: NodePlace,
    *,
    places: Sequence[dict[str, Any]],
    log: Path | None,
    **options: Any,
) -> list[FollowerClient]:
    """Start the other nodes of a replica, whose engines then wait for that of this process.

    Args:
        place: of this node.
        places: actor options of each.
        log: of the replica; each node has one beside it.
        options: of `FollowerHost.start`.

    Raises:
        EngineError: one did not start.
    """
    followers: list[FollowerClient] = []
    for index, resources in enumerate(places, start=1):
        own = None if log is None else log.with_name(f"{log.stem}-node-{index}{log.suffix}")
        actor = FollowerActor.options(**resources, max_restarts=0).remote(log=own)
        followers.append(FollowerClient(actor, name=f"node {index}", log=own, load_timeout_s=config.load_timeout_s))
    await asyncio.gather(
        *(
            follower.start(config, replace(place, index=index), **options)
            for index, follower in enumerate(followers, start=1)
        )
    )
    return followers
