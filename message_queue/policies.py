"""What becomes of a group that would be too old: one class for each staleness policy.

wait     the trainer waits for it               nothing is given up, so nothing biases what is trained
drop     it is given up                         favours short rollouts
recycle  given up, its prompt admitted again    favours short rollouts of every prompt, not prompts with short ones
mask     trained where it is young enough       favours the ends of long rollouts
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar, assert_never

from message_queue.staleness import GroupCounts, StalenessBudget, StalenessConfig


class Admitted(Protocol):
    """A group as far as its age goes."""

    @property
    def group(self) -> int: ...
    @property
    def admitted_update(self) -> int: ...


T = TypeVar("T", bound=Admitted)


class StalenessPolicy(Protocol):
    """What the queue asks when a group would become too old."""

    @property
    def budget(self) -> StalenessBudget: ...

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """Whether a group may start on weights of `admitted_update`."""
        ...

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """Whether the trainer may take a batch of ready groups."""
        ...

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> str | None:
        """Why a group is to be given up; None where it is not.

        Args:
            newest_update: of the newest weights that sampled a token of it; None while it is open.
        """
        ...

    def admits_again(self, times: int) -> bool:
        """Whether a prompt whose group expired is admitted again, after it was `times` times."""
        ...

    def min_update(self, *, next_update: int) -> int:
        """Tokens of weights with fewer optimizer updates take no gradient in the next batch."""
        ...

    def by_turn(self, ready: Iterable[T]) -> list[T]:
        """Ready groups, given in the order they were put, in the order they are taken."""
        ...


class WaitPolicy:
    """The trainer waits for old groups; nothing is given up."""

    def __init__(self, budget: StalenessBudget) -> None:
        self.budget = budget

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """As long as every group still meets its deadline."""
        return self.budget.admits(outstanding, admitted_update=admitted_update, next_update=next_update)

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """As soon as taking the oldest lets every other group in on time."""
        return self.budget.batch_ready(ready, outstanding, next_update=next_update)

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> str | None:
        """Never."""
        return None

    def admits_again(self, times: int) -> bool:
        """Nothing expires."""
        return False

    def min_update(self, *, next_update: int) -> int:
        """All tokens take gradient."""
        return 0

    def by_turn(self, ready: Iterable[T]) -> list[T]:
        """Oldest weights first, then in the order of admission."""
        return _oldest_first(ready)


class DropPolicy:
    """The trainer takes what is ready; groups that became too old are given up."""

    def __init__(self, budget: StalenessBudget) -> None:
        self.budget = budget

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """Bounded in number, and not hopeless from the start."""
        hopeless = self.budget.is_expired(admitted_update, next_update=next_update)
        return not hopeless and sum(outstanding.values()) < self.budget.max_outstanding

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """As soon as there are enough."""
        return sum(ready.values()) >= self.budget.batch_groups

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> str | None:
        """As soon as it is too old for the next batch."""
        return _expiry(self.budget, admitted_update, next_update=next_update)

    def admits_again(self, times: int) -> bool:
        """Never."""
        return False

    def min_update(self, *, next_update: int) -> int:
        """All tokens take gradient."""
        return 0

    def by_turn(self, ready: Iterable[T]) -> list[T]:
        """First in, first out."""
        return list(ready)


class RecyclePolicy(DropPolicy):
    """As DropPolicy, and the prompt of a group that became too old is admitted again.

    Args:
        max_recycles: times that one prompt is. A prompt that is always too slow ends as dropped then.
    """

    def __init__(self, budget: StalenessBudget, *, max_recycles: int) -> None:
        super().__init__(budget)
        self._max_recycles = max_recycles

    def admits_again(self, times: int) -> bool:
        """Up to max_recycles times."""
        return times < self._max_recycles

    def by_turn(self, ready: Iterable[T]) -> list[T]:
        """Oldest weights first, which gives up fewest."""
        return _oldest_first(ready)


class MaskPolicy(DropPolicy):
    """The trainer takes what is ready; tokens that became too old take no gradient.

    An open group never expires: what it samples next is young. A group of which nothing is left is given up.
    """

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> str | None:
        """As soon as all of its tokens are too old for the next batch."""
        if newest_update is None:
            return None
        expired = _expiry(self.budget, newest_update, next_update=next_update)
        return expired and f"{expired} for its newest token: nothing of it would take gradient"

    def min_update(self, *, next_update: int) -> int:
        """The bound, by the last update of the batch."""
        return self.budget.min_update(next_update=next_update)

    def by_turn(self, ready: Iterable[T]) -> list[T]:
        """Oldest weights first, which masks fewest."""
        return _oldest_first(ready)


def end_of_expired(policy: StalenessPolicy, reason: str, *, times: int) -> tuple[str, bool]:
    """(why a group that expired ends, whether its prompt is admitted again).

    Args:
        reason: of `StalenessPolicy.expiry`. times: that its prompt was admitted again before.
    """
    if policy.admits_again(times):
        return f"recycled: {reason}", True
    if times:
        return f"{reason}, after its prompt was admitted {times + 1} times (staleness.max_recycles)", False
    return reason, False


def build_policy(config: StalenessConfig, *, batch_groups: int, updates_per_batch: int = 1) -> StalenessPolicy:
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


def _oldest_first(ready: Iterable[T]) -> list[T]:
    return sorted(ready, key=lambda group: (group.admitted_update, group.group))


def _expiry(budget: StalenessBudget, update: int, *, next_update: int) -> str | None:
    if not budget.is_expired(update, next_update=next_update):
        return None
    return f"expired: staleness {budget.staleness(update, next_update=next_update)} exceeds {budget.max_staleness}"
