"""What a queue holds, and each change of it in one piece with its record; no waiting here.

A change is made in all that keeps track of groups: who holds them, the ledger, the admissions, the log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Generic, TypeVar

from message_queue.admissions import Admissions
from message_queue.contract import Admission, Batch, QueuedGroup, QueueSnapshot
from message_queue.delivery import check_staleness, masked_tokens
from message_queue.holdings import Holdings
from message_queue.ledger import Ledger
from message_queue.log import QueueLog
from message_queue.policies import StalenessPolicy, end_of_expired
from message_queue.schedule import Schedule
from message_queue.staleness import newest_update
from message_queue.start import QueueStart, restore
from message_queue.versions import PublishedVersions

G = TypeVar("G", bound=QueuedGroup)


class QueueState(Generic[G]):
    """The caller keeps transitions legal. What a method returns beside its result is to be awaited: the record."""

    def __init__(self, start: QueueStart[G], *, policy: StalenessPolicy, max_ready: int | None, log: QueueLog) -> None:
        self.held: Holdings[G] = Holdings()
        self.schedule = Schedule(
            policy, self.held, max_ready=max_ready, next_update=start.next_update, replay=start.replay
        )
        self.admissions = Admissions(next_group=start.next_group, recycles=start.recycles)
        self.versions = PublishedVersions(start.versions, served=start.served)
        self.ledger = Ledger(before=start.ledger)
        self._log = log
        self._policy = policy
        restore(start, held=self.held, ledger=self.ledger)

    def newest_update(self, group: G) -> int | None:
        """Of the newest weights that sampled a token of a group; None where nothing was sampled."""
        return newest_update(group.tokens_per_version(), self.versions.updates)

    def start(self, prompt: int) -> tuple[Admission, Awaitable[None]]:
        """Admit a group: of a prompt that waits to be admitted again, else of `prompt`."""
        admission = self.admissions.begin(prompt, version=self.versions.served, update=self.versions.served_update)
        self.held.start(admission)
        self.ledger.admitted(admission.group, version=admission.admitted_version)
        return admission, self._log.admitted(admission)

    def deliver(self, group: G) -> tuple[str | None, Awaitable[None]]:
        """open -> ready; or given up, and why."""
        newest = self.newest_update(group)
        self.ledger.delivered(group.group, segments=group.num_segments, tokens=group.num_tokens)
        expired = self.schedule.expiry(group.admitted_update, newest_update=newest)
        if expired is not None:
            return expired, self.give_up(group.group, reason=expired, tokens=group.num_tokens, expired=True)
        self.held.deliver(group, newest_update=newest)
        return None, self._log.ready(group)

    def take(self) -> tuple[Batch[G], list[Awaitable[None]]]:
        """The next batch: ready -> taken. Ready groups that expire by it are given up.

        Raises:
            StalenessError: a token with gradient is older than the bound. Nothing is changed.
        """
        groups, update = self.schedule.next_batch(), self.schedule.next_update
        updates, oldest = self.versions.updates, self.schedule.min_update
        version_updates = check_staleness(
            groups, updates, budget=self.schedule.budget, next_update=update, min_update=oldest
        )
        for group in groups:
            self.ledger.masked(group.group, tokens=masked_tokens(group, updates, min_update=oldest))
        self.held.take(groups, update=update)
        self.schedule.advance()
        written = [self._log.taken([g.group for g in groups], update=update)]
        for expired, reason in self.schedule.expired().items():
            written.append(self.give_up(expired, reason=reason, expired=True))
        batch = Batch(groups=groups, update=update, version_updates=version_updates, min_update=oldest)
        return batch, written

    def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int]) -> Awaitable[None]:
        """taken -> trained; see `TrajectoryQueue.trained`."""
        masked = [self.ledger.masked_of(group) for group in groups]
        for group, counted in zip(groups, tokens or [None] * len(groups), strict=True):
            self.admissions.done(self.held.prompt(group))
            self.held.end(group)
            self.ledger.trained(group, train_step=train_step, tokens=counted)
        return self._log.trained(groups, train_step=train_step, masked=masked)

    def give_up(
        self, group: int, *, reason: str, segments: int = 0, tokens: int = 0, expired: bool = False
    ) -> Awaitable[None]:
        """End a group that is not taken; policy recycle admits its prompt again where it `expired`."""
        prompt, again = self.held.prompt(group), False
        if expired:
            reason, again = end_of_expired(self._policy, reason, times=self.admissions.times(prompt))
        self.ledger.dropped(group, reason=reason, segments=segments, tokens=tokens)
        self.held.end(group)
        if again:
            self.admissions.again(prompt)
        else:
            self.admissions.done(prompt)
        return self._log.dropped(group, reason=reason, tokens=tokens, again=again)

    def snapshot(self, *, closed: bool) -> QueueSnapshot:
        """The state now."""
        held, schedule = self.held, self.schedule
        return QueueSnapshot(
            next_group=self.admissions.next_group,
            next_update=min(held.taken.values(), default=schedule.next_update),
            version=self.versions.served,
            update=self.versions.served_update,
            ready=len(held.ready),
            open=len(held.open),
            taken=len(held.taken),
            replay=schedule.replay,
            unfinished=held.unfinished(),
            waiting=self.admissions.waiting,
            recycles=self.admissions.recycles,
            ledger=self.ledger.counts(open_groups=len(held.live), open_tokens=held.num_tokens),
            closed=closed,
        )
