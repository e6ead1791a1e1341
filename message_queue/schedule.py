"""When a group may start, and which groups make the next batch: the policy applied to what the queue holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from message_queue.contract import QueuedGroup
from message_queue.holdings import Holdings
from message_queue.policies import StalenessPolicy

G = TypeVar("G", bound=QueuedGroup)


class Schedule(Generic[G]):
    """Reads `held`; changes nothing but the update at which the next batch is taken.

    Args:
        max_ready: ready groups before `put` waits; None for no such bound.
        next_update: optimizer updates of the weights that the next batch is trained from.
        replay: batches of ready groups that are handed out first, as they are; nothing is admitted before they are.
    """

    def __init__(
        self,
        policy: StalenessPolicy,
        held: Holdings[G],
        *,
        max_ready: int | None,
        next_update: int,
        replay: Sequence[Sequence[int]] = (),
    ) -> None:
        self._policy = policy
        self._held = held
        self._max_ready = max_ready
        self._replay = deque(replay)
        self.budget = policy.budget
        self.next_update = next_update

    @property
    def replay(self) -> int:
        """Batches left that are handed out as they are."""
        return len(self._replay)

    def can_admit(self, update: int) -> bool:
        """Whether a group may start on weights that hold `update` optimizer updates."""
        return not self._replay and self._policy.admits(
            self._held.outstanding_updates, admitted_update=update, next_update=self.next_update
        )

    def batch_ready(self) -> bool:
        return bool(self._replay) or self._policy.batch_ready(
            self._held.ready_updates, self._held.outstanding_updates, next_update=self.next_update
        )

    @property
    def min_update(self) -> int:
        """Tokens of weights with fewer optimizer updates take no gradient in the next batch."""
        return self._policy.min_update(next_update=self.next_update)

    def lets_in(self, admitted_update: int, *, newest_update: int | None) -> bool:
        """Whether `put` goes on: there is room, the trainer waits for this group, or it is to be given up."""
        full = self._max_ready is not None and len(self._held.ready) >= self._max_ready
        expired = self.expiry(admitted_update, newest_update=newest_update) is not None
        return not full or not self.batch_ready() or expired

    def next_batch(self) -> list[G]:
        """What is handed out next."""
        if self._replay:
            return [self._held.ready[group] for group in self._replay[0]]
        return self._policy.by_turn(self._held.ready.values())[: self.budget.batch_groups]

    def advance(self) -> None:
        """The next batch was handed out."""
        if self._replay:
            self._replay.popleft()
        self.next_update += self.budget.updates_per_batch

    def expiry(self, admitted_update: int, *, newest_update: int | None = None) -> str | None:
        """Why a group of that age is to be given up; None where it is not."""
        return self._policy.expiry(admitted_update, newest_update=newest_update, next_update=self.next_update)

    def hopeless(self) -> list[int]:
        """Open groups that can no longer be trained."""
        return [group for group, admission in self._held.open.items() if self.expiry(admission.admitted_update)]

    def expired(self) -> dict[int, str]:
        """Ready groups that can no longer be trained, and why. Those to be trained again can, as they were before."""
        again = {group for batch in self._replay for group in batch}
        reasons = {
            g.group: self.expiry(g.admitted_update, newest_update=self._held.newest_update(g.group))
            for g in self._held.ready.values()
            if g.group not in again
        }
        return {group: reason for group, reason in reasons.items() if reason is not None}
