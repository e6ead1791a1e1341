"""The queue between rollout and training: bounded, closable, one event loop, one condition instead of polling.

    admit -> (rollout) -> put -> [ready] -> take -> (training) -> trained
      open                        ready             taken

Admission counts groups in flight, so a group that starts is certain of its place in the staleness bound. Each call
decides, applies its events to the state and hands them to the journal without an await in between; then it waits until
they are written. A call that is cancelled before that has changed nothing. If it is cancelled later, its change stays:
an admission is open, a batch is taken, and a restart continues the one and hands out the other once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from message_queue.errors import ContractError, QueueClosed, StalenessError
from message_queue.events import Admitted, Checkpointed, Dropped, Event, Loaded, Published, Ready, Taken, Trained
from message_queue.heads import GroupHead
from message_queue.journal import EventJournal
from message_queue.ledger import Drop, DropKind, LedgerRecord, LedgerTotal
from message_queue.policies import Policy
from message_queue.state import GroupState, QueueSnapshot, QueueState, StoredState
from message_queue.trajectory import Admission


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups of one batch."""

    groups: list[GroupHead]
    """Heads in the order of the batch."""
    update: int
    """Optimizer updates held by the weights whose gradient the batch takes first."""
    version_updates: dict[int, int]
    """`param_version` -> optimizer updates, for every version that sampled a token of the batch."""
    min_update: int = 0
    """Tokens of weights with fewer optimizer updates take no gradient (policy mask)."""


class TrajectoryQueue:
    """Groups from admission to the trainer's acknowledgement.

    Args:
        policy: which groups start, and which are trained together.
        max_ready: ready groups before `put` waits; None if the staleness bound alone limits them.
        state: state of a restarted run (`message_queue.recovery`); None for a new one.
        journal: stores every event; None if a restart goes back to the last checkpoint.

    Raises:
        ValueError: no batch could ever be taken; names the field and the value.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_ready: int | None = None,
        state: QueueState | None = None,
        journal: EventJournal | None = None,
    ) -> None:
        if max_ready is not None and max_ready < policy.batch_groups:
            raise ValueError(
                f"max_ready is {max_ready}; one batch is {policy.batch_groups} groups: raise it to that or None"
            )
        self._policy = policy
        self._state = state or QueueState()
        self._max_ready = max_ready
        self._journal = journal
        self._changed = asyncio.Condition()
        self._closed = False
        self._num_received = 0  # ledger records that the caller has

    # ---- the rollout side

    async def admit(self, prompt: int) -> Admission:
        """Wait until one more group fits the staleness bound, then start it.

        The group is of `prompt`, unless the prompt of an expired group is to be readmitted (policy recycle): then
        of that one, and the caller repeats `prompt` with the next call.

        Raises:
            QueueClosed: nothing is admitted any more.
        """
        async with self._changed:
            await self._until(self._can_admit, call="admit")
            admission = self._state.next_admission(prompt)
            written = self._commit(Admitted(admission=admission))
        await written
        return admission

    async def put(self, head: GroupHead) -> Drop | None:
        """Hand in a finished group. Waits while `max_ready` groups are ready and a batch can be taken.

        A group that the trainer waits for is let in at any number, so a full queue never blocks training.

        Returns:
            Why the group was given up; None if it became ready.

        Raises:
            QueueError: the group is not open: it was never admitted, was put before, or has ended.
            ContractError: the group does not match its admission or the published versions.
            QueueClosed: the group stays open in the ledger.
        """
        async with self._changed:
            self._check_delivery(head)
            newest = self._state.newest_update(head)
            await self._until(lambda: self._lets_in(head.admitted_update, newest), call="put")
            entry = self._check_delivery(head)  # the group may have been dropped while this call waited
            expired = self._expiry(head.admitted_update, newest)
            vain = {"segments": head.num_segments, "tokens": head.num_tokens}
            written = self._commit(Ready(head=head) if expired is None else self._dropped(entry, expired, **vain))
        await written
        return expired

    async def drop(self, group: int, *, reason: Drop, segments: int = 0, tokens: int = 0) -> bool:
        """Give up an open group; `segments` and `tokens` were generated in vain.

        Policy recycle readmits the prompt of an expired group.

        Returns:
            False if the group is not open any more: it was put, or dropped, in the meantime.

        Raises:
            QueueError: the group was never admitted.
        """
        async with self._changed:
            entry = self._state.open.get(group)
            if entry is None:
                self._state.require_known(group)
                return False
            written = self._commit(self._dropped(entry, reason, segments=segments, tokens=tokens))
        await written
        return True

    def _expired_open(self) -> list[int]:
        updates = {update for update in self._state.outstanding if self._expiry(update, None) is not None}
        open_groups = self._state.open.items() if updates else ()
        return [group for group, entry in open_groups if entry.admitted_update in updates]

    async def wait_expired(self, *, known: Collection[int] = ()) -> list[int]:
        """Wait until an open group that is not in `known` can no longer be trained; cancel and drop its rollouts.

        Returns:
            All open groups that can no longer be trained.

        Raises:
            QueueClosed: no group expires any more.
        """
        async with self._changed:
            await self._until(lambda: not set(known).issuperset(self._expired_open()), call="wait_expired")
            return self._expired_open()

    # ---- the training side

    async def take(self) -> Batch:
        """Wait for the next batch. Its groups count as trained at the update at which it is taken.

        Policy wait hands out the oldest ready groups, as soon as that lets every other group in on time. The other
        policies hand out ready groups at once: drop in the order of `put`, recycle and mask the oldest first.

        Raises:
            QueueClosed: closed, and the ready groups make no batch; the message counts the groups that are left.
            StalenessError: a token with gradient is older than the bound. Nothing is taken.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._batch_ready())
            if not self._batch_ready():
                state = self._state
                raise QueueClosed(
                    f"the queue is closed and {len(state.ready)} ready groups make no batch of "
                    f"{self._policy.batch_groups}; {len(state.open)} groups stay open, "
                    f"{len(state.taken)} were taken and not acknowledged"
                )
            batch, written = self._take()
        await written
        return batch

    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None:
        """Acknowledge groups of a taken batch; `train_step` is the optimizer step they took part in.

        Args:
            tokens: those of each group that took gradient as the trainer counts them; empty if it does not count.

        Raises:
            QueueError: a group was not taken, or was acknowledged before. Nothing is changed.
        """
        if not tokens:
            entries = [self._state.find(group, "taken") for group in groups]
            tokens = [entry.tokens - entry.masked for entry in entries]
        await self._change(Trained(groups=tuple(groups), train_step=train_step, tokens=tuple(tokens)))

    async def publish(self, version: int, *, update: int) -> None:
        """The trainer published `version` with `update` optimizer updates. Call it before a replica loads it.

        Raises:
            QueueError: the version or its update goes back, or the update is of a batch that was never taken.
        """
        await self._change(Published(version=version, update=update))

    async def loaded(self, version: int) -> None:
        """Every replica serves `version`: groups admitted from now on start on it.

        Raises:
            QueueError: the version was never published, or is older than the served one.
        """
        await self._change(Loaded(version=version))

    async def sync(self) -> None:
        """Return once all events so far are stored. Call it before a checkpoint is made."""
        await self._record()

    async def checkpointed(self, train_step: int) -> None:
        """A checkpoint holds `train_step`, and no restart goes back before it.

        Raises:
            QueueError: an earlier call named a later step, or no group was trained at that step.
        """
        async with self._changed:
            self._state.apply(Checkpointed(train_step=train_step))
            written = self._record(self._state.dump())
        await written

    # ---- both

    async def close(self) -> None:
        """Wake every waiter with QueueClosed. Batches that are complete can still be taken. Idempotent."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def snapshot(self) -> QueueSnapshot:
        """The state now."""
        return self._state.snapshot(closed=self._closed)

    async def records_after(self, received: int) -> list[LedgerRecord]:
        """Ledger records of the groups that ended, without the first `received`, which the caller has.

        The records of a reply that a cancelled caller did not receive are in the next reply.
        """
        del self._state.ended[: max(0, received - self._num_received)]
        self._num_received = max(received, self._num_received)
        return list(self._state.ended)

    async def closing_records(self, received: int) -> list[LedgerRecord | LedgerTotal]:
        """As `records_after`, with one for each group that has not ended, and the total."""
        return [*await self.records_after(received), *self._state.open_records(), self._state.counts.total()]

    async def _change(self, event: Event) -> None:
        async with self._changed:
            written = self._commit(event)
        await written

    # ---- changes; called with the condition held

    def _commit(self, *events: Event) -> Awaitable[None]:
        """Change the state and hand the events to the journal; the result is awaited for the write."""
        for event in events:
            self._state.apply(event)
        self._changed.notify_all()
        return self._record(*events)

    def _record(self, *items: Event | StoredState) -> Awaitable[None]:
        if self._journal is not None:
            return self._journal.record(items)
        written = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written

    def _take(self) -> tuple[Batch, Awaitable[None]]:
        """The next batch. Ready groups that expire by it are dropped."""
        state, policy = self._state, self._policy
        groups, update = self._next_batch(), state.next_update
        masked = tuple(masked_tokens(group, state.versions, policy=policy, next_update=update) for group in groups)
        ids = tuple(group.group for group in groups)
        taken = Taken(groups=ids, update=update, masked=masked, updates=policy.updates_per_batch)
        state.apply(taken)
        dropped = self._expired_ready()
        for event in dropped:
            state.apply(event)
        batch = Batch(
            groups=groups,
            update=update,
            version_updates={v: state.versions[v] for group in groups for v in group.tokens_per_version()},
            min_update=policy.min_update(next_update=update),
        )
        self._changed.notify_all()
        return batch, self._record(taken, *dropped)

    def _next_batch(self) -> list[GroupHead]:
        state, size = self._state, self._policy.batch_groups
        if state.replay:
            groups = state.replay[0]
        elif self._policy.oldest_first:
            groups = [group for _, group in state.by_admission[:size]]
        else:
            groups = islice(state.ready, size)
        return [head for group in groups if (head := state.ready[group].head) is not None]

    def _expired_ready(self) -> list[Dropped]:
        """Ends of ready groups that can no longer be trained, in the order of `put`, without those to repeat."""
        state = self._state
        replayed = {group for batch in state.replay for group in batch}
        expired: list[tuple[GroupState, Drop]] = []
        for _, group in state.by_newest if self._policy.newest_counts else state.by_admission:
            entry = state.ready[group]
            reason = self._expiry(entry.admitted_update, state.newest_update(entry.head))
            if reason is None:
                break  # the others are younger
            if group not in replayed:
                expired.append((entry, reason))
        return [self._dropped(entry, reason) for entry, reason in sorted(expired, key=lambda e: e[0].turn)]

    def _dropped(self, entry: GroupState, reason: Drop, *, segments: int = 0, tokens: int = 0) -> Dropped:
        """End of a group; the policy decides on the prompt of one that expired."""
        if reason.kind is DropKind.EXPIRED:
            times = self._state.requeues.get(entry.admission.prompt, 0)
            reason = self._policy.end_of_expired(reason, times=times)
        return Dropped(group=entry.group, reason=reason, segments=segments, tokens=tokens)

    # ---- conditions; called with the condition held

    async def _until(self, met: Callable[[], bool], *, call: str) -> None:
        await self._changed.wait_for(lambda: self._closed or met())
        if self._closed:
            raise QueueClosed(f"{call}: the queue is closed")

    def _can_admit(self) -> bool:
        """Nothing is admitted before all batches of a restart were repeated."""
        state = self._state
        return not state.replay and self._policy.admits(
            state.outstanding, admitted_update=state.served_update, next_update=state.next_update
        )

    def _batch_ready(self) -> bool:
        state = self._state
        return bool(state.replay) or self._policy.batch_ready(
            state.ready_updates, state.outstanding, next_update=state.next_update
        )

    def _lets_in(self, admitted_update: int, newest: int | None) -> bool:
        """Whether `put` continues: there is room, the trainer waits for this group, or the group is to be dropped."""
        full = self._max_ready is not None and len(self._state.ready) >= self._max_ready
        return not full or not self._batch_ready() or self._expiry(admitted_update, newest) is not None

    def _expiry(self, admitted_update: int, newest: int | None) -> Drop | None:
        return self._policy.expiry(admitted_update, newest_update=newest, next_update=self._state.next_update)

    def _check_delivery(self, head: GroupHead) -> GroupState:
        """The open group of `head`; raises as `put` if there is none, or it does not match its admission."""
        entry, version_updates = self._state.find(head.group, "open"), self._state.versions
        admission = entry.admission
        given = (head.prompt, head.admitted_version, head.admitted_update)
        if given != (admission.prompt, admission.admitted_version, admission.admitted_update):
            raise ContractError(
                f"group {head.group} has (prompt, admitted_version, admitted_update) {given}; it was {admission}"
            )
        versions = head.tokens_per_version().keys()
        if unknown := versions - version_updates.keys():
            raise ContractError(
                f"group {head.group} has tokens of param_version {min(unknown)}, which was never published; "
                f"the newest published version is {max(version_updates, default=None)}"
            )
        oldest = min((version_updates[version] for version in versions), default=head.admitted_update)
        if oldest < head.admitted_update:
            raise ContractError(
                f"group {head.group} was admitted at update {head.admitted_update}, "
                f"but weights of update {oldest} sampled some of its tokens"
            )
        return entry


def masked_tokens(group: GroupHead, version_updates: Mapping[int, int], *, policy: Policy, next_update: int) -> int:
    """Tokens of a group without gradient in the next batch: masked by the policy, or of a failed rollout.

    Raises:
        StalenessError: a token with gradient is older than the bound.
    """
    trained = 0
    for version, tokens in group.tokens_per_version().items():
        if version_updates[version] < policy.min_update(next_update=next_update):
            continue
        trained += tokens
        if policy.is_expired(version_updates[version], next_update=next_update):
            staleness = policy.staleness(version_updates[version], next_update=next_update)
            raise StalenessError(
                f"group {group.group} has tokens of staleness {staleness} at update {next_update}, sampled by version "
                f"{version}; staleness.max_staleness is {policy.max_staleness}"
            )
    return group.num_tokens - trained
