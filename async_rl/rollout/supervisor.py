"""Starts a lost replica anew while the rest goes on.

    fleet: a replica is lost -> start another in its place -> it loads the newest weights -> it joins the fleet

What the lost one had in flight goes to another replica at once, or waits for the new one where none is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from agent_loop.engine import EngineError
from async_rl.logs import with_notes
from async_rl.rollout.fleet import FleetReplica, Member, ReplicaFleet
from async_rl.weights.publisher import Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """Bounds on restarts; trainer and queue are counted together, each replica on its own.

    max_restarts: most restarts within window_s; 0 restarts nothing.
    """

    max_restarts: int = 3
    window_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"supervision.max_restarts is {self.max_restarts}; must be >= 0, where 0 restarts nothing")
        if not 0 < self.window_s < float("inf"):
            raise ValueError(f"supervision.window_s is {self.window_s}; must be a positive number of seconds")


class RestartLimit:
    """Counts restarts on the clock of the event loop."""

    def __init__(self, config: SupervisionConfig) -> None:
        self.max_restarts, self.window_s = config.max_restarts, config.window_s
        self._restarts: deque[float] = deque()

    def allows_one_more(self) -> bool:
        """Whether there may be another restart, which is counted then."""
        now = asyncio.get_running_loop().time()
        while self._restarts and self._restarts[0] <= now - self.window_s:
            self._restarts.popleft()
        if len(self._restarts) == self.max_restarts:
            return False
        self._restarts.append(now)
        return True


class StartsReplica(Protocol):
    def __call__(self, lost: FleetReplica, /, *, slot: int, name: str) -> Awaitable[FleetReplica]:
        """Remove what is left of `lost` and start a replica called `name` in its place.

        Raises:
            EngineError: it did not start.
        """
        ...


class Supervisor:
    """The replicas as the pipeline sees them, with those that are lost started anew.

    Args:
        note: is told what a person should read.
    """

    def __init__(
        self,
        fleet: ReplicaFleet,
        publisher: Publisher,
        *,
        start: StartsReplica,
        config: SupervisionConfig,
        note: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._start = start
        self._limits = [RestartLimit(config) for _ in fleet.live]
        """One per slot, so that the failure of one node uses up no restarts of replicas on others."""
        self._cut_off: set[Member] = set()  # whose restart was counted
        self._note = note
        self._num_names = len(fleet.live)
        if config.max_restarts:
            fleet.supervise()

    async def busy_seconds(self) -> float:
        """See ReplicaFleet."""
        return await self._fleet.busy_seconds()

    async def watch(self, *, every_s: float, timeout_s: float) -> None:
        """Look for replicas that hang, and start anew those that are lost, forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fleet.watch(every_s=every_s, timeout_s=timeout_s))
            while True:
                tasks.create_task(self._restart(await self._fleet.next_lost()))

    # ---- inside

    async def _restart(self, member: Member) -> None:
        try:
            await self._replace(member)
        except asyncio.CancelledError:
            self._cut_off.add(member)
            self._fleet.put_back(member)  # for whoever watches next
            raise

    async def _replace(self, member: Member) -> None:
        lost, limit = member.name, self._limits[member.slot]
        while member in self._cut_off or limit.allows_one_more():
            self._cut_off.discard(member)
            name = f"{lost.rpartition('-')[0]}-{self._num_names}"
            self._num_names += 1
            try:
                member.replica = await self._start(member.replica, slot=member.slot, name=name)
                await self._publisher.bring_up(member.replica, slot=member.slot)
            except EngineError as error:
                self._note(f"replica {name} did not start in place of {lost}: {with_notes(error)}")
            else:
                self._note(f"replica {name} serves in place of {lost}")
                return
        self._note(
            f"replica {lost} is not restarted: {limit.max_restarts} restarts within "
            f"{limit.window_s:g} s (supervision.max_restarts)"
        )
        self._fleet.give_up()
