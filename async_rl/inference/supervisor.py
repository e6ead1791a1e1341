"""Replaces failed replicas while the run continues.

    pool: a replica fails -> start another in its place -> it loads the newest weights -> it joins the pool

Requests in flight on the failed replica move to another one at once. If none is left, they wait for the new one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated

from annotated_types import Ge

from agent_loop.bounds import Seconds, bounded
from async_rl.files.logs import notes_of, with_notes
from async_rl.inference.gate import DraftCounts
from async_rl.inference.pool import Member, PoolReplica, ReplicaPool
from async_rl.inference.publisher import Publisher
from message_queue.errors import EngineError


@bounded("supervision")
class SupervisionConfig:
    """Bounds on restarts; trainer and queue are counted together, each replica on its own."""

    max_restarts: Annotated[int, Ge(0)] = 3
    """Most restarts within `window_s`; 0 disables restarts."""
    window_s: Seconds = 600.0
    """Length in seconds of the sliding window."""


class RestartLimit:
    """Counts restarts on the clock of the event loop."""

    def __init__(self, config: SupervisionConfig) -> None:
        self.max_restarts, self.window_s = config.max_restarts, config.window_s
        self._restarts: deque[float] = deque()

    def allows_one_more(self) -> bool:
        """Whether another restart is allowed; if so, it is counted."""
        now = asyncio.get_running_loop().time()
        while self._restarts and self._restarts[0] <= now - self.window_s:
            self._restarts.popleft()
        if len(self._restarts) == self.max_restarts:
            return False
        self._restarts.append(now)
        return True


ReplicaFactory = Callable[..., Awaitable[PoolReplica]]
"""`start(lost, slot=slot, name=name)` removes the remains of `lost` and starts a replica called `name` in its place. It
raises EngineError if that does not start."""


class Supervisor:
    """The controller's view of the replicas; replaces failed ones.

    Args:
        publisher: loads the newest weights on a new replica; None for a teacher, whose weights never change.
        note: called with each text for the user.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        publisher: Publisher | None,
        *,
        start: ReplicaFactory,
        config: SupervisionConfig,
        note: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._publisher = publisher
        self._start = start
        self._limits = [RestartLimit(config) for _ in pool.live]
        """One per slot, so that the failure of one node uses up no restarts of replicas on others."""
        self._cut_off: set[int] = set()  # slots whose counted restart was interrupted
        self._note = note
        self._num_names = len(pool.live)
        if config.max_restarts:
            pool.supervise()

    async def busy_seconds(self) -> float:
        """See ReplicaPool."""
        return await self._pool.busy_seconds()

    @property
    def drafts(self) -> DraftCounts:
        """See ReplicaPool."""
        return self._pool.drafts

    async def watch(self, *, every_s: float, timeout_s: float) -> None:
        """Detect hanging replicas, and replace failed ones, as long as there is a live one or one that is started.

        Raises:
            ReplicaLostError: none is left; names every replica with its reason.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pool.until_none())
            tasks.create_task(self._pool.watch(every_s=every_s, timeout_s=timeout_s))
            while True:
                tasks.create_task(self._restart(await self._pool.next_lost()))

    # ---- inside

    async def _restart(self, lost: Member) -> None:
        """Start replicas in place of a lost one until one joins the pool, or no further start is allowed."""
        slot, limit, remains = lost.slot, self._limits[lost.slot], lost.replica
        try:
            while slot in self._cut_off or limit.allows_one_more():
                self._cut_off.discard(slot)
                name = f"{lost.name.rpartition('-')[0]}-{self._num_names}"
                self._num_names += 1
                try:
                    remains = await self._start(remains, slot=slot, name=name)
                    if self._publisher is None:
                        self._pool.join(remains, slot=slot)
                    else:
                        await self._publisher.bring_up(remains, slot=slot)
                except EngineError as error:
                    self._pool.start_failed(name, reason=f"did not start: {error}", notes=notes_of(error))
                    self._note(f"replica {name} did not start in place of {lost.name}: {with_notes(error)}")
                else:
                    self._note(f"replica {name} serves in place of {lost.name}")
                    return
        except asyncio.CancelledError:
            self._cut_off.add(slot)
            self._pool.put_back(replace(lost, replica=remains))  # for the next `watch`, to remove what was started
            raise
        self._note(
            f"replica {lost.name} is not restarted: {limit.max_restarts} restarts within "
            f"{limit.window_s:g} s (supervision.max_restarts)"
        )
        self._pool.give_up()
