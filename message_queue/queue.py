"""The queue between rollout and training: bounded, closable, one event loop, conditions instead of polling.

    admit -> (rollout) -> put -> [ready] -> take -> (training) -> trained
      open                        ready             taken

Admission is counted in-flight first, so a group that starts is certain of its place in the staleness bound. State
changes in one piece after the last await of a method: a method that is cancelled has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

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
from message_queue.holdings import Holdings
from message_queue.ledger import Ledger, LedgerRecord, LedgerTotal
from message_queue.staleness import StalenessConfig, StalenessError, build_policy, oldest_update
from message_queue.tokens import ContractError
from message_queue.versions import PublishedVersions

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
STOPPED = "stopped before it was trained: its prompt is admitted again"


class TrajectoryQueue(Generic[G]):
    """Groups from admission to the trainer's acknowledgement.

    Args:
        batch_groups: groups that `take` hands out together.
        staleness: the bound and what happens at it.
        max_ready: ready groups held before `put` waits; None where the staleness bound alone limits them.
        updates_per_batch: optimizer updates that the trainer makes from one batch.
        restored: continue after this state. Its unfinished groups end as dropped; admit their prompts again. Give a
            larger `next_group` where ids are known to have been handed out after the snapshot.

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
        restored: QueueSnapshot | None = None,
    ) -> None:
        if max_ready is not None and max_ready < batch_groups:
            raise ValueError(f"max_ready is {max_ready}; one batch is {batch_groups} groups: raise it to that or None")
        restored = restored or QueueSnapshot()
        self._max_ready = max_ready
        self._policy = build_policy(staleness, batch_groups=batch_groups, updates_per_batch=updates_per_batch)
        self._budget = self._policy.budget
        self._changed = asyncio.Condition()
        self._closed = False
        self._held: Holdings[G] = Holdings()
        self._next_group = restored.next_group
        self._next_update = restored.next_update
        self._versions = PublishedVersions(version=restored.version, update=restored.update)
        self._ledger = _continued_ledger(restored)

    # ---- the rollout side

    async def admit(self, prompt: int) -> Admission:
        """Wait until one more group fits the staleness bound, then start it.

        Raises:
            QueueClosed: nothing is admitted any more.
        """
        async with self._changed:
            await self._until(self._can_admit, what="admit")
            admission = Admission(
                group=self._next_group,
                prompt=prompt,
                admitted_version=self._versions.served,
                admitted_update=self._versions.served_update,
            )
            self._next_group += 1
            self._held.start(admission)
            self._ledger.admitted(admission.group, version=admission.admitted_version)
            return admission

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
            await self._until(lambda: self._is_expired(group.admitted_update) or self._has_room(), what="put")
            self._check_delivery(group)  # it may have been given up while this call waited
            self._ledger.delivered(group.group, segments=group.num_segments, tokens=group.num_tokens)
            if self._is_expired(group.admitted_update):
                reason = self._expiry(group.admitted_update)
                self._give_up(group.group, reason=reason)
                return PutResult(expired=reason)
            self._held.deliver(group)
            self._changed.notify_all()
            return PutResult()

    async def drop(self, group: int, *, reason: str, segments: int = 0, tokens: int = 0) -> bool:
        """Give up an open group; `segments` and `tokens` were generated in vain.

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
            self._give_up(group, reason=reason, segments=segments, tokens=tokens)
            return True

    def expired(self) -> list[int]:
        """Open groups that can no longer be trained; their rollouts are best cancelled and dropped (policy drop)."""
        return self._hopeless()

    async def wait_expired(self, *, known: Collection[int] = ()) -> list[int]:
        """Wait for open groups that can no longer be trained and are not in `known`.

        Raises:
            QueueClosed: no group expires any more.
        """
        async with self._changed:
            await self._until(lambda: not set(known).issuperset(self._hopeless()), what="wait_expired")
            return [group for group in self._hopeless() if group not in known]

    # ---- the training side

    async def take(self) -> Batch[G]:
        """Wait for the next batch. Its groups count as trained at the update it is taken at.

        Policy wait hands out the oldest ready groups, as soon as that lets every other group in on time. Policy drop
        hands out ready groups in the order they were put.

        Raises:
            QueueClosed: closed, and what is ready makes no batch; the message says what is left.
            StalenessError: a token is older than the bound. Nothing is taken.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._batch_ready())
            if not self._batch_ready():
                raise QueueClosed(
                    f"the queue is closed and {len(self._held.ready)} ready groups make no batch of "
                    f"{self._budget.batch_groups}; {len(self._held.open)} groups stay open, "
                    f"{len(self._held.taken)} were taken and not acknowledged"
                )
            groups = self._policy.by_turn(self._held.ready.values())[: self._budget.batch_groups]
            update, version_updates = self._next_update, self._check_staleness(groups)
            self._held.take(groups, update=update)
            self._next_update += self._budget.updates_per_batch
            for group in [g for g in self._held.ready.values() if self._is_expired(g.admitted_update)]:
                self._give_up(group.group, reason=self._expiry(group.admitted_update))
            self._changed.notify_all()
            return Batch(groups=groups, update=update, version_updates=version_updates)

    async def trained(self, groups: Sequence[int], *, train_step: int) -> None:
        """Acknowledge groups of a taken batch; `train_step` is the optimizer step they took part in.

        Raises:
            QueueError: a group was not taken, or was acknowledged before. Nothing is changed.
        """
        async with self._changed:
            not_taken = sorted(
                group for group, times in Counter(groups).items() if times > 1 or group not in self._held.taken
            )
            if not_taken:
                raise QueueError(f"groups {not_taken} are not taken, or acknowledged twice; nothing is changed")
            for group in groups:
                self._held.end(group)
                self._ledger.trained(group, train_step=train_step)

    async def publish(self, version: int, *, update: int) -> None:
        """The trainer published `version`, which holds `update` optimizer updates. Call it before a replica loads it.

        Raises:
            QueueError: the version or its update goes back, or the update is of a batch that was never taken.
        """
        async with self._changed:
            if update > self._next_update:
                raise QueueError(
                    f"published version {version} with {update} updates; batches up to update {self._next_update} "
                    "were taken"
                )
            self._versions.publish(version, update=update)

    async def loaded(self, version: int) -> None:
        """Every replica serves `version`: groups admitted from now on start on it.

        Raises:
            QueueError: it was never published, or is older than what the replicas served before.
        """
        async with self._changed:
            self._versions.load(version)
            self._changed.notify_all()

    # ---- both

    async def close(self) -> None:
        """Wake every waiter with QueueClosed. Batches that are complete can still be taken. Idempotent."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def snapshot(self) -> QueueSnapshot:
        """The state now."""
        return QueueSnapshot(
            next_group=self._next_group,
            next_update=min(self._held.taken.values(), default=self._next_update),
            version=self._versions.served,
            update=self._versions.served_update,
            ready=len(self._held.ready),
            open=len(self._held.open),
            taken=len(self._held.taken),
            unfinished=self._held.unfinished(),
            ledger=self._ledger.counts(open_groups=len(self._held.live)),
            closed=self._closed,
        )

    def drain_records(self) -> list[LedgerRecord]:
        """Ledger records of the groups that ended since the last call."""
        return self._ledger.drain_records()

    def closing_records(self) -> list[LedgerRecord | LedgerTotal]:
        """Ledger records not drained yet, one for each group that is still open, and the total."""
        return self._ledger.closing_records(self._held.live)

    # ---- inside; called with the condition held

    async def _until(self, met: Callable[[], bool], *, what: str) -> None:
        await self._changed.wait_for(lambda: self._closed or met())
        if self._closed:
            raise QueueClosed(f"{what}: the queue is closed")

    def _can_admit(self) -> bool:
        return self._policy.admits(
            self._held.outstanding_updates,
            admitted_update=self._versions.served_update,
            next_update=self._next_update,
        )

    def _batch_ready(self) -> bool:
        return self._policy.batch_ready(
            self._held.ready_updates, self._held.outstanding_updates, next_update=self._next_update
        )

    def _has_room(self) -> bool:
        return self._max_ready is None or len(self._held.ready) < self._max_ready or not self._batch_ready()

    def _is_expired(self, admitted_update: int) -> bool:
        return self._policy.gives_up(admitted_update, next_update=self._next_update)

    def _hopeless(self) -> list[int]:
        return [group for group, admission in self._held.open.items() if self._is_expired(admission.admitted_update)]

    def _expiry(self, admitted_update: int) -> str:
        staleness = self._budget.staleness(admitted_update, next_update=self._next_update)
        return f"expired: staleness {staleness} exceeds {self._budget.max_staleness}"

    def _give_up(self, group: int, *, reason: str, segments: int = 0, tokens: int = 0) -> None:
        self._ledger.dropped(group, reason=reason, segments=segments, tokens=tokens)
        self._held.end(group)
        self._changed.notify_all()

    def _require_known(self, group: int) -> None:
        if not 0 <= group < self._next_group:
            raise UnknownGroup(f"group {group} was never admitted; ids up to {self._next_group - 1} were")

    def _check_delivery(self, group: G) -> None:
        """Refuse a group that is not open, not complete, or not what was admitted."""
        admission = self._held.open.get(group.group)
        if admission is None:
            self._require_known(group.group)
            raise DuplicateGroup(f"group {group.group} is not open: it was put before, or given up")
        given = (group.prompt, group.admitted_version, group.admitted_update)
        if given != (admission.prompt, admission.admitted_version, admission.admitted_update):
            raise ContractError(
                f"group {group.group} has (prompt, admitted_version, admitted_update) {given}; it was {admission}"
            )
        if not group.closed:
            raise ContractError(f"group {group.group} has a trajectory without stop reason and reward; close it first")
        oldest = oldest_update(group.tokens_per_version(), self._versions.updates)
        if oldest is not None and oldest < group.admitted_update:
            raise ContractError(
                f"group {group.group} was admitted at update {group.admitted_update}, "
                f"but weights of update {oldest} sampled some of its tokens"
            )

    def _check_staleness(self, groups: Sequence[G]) -> dict[int, int]:
        """Check each token by the version that sampled it; return the update of every version in the batch."""
        versions: dict[int, int] = {}
        for group in groups:
            counts = group.tokens_per_version()
            versions.update((v, self._versions.updates[v]) for v in counts)
            oldest = oldest_update(counts, self._versions.updates)
            if oldest is not None and self._budget.is_expired(oldest, next_update=self._next_update):
                staleness = self._budget.staleness(oldest, next_update=self._next_update)
                raise StalenessError(
                    f"group {group.group} has tokens of staleness {staleness} at update {self._next_update}; "
                    f"staleness.max_staleness is {self._budget.max_staleness}"
                )
        return versions


def _continued_ledger(restored: QueueSnapshot) -> Ledger:
    """The ledger of the run before, with its unfinished groups ended."""
    counts = restored.ledger
    ledger = Ledger(before=replace(counts, admitted=counts.admitted - len(restored.unfinished)))
    for admission in restored.unfinished:
        ledger.admitted(admission.group, version=admission.admitted_version)
        ledger.dropped(admission.group, reason=STOPPED)
    return ledger
