"""Typed driver side of the queue's actors: one, or one that decides and others that hold the content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from async_rl.actors import QueueActor, ShardActor
from async_rl.logs import open_log
from async_rl.object_store import ObjectStore
from message_queue.client import QueueClient, QueueClientConfig
from message_queue.restart import JournalPlace
from message_queue.shards.handle import ShardedHandle
from message_queue.staleness import StalenessConfig
from message_queue.together import Together
from message_queue.tokens import RoutingSpec


class QueueHandle(QueueClient):
    """Driver side of the queue and of its processes.

    Args:
        shards: that hold the content; none where `actor` does.
    """

    def __init__(
        self,
        actor: ActorHandle[Any],
        *,
        name: str,
        routing: RoutingSpec | None,
        config: QueueClientConfig,
        shards: Sequence[ActorHandle[Any]] = (),
    ) -> None:
        self._actors = [actor, *shards]
        memory = ObjectStore()
        self._parts = [Together(part, name=name, before_send=memory.store) for part in self._actors]
        handle = ShardedHandle(self._parts[0], self._parts[1:]) if shards else self._parts[0]
        super().__init__(handle, name=name, routing=routing, config=config, memory=memory)

    async def pids(self, *, timeout_s: float) -> dict[str, int]:
        """Process ids of the actors by name, once they run."""
        names = ["queue", *(f"queue-shard-{shard}" for shard in range(len(self._parts) - 1))]
        parts = dict(zip(names, self._parts, strict=True))
        calls = (self._call(f"pid() of {name}", part.pid, allow_s=timeout_s) for name, part in parts.items())
        return dict(zip(names, await asyncio.gather(*calls), strict=True))

    def kill(self) -> None:
        """End the processes; what they were not asked to write down is lost."""
        for actor in self._actors:
            ray.kill(actor)


def start_queue(
    *,
    batch_groups: int,
    staleness: StalenessConfig,
    max_ready: int | None,
    updates_per_batch: int,
    journal: JournalPlace,
    routing: RoutingSpec | None,
    config: QueueClientConfig,
    options: dict[str, Any],
    shard_options: Sequence[dict[str, Any]] = (),
    logs: Path | None = None,
) -> QueueHandle:
    """Start the queue's actors; the client is the driver's side of them. Their journal is to be opened first.

    Args:
        shard_options: of each actor that holds a part of the content; none where the queue's holds all.
        logs: folder of the logs; None leaves the output to Ray.
    """

    def log(name: str) -> Callable[[], None] | None:
        return None if logs is None else partial(open_log, logs / f"{name}.log")

    shards = len(shard_options)
    actor = QueueActor.options(**options, max_restarts=0).remote(
        sharded=shards > 0,
        batch_groups=batch_groups,
        staleness=staleness,
        max_ready=max_ready,
        updates_per_batch=updates_per_batch,
        journal=journal.of_books(shards=shards) if shards else journal,
        memory=ObjectStore(),
        open_log=log("queue"),
    )
    holders = [
        ShardActor.options(**of, max_restarts=0).remote(
            journal.of_shard(shard, shards=shards), memory=ObjectStore(), open_log=log(f"queue-shard-{shard}")
        )
        for shard, of in enumerate(shard_options)
    ]
    return QueueHandle(actor, name="driver", routing=routing, config=config, shards=holders)
