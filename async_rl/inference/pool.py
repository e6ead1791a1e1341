"""The live replicas, shared by router, publisher and busy clock. A failed replica leaves; another may join.

    router     ReplicaLostError from generate                       \
    publisher  the same from a control call, or a timeout            > lose(): all calls on that replica end at once
    watch      the same from stats, or no answer in time            /

The first caller that detects a hanging replica thereby releases all others, and its requests move to another replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from async_rl.files.logs import notes_of
from async_rl.inference.gate import DraftCounts
from async_rl.inference.notifier import Notifier
from async_rl.inference.replica import EngineReplica
from async_rl.inference.stub import Stub
from message_queue.errors import ReplicaLostError


class PoolReplica(Stub[EngineReplica[Any]], Protocol):
    """A replica as the pool's users see it. node: id of its node."""

    node: str


@dataclass(slots=True, eq=False)
class Member:
    """A replica of the pool. A successor is another member, with another name."""

    replica: PoolReplica
    """Client of the replica; never exchanged."""
    slot: int
    """Index among the initial replicas; a successor has the same one."""
    lost: str | None = None
    """Reason of its failure; None while it is live."""
    in_flight: int = 0
    """Requests of the router on this replica."""
    busy_seconds: float = 0.0
    """Last reading of its counter."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Last reading of its counters."""
    calls: dict[asyncio.Timeout, None] = field(default_factory=dict[asyncio.Timeout, None])
    """Deadlines of the calls under way, in starting order; `lose` ends these calls."""

    @property
    def name(self) -> str:
        return self.replica.name


class ReplicaPool:
    """Replicas with unique names.

    Args:
        on_lost: called once per failed replica, with a text for the user.

    Attributes:
        members: all replicas, including failed ones.
        changed: rings when a replica joins or fails, and when none is started in place of a failed one.

    Raises:
        ValueError: no replica, or two with the same name.
    """

    def __init__(self, replicas: Sequence[PoolReplica], *, on_lost: Callable[[str], None] | None = None) -> None:
        if not replicas:
            raise ValueError("engine.replicas is 0; a run needs at least one replica")
        names = [replica.name for replica in replicas]
        if len(set(names)) != len(names):
            raise ValueError(f"replicas are named {names}; give each a name of its own")
        self.members: tuple[Member, ...] = tuple(Member(replica, slot) for slot, replica in enumerate(replicas))
        self._num_slots = len(replicas)
        self._awaited = 0
        self._to_restart: asyncio.Queue[Member] = asyncio.Queue()
        self._is_supervised = False
        self.changed = Notifier()
        self._avoided: frozenset[str] = frozenset()
        self._failed_starts: dict[str, str] = {}
        self._notes: list[str] = []
        self._on_lost = on_lost

    @property
    def live(self) -> tuple[Member, ...]:
        """Live replicas; empty only while one is being started.

        Raises:
            ReplicaLostError: none is left; names every replica with its reason.
        """
        self.require_any()
        return self.live_or_none

    @property
    def live_or_none(self) -> tuple[Member, ...]:
        """Live replicas, if any."""
        return tuple(member for member in self.members if member.lost is None)

    def avoid(self, names: Collection[str]) -> None:
        """Leave these replicas out of `serving` from now on, unless no other is live; replaces the earlier names."""
        self._avoided = frozenset(names)

    def follow(self, replicas: Sequence[PoolReplica]) -> None:
        """Use exactly these replicas; no effect on the pool of the driver, as it knows them."""

    async def serving(self) -> tuple[Member, ...]:
        """Replicas for new requests, as soon as there is one: the live ones without those to avoid, if any is left.

        Raises:
            ReplicaLostError: none is left, and none is being started.
        """
        while not (live := self.live):
            await self.changed.wait()
        return tuple(member for member in live if member.name not in self._avoided) or live

    def supervise(self) -> None:
        """Declare that a supervisor takes each `next_lost` replica and answers with `join` or `give_up`."""
        self._is_supervised = True

    async def next_lost(self) -> Member:
        """Wait for a failed replica that is to be restarted; without `supervise`, wait forever."""
        return await self._to_restart.get()

    def put_back(self, member: Member) -> None:
        """Return a failed replica that was not restarted yet; the next `next_lost` returns it."""
        self._to_restart.put_nowait(member)

    def join(self, replica: PoolReplica, *, slot: int) -> None:
        """Add a live replica that was started in place of a failed one, as a new member.

        Raises:
            ValueError: a member had this name before.
        """
        if replica.name in {member.name for member in self.members}:
            raise ValueError(f"a replica named {replica.name} was in the pool before; give its successor another name")
        self.members = (*self.members, Member(replica, slot))
        self._awaited -= 1
        self.changed.notify_all()

    def start_failed(self, name: str, *, reason: str, notes: Sequence[str] = ()) -> None:
        """Note why a replica that was to be a successor did not join; notes as for `lose`."""
        self._failed_starts[name] = reason
        self._notes += notes

    def give_up(self) -> None:
        """Note that a failed replica will not be restarted."""
        self._awaited -= 1
        self.changed.notify_all()

    @property
    def lost(self) -> dict[str, str]:
        """Name -> reason of every failed replica."""
        return {member.name: member.lost for member in self.members if member.lost is not None}

    @property
    def causes(self) -> dict[str, str]:
        """`lost`, and the reason of each replica that did not start in place of a failed one."""
        return self.lost | self._failed_starts

    def require_any(self) -> None:
        """Raise ReplicaLostError if none is live or being started; it names every replica with its reason."""
        if not self.live_or_none and not self._awaited:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.causes.items())
            error = ReplicaLostError(f"all {len(self.causes)} replicas are lost ({reasons})")
            for note in self._notes:
                error.add_note(note)
            raise error

    async def until_none(self) -> NoReturn:
        """Wait until no replica is left and none is being started.

        Raises:
            ReplicaLostError: see `require_any`.
        """
        while True:
            self.require_any()
            await self.changed.wait()

    def lose(self, member: Member, *, reason: str, notes: Sequence[str] = ()) -> None:
        """Remove a replica permanently and end every call on it. Later reasons are ignored.

        Args:
            notes: notes of the causing error, such as the end of a log.
        """
        if member.lost is not None:
            return
        member.lost = reason
        self._notes += notes
        self.changed.notify_all()
        now = asyncio.get_running_loop().time()
        for call in member.calls:
            if not call.expired():  # an expired call ends by itself
                call.reschedule(now)
        if self._is_supervised:
            self._awaited += 1
            self._to_restart.put_nowait(member)
        if self._on_lost is not None:
            text = f"replica {member.name} is lost, {len(self.live_or_none)} left: {reason}"
            self._on_lost("\n".join([text, *notes]))

    @asynccontextmanager
    async def calling(
        self, member: Member, *, timeout_s: float | None = None, late: str = "did not answer"
    ) -> AsyncGenerator[None]:
        """Context around calls on one replica: a ReplicaLostError in the block removes it from the pool.

        Args:
            timeout_s: bound on the block; a replica that exceeds it counts as failed.
            late: verb phrase for the reason of a timeout.

        Raises:
            ReplicaLostError: from the block, or as soon as the replica fails for another reason.
        """
        self._require_live(member)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                member.calls[deadline] = None
                try:
                    yield
                finally:
                    member.calls.pop(deadline, None)
        except TimeoutError:
            if not deadline.expired():
                raise
            self.lose(member, reason=f"{member.name} {late} within {timeout_s} s")  # no effect if it failed before
            self._require_live(member)
        except ReplicaLostError as error:
            self.lose(member, reason=str(error), notes=notes_of(error))
            raise

    async def watch(self, *, every_s: float, timeout_s: float) -> None:
        """Poll the counters of every replica, forever; one that does not answer in time counts as failed.

        Without this task a hanging replica is detected at the next publish, and this may wait for its rollouts.
        """
        while True:
            await asyncio.sleep(every_s)
            async with asyncio.TaskGroup() as reads:
                for member in self.live_or_none:
                    reads.create_task(self._read_busy(member, timeout_s=timeout_s))

    async def busy_seconds(self) -> float:
        """Seconds with requests in flight since the start, mean over all slots; failed replicas count as idle."""
        async with asyncio.TaskGroup() as reads:
            for member in self.live_or_none:
                reads.create_task(self._read_busy(member))
        return sum(member.busy_seconds for member in self.members) / self._num_slots

    @property
    def drafts(self) -> DraftCounts:
        """Draft tokens of all replicas since the start, at the last reading of `busy_seconds`."""
        return sum((member.drafts for member in self.members), DraftCounts())

    # ---- inside

    def _require_live(self, member: Member) -> None:
        if member.lost is not None:
            raise ReplicaLostError(member.lost)

    async def _read_busy(self, member: Member, *, timeout_s: float | None = None) -> None:
        try:
            async with self.calling(member, timeout_s=timeout_s):
                stats = await member.replica.call(EngineReplica.stats)
                member.busy_seconds, member.drafts = stats.busy_seconds, stats.drafts
        except ReplicaLostError:
            return  # keep the last reading
