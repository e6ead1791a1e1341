"""The queue between rollout and training: bounded, closable, one event loop, conditions instead of polling.

    admit -> (rollout) -> put -> [ready] -> take -> (training) -> trained
      open                        ready             taken

Admission is counted in-flight first, so a group that starts is certain of its place in the staleness bound. State
changes in one piece with its record on its way: a method that is cancelled before that has changed nothing. After that
it waits for the record only. An admission or a batch whose caller is cancelled then is what the next call gets.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, TypeVar, cast

from message_queue.contract import (
    Admission,
    Batch,
    DuplicateGroup,
    PutResult,
    QueueClosed,
    QueuedGroup,
    QueueError,
    QueueSnapshot,
    UnknownGroup,
)
from message_queue.delivery import check_delivery
from message_queue.ledger import LedgerRecord, LedgerTotal
from message_queue.log import WRITTEN, NoLog, QueueLog
from message_queue.policies import build_policy
from message_queue.progress import RolloutRecord
from message_queue.staleness import StalenessConfig
from message_queue.start import QueueStart, queue_start
from message_queue.state import QueueState

__all__ = [
    "Admission",
    "Batch",
    "DuplicateGroup",
    "PutResult",
    "QueueClosed",
    "QueueError",
    "QueueSnapshot",
    "QueuedGroup",
    "TrajectoryQueue",
    "UnknownGroup",
]

G = TypeVar("G", bound=QueuedGroup)


class TrajectoryQueue(Generic[G]):
    """Groups from admission to the trainer's acknowledgement.

    Args:
        batch_groups: groups that `take` hands out together.
        staleness: the bound and what happens at it.
        max_ready: ready groups held before `put` waits; None where the staleness bound alone limits them.
        updates_per_batch: optimizer updates that the trainer makes from one batch.
        restored: continue after this state. Unfinished groups of a snapshot end as dropped; admit their prompts again.
            Give it a larger `next_group` where ids are known to have been handed out after it.
        log: records every change.

    Raises:
        ValueError: no batch could ever be taken; names the field and the value.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        staleness: StalenessConfig,
        max_ready: int | None = None,
        updates_per_batch: int = 1,
        restored: QueueSnapshot | QueueStart[G] | None = None,
        log: QueueLog | None = None,
    ) -> None:
        if max_ready is not None and max_ready < batch_groups:
            raise ValueError(f"max_ready is {max_ready}; one batch is {batch_groups} groups: raise it to that or None")
        start = cast(QueueStart[G], queue_start(restored))
        self._log = log or NoLog()
        self._changed = asyncio.Condition()
        self._closed = False
        policy = build_policy(staleness, batch_groups=batch_groups, updates_per_batch=updates_per_batch)
        self._state = state = QueueState(start, policy=policy, max_ready=max_ready, log=self._log)
        self._held, self._schedule, self._ledger = state.held, state.schedule, state.ledger
        self._admissions, self._versions = state.admissions, state.versions
        self._unreceived: deque[Batch[G]] = deque()

    # ---- the rollout side

    async def admit(self, prompt: int) -> Admission:
        """Wait until one more group fits the staleness bound, then start it.

        It is of `prompt`, unless a prompt whose group expired is to be admitted again (policy recycle): then of that
        one, and `prompt` is asked for again by the next call.

        Raises:
            QueueClosed: nothing is admitted any more.
        """
        async with self._changed:
            await self._until(
                lambda: (
                    self._admissions.unheard(prompt) is not None
                    or self._schedule.can_admit(self._versions.served_update)
                ),
                what="admit",
            )
            admission, written = self._admissions.unheard(prompt), cast(Awaitable[None], WRITTEN)
            if admission is None:
                admission, written = self._state.start(prompt)
            self._admissions.heard(admission)
        try:
            await written
        except asyncio.CancelledError:
            self.take_back(admission)
            raise
        return admission

    def take_back(self, admission: Admission) -> None:
        """Nobody heard of an admission: the next `admit` of its prompt returns it."""
        if admission.group in self._held.open:
            self._admissions.take_back(admission)

    async def append(self, records: Sequence[RolloutRecord]) -> None:
        """Record how far rollouts are, in order. What belongs to a group that is not open any more is left out."""
        for written in [self._log.appended(record) for record in records if record.group in self._held.open]:
            await written

    async def put(self, group: G) -> PutResult:
        """Hand in a finished group. Waits while `max_ready` groups are ready and a batch of them can be taken.

        A group that the trainer waits for is let in whatever the number, so a full queue never blocks training.

        Raises:
            UnknownGroup, DuplicateGroup: the group is not open.
            ContractError: it is not complete, or does not match its admission or the published versions.
            QueueClosed: the group stays open in the ledger.
        """
        async with self._changed:
            self._check_delivery(group)
            newest = self._state.newest_update(group)
            await self._until(lambda: self._schedule.lets_in(group.admitted_update, newest_update=newest), what="put")
            self._check_delivery(group)  # it may have been given up while this call waited
            expired, written = self._state.deliver(group)
            self._changed.notify_all()
        await written
        return PutResult(expired=expired)

    async def drop(self, group: int, *, reason: str, segments: int = 0, tokens: int = 0, expired: bool = False) -> bool:
        """Give up an open group; `segments` and `tokens` were generated in vain.

        Args:
            expired: it was cancelled for its age, so that policy recycle admits its prompt again.

        Returns:
            False where the group is not open any more: it was put, or given up, in the meantime.

        Raises:
            UnknownGroup: it was never admitted.
            LedgerError: the reason is empty.
        """
        async with self._changed:
            if group not in self._held.open:
                self._require_known(group)
                return False
            written = self._state.give_up(group, reason=reason, segments=segments, tokens=tokens, expired=expired)
            self._changed.notify_all()
        await written
        return True

    def expired(self) -> list[int]:
        """Open groups that can no longer be trained; their rollouts are best cancelled and dropped."""
        return self._schedule.hopeless()

    async def wait_expired(self, *, known: Collection[int] = ()) -> list[int]:
        """Wait for open groups that can no longer be trained and are not in `known`.

        Raises:
            QueueClosed: no group expires any more.
        """
        async with self._changed:
            await self._until(lambda: not set(known).issuperset(self._schedule.hopeless()), what="wait_expired")
            return [group for group in self._schedule.hopeless() if group not in known]

    # ---- the training side

    async def take(self) -> Batch[G]:
        """Wait for the next batch. Its groups count as trained at the update it is taken at.

        Policy wait hands out the oldest ready groups, as soon as that lets every other group in on time. The other
        policies hand out what is ready: drop in the order it was put, recycle and mask the oldest first.

        Raises:
            QueueClosed: closed, and what is ready makes no batch; the message says what is left.
            StalenessError: a token with gradient is older than the bound. Nothing is taken.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._unreceived or self._schedule.batch_ready())
            if self._unreceived:
                return self._unreceived.popleft()
            if not self._schedule.batch_ready():
                raise QueueClosed(
                    f"the queue is closed and {len(self._held.ready)} ready groups make no batch of "
                    f"{self._schedule.budget.batch_groups}; {len(self._held.open)} groups stay open, "
                    f"{len(self._held.taken)} were taken and not acknowledged"
                )
            batch, written = self._state.take()
            self._changed.notify_all()
        try:
            for record in written:
                await record
        except asyncio.CancelledError:
            self._unreceived.append(batch)
            raise
        return batch

    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None:
        """Acknowledge groups of a taken batch; `train_step` is the optimizer step they took part in.

        Args:
            tokens: of each group, those that took gradient as the trainer's side counts them; none: not counted there.

        Raises:
            QueueError: a group was not taken, or was acknowledged before. Nothing is changed.
        """
        async with self._changed:
            not_taken = sorted(
                group for group, times in Counter(groups).items() if times > 1 or group not in self._held.taken
            )
            if not_taken:
                raise QueueError(f"groups {not_taken} are not taken, or acknowledged twice; nothing is changed")
            written = self._state.trained(groups, train_step=train_step, tokens=tokens)
        await written

    async def publish(self, version: int, *, update: int) -> None:
        """The trainer published `version`, which holds `update` optimizer updates. Call it before a replica loads it.

        Raises:
            QueueError: the version or its update goes back, or the update is of a batch that was never taken.
        """
        async with self._changed:
            if update > self._schedule.next_update:
                raise QueueError(
                    f"published version {version} with {update} updates; batches up to update "
                    f"{self._schedule.next_update} were taken"
                )
            self._versions.publish(version, update=update)
            written = self._log.published(version, update=update)
        await written

    async def loaded(self, version: int) -> None:
        """Every replica serves `version`: groups admitted from now on start on it.

        Raises:
            QueueError: it was never published, or is older than what the replicas served before.
        """
        async with self._changed:
            self._versions.load(version)
            self._changed.notify_all()

    async def sync(self) -> None:
        """Return once all that was recorded so far is on the disk. Call it before a checkpoint is made."""
        await self._log.synced()

    async def checkpointed(self, train_step: int) -> None:
        """A checkpoint holds `train_step` and no restart goes back before it."""
        await self._log.checkpointed(train_step)

    # ---- both

    async def close(self) -> None:
        """Wake every waiter with QueueClosed. Batches that are complete can still be taken. Idempotent."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def snapshot(self) -> QueueSnapshot:
        """The state now."""
        return self._state.snapshot(closed=self._closed)

    @property
    def live(self) -> list[int]:
        """Groups that are open, ready or taken."""
        return self._held.live

    def drain_records(self) -> list[LedgerRecord]:
        """Ledger records of the groups that ended since the last call."""
        return self._ledger.drain_records()

    def closing_records(self) -> list[LedgerRecord | LedgerTotal]:
        """Ledger records not drained yet, one for each group that is still open, and the total."""
        return self._ledger.closing_records(self._held.live, open_tokens=self._held.num_tokens)

    # ---- inside; called with the condition held

    async def _until(self, met: Callable[[], bool], *, what: str) -> None:
        await self._changed.wait_for(lambda: self._closed or met())
        if self._closed:
            raise QueueClosed(f"{what}: the queue is closed")

    def _require_known(self, group: int) -> None:
        if not 0 <= group < self._admissions.next_group:
            raise UnknownGroup(f"group {group} was never admitted; ids up to {self._admissions.next_group - 1} were")

    def _check_delivery(self, group: G) -> None:
        """Refuse a group that is not open, not complete, or not what was admitted."""
        admission = self._held.open.get(group.group)
        if admission is None:
            self._require_known(group.group)
            raise DuplicateGroup(f"group {group.group} is not open: it was put before, or given up")
        check_delivery(group, admission, self._versions.updates)
