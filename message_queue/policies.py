"""Staleness policies: one class for each way to treat a group that would be too old.

wait     the trainer waits for it               nothing is given up, so the trained groups are not biased
drop     it is given up                         favours short rollouts
recycle  given up, its prompt admitted again    favours short rollouts of every prompt, not prompts with short ones
mask     trained if a part is young enough      favours the ends of long rollouts
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from message_queue.staleness import GroupCounts, StalenessBudget, StalenessConfig
from message_queue.state import GroupState


class DropPolicy:
    """The trainer takes ready groups; groups that became too old are given up. Other policies change parts of this."""

    def __init__(self, budget: StalenessBudget) -> None:
        self.budget = budget

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """Whether a group may start on weights of `admitted_update`: bounded in number, and not hopeless."""
        hopeless = self.budget.is_expired(admitted_update, next_update=next_update)
        return not hopeless and sum(outstanding.values()) < self.budget.max_outstanding

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """Whether the trainer may take a batch of ready groups: as soon as there are enough."""
        return sum(ready.values()) >= self.budget.batch_groups

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> str | None:
        """Why a group is to be given up, as soon as it is too old for the next batch; None if it is not.

        Args:
            newest_update: update of the newest weights that sampled a token of the group; None while the group is open.
        """
        if not self.budget.is_expired(admitted_update, next_update=next_update):
            return None
        staleness = self.budget.staleness(admitted_update, next_update=next_update)
        return f"expired: staleness {staleness} exceeds {self.budget.max_staleness}"

    def end_of_expired(self, reason: str, *, times: int) -> tuple[str, bool]:
        """(why a group that expired ends, whether its prompt is admitted again).

        Args:
            reason: of `expiry`.
            times: that its prompt was admitted again before.
        """
        return reason, False

    def min_update(self, *, next_update: int) -> int:
        """Tokens of weights with fewer optimizer updates take no gradient in the next batch."""
        return 0

    def by_turn(self, ready: Iterable[GroupState]) -> list[GroupState]:
        """Ready groups, given in the order of `put`, in the order in which they are taken: first in, first out."""
        return list(ready)


class WaitPolicy(DropPolicy):
    """The trainer waits for old groups; nothing is given up."""

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """As long as every group still meets its deadline."""
        return self.budget.admits(outstanding, admitted_update=admitted_update, next_update=next_update)

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """As soon as taking the oldest lets every other group in on time."""
        return self.budget.batch_ready(ready, outstanding, next_update=next_update)

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> str | None:
        """Never."""
        return None

    def by_turn(self, ready: Iterable[GroupState]) -> list[GroupState]:
        """Oldest weights first, then in the order of admission."""
        return _oldest_first(ready)


class RecyclePolicy(DropPolicy):
    """As DropPolicy, and the prompt of a group that became too old is admitted again.

    Args:
        max_recycles: times that one prompt is admitted again. A prompt that is always too slow is dropped after that.
    """

    def __init__(self, budget: StalenessBudget, *, max_recycles: int) -> None:
        super().__init__(budget)
        self._max_recycles = max_recycles

    def end_of_expired(self, reason: str, *, times: int) -> tuple[str, bool]:
        """Its prompt is admitted again, up to max_recycles times."""
        if times < self._max_recycles:
            return f"recycled: {reason}", True
        return f"{reason}, after its prompt was admitted {times + 1} times (staleness.max_recycles)", False

    def by_turn(self, ready: Iterable[GroupState]) -> list[GroupState]:
        """Oldest weights first, which gives up fewest."""
        return _oldest_first(ready)


class MaskPolicy(DropPolicy):
    """The trainer takes ready groups; tokens that became too old take no gradient.

    An open group never expires: its next tokens are young. A group without a young token is given up.
    """

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> str | None:
        """As soon as all its tokens are too old for the next batch."""
        if newest_update is None:
            return None
        expired = super().expiry(newest_update, next_update=next_update)
        return expired and f"{expired} for its newest token: none of its tokens would take gradient"

    def min_update(self, *, next_update: int) -> int:
        """The bound, by the last update of the batch."""
        return self.budget.min_update(next_update=next_update)

    def by_turn(self, ready: Iterable[GroupState]) -> list[GroupState]:
        """Oldest weights first, which masks fewest."""
        return _oldest_first(ready)


def build_policy(config: StalenessConfig, *, batch_groups: int, updates_per_batch: int = 1) -> DropPolicy:
    """The policy that `config` names.

    Raises:
        ValueError: no group could ever be trained within the bound.
    """
    budget = StalenessBudget(
        max_staleness=config.max_staleness, batch_groups=batch_groups, updates_per_batch=updates_per_batch
    )
    match config.policy:
        case "wait":
            return WaitPolicy(budget)
        case "drop":
            return DropPolicy(budget)
        case "recycle":
            return RecyclePolicy(budget, max_recycles=config.max_recycles)
        case "mask":
            return MaskPolicy(budget)
        case _:
            assert_never(config.policy)


def _oldest_first(ready: Iterable[GroupState]) -> list[GroupState]:
    return sorted(ready, key=lambda group: (group.admitted_update, group.group))
