"""Brings a version to all nodes by `sync.route=broadcast`: who receives for a node, and what follows a failure.

    trainer ranks  ->  one replica of each node  ->  memory of the node, shared by its other replicas

If a bucket does not come to a node, the others of its group may fail too, so the nodes that lack the version form a new
group, without the replicas that died or hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace

from async_rl.inference.pool import Member, PoolReplica, ReplicaPool
from async_rl.inference.replica import DeliveryError, EngineReplica
from async_rl.weights.transport import Backend, Seat, Source, WeightUpdate
from message_queue.errors import EngineError, ReplicaLostError

_ATTEMPTS = 2
"""Deliveries in a row without any progress until the replicas, or the servers, count as lost."""


class Deliveries:
    """Deliveries to the replicas of a pool.

    Args:
        backend: gloo or nccl.
        timeout_s: bound on the delivery to one replica. A quarter is the bound on each bucket.
    """

    def __init__(self, pool: ReplicaPool, *, backend: Backend = "gloo", timeout_s: float) -> None:
        self._pool = pool
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._bucket_s = timeout_s / 4

    async def deliver(self, update: WeightUpdate, waiting: Collection[Member]) -> None:
        """Return when each node of the members in `waiting` has the version. Members that are lost leave the pool.

        Args:
            update: with `sources`.
            waiting: the members that shall load it.

        Raises:
            DeliveryError: it reached no node, although the replicas answer.
        """
        held, stalled = set[str](), 0
        while True:
            live = [member for member in waiting if member in self._pool.live_or_none]
            receivers = list({m.replica.node: m for m in live if m.replica.node not in held}.values())
            if not receivers:
                return
            give_up = bool(held) and stalled == _ATTEMPTS - 1
            failures = await self._attempt(update, receivers, held, give_up=give_up)
            stalled = stalled + 1 if len(failures) == len(receivers) else 0  # else one has it, or one is lost
            if stalled == _ATTEMPTS:
                raise failures[0]

    async def bring_to(self, replica: PoolReplica, update: WeightUpdate) -> None:
        """Bring a version to the node of a replica that comes late: from another replica, or else from the trainer.

        Raises:
            DeliveryError: neither has sent it.
        """
        for member in self._pool.live_or_none:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self._bucket_s):
                    source = await member.replica.call(EngineReplica.offer, update)
                return await replica.call(EngineReplica.fetch, update, self._seat((source,)))
        await replica.call(EngineReplica.fetch, update, self._seat(update.sources))

    async def _attempt(
        self, update: WeightUpdate, receivers: Sequence[Member], held: set[str], *, give_up: bool
    ) -> list[DeliveryError]:
        """One delivery; adds the nodes that have the version to `held`, and returns the errors of the other nodes.

        Args:
            give_up: count the replicas of the others as lost.
        """
        failures: list[DeliveryError] = []
        seat = self._seat(update.sources, size=len(receivers))

        async def receive(index: int, member: Member) -> None:
            late = f"did not receive version {update.weights.version} (sync.timeout_s)"
            try:
                async with self._pool.calling(member, timeout_s=self._timeout_s, late=late):
                    await member.replica.call(EngineReplica.fetch, update, replace(seat, index=index))
                held.add(member.replica.node)
            except DeliveryError as error:
                if give_up:
                    self._pool.lose(member, reason=str(error))
                else:
                    failures.append(error)
            except ReplicaLostError as error:  # the pool has removed the replica
                from async_rl.weights.broadcast import end_delivery  # imports torch; a configuration does without

                await asyncio.to_thread(end_delivery, seat, str(error))

        async with asyncio.TaskGroup() as deliveries:
            for index, member in enumerate(receivers):
                deliveries.create_task(receive(index, member))
        return failures

    def _seat(self, sources: tuple[Source, ...], *, size: int = 1) -> Seat:
        """The first seat of a new delivery."""
        return Seat(
            delivery=uuid.uuid4().hex,
            index=0,
            size=size,
            sources=sources,
            backend=self._backend,
            timeout_s=self._bucket_s,
        )
