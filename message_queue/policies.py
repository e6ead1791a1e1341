"""The bound on the age of trained tokens, and the policies for groups that would be too old.

wait     the trainer waits for it               nothing is given up, so the trained groups are not biased
drop     it is given up                         favours short rollouts
recycle  given up, its prompt readmitted        favours short rollouts of every prompt, not prompts with short ones
mask     trained if a part is young enough      favours the ends of long rollouts

`next_update` is the number of optimizer updates held by the weights whose gradient the next batch takes. A group
admitted with weights of update a may be trained at update u iff u - a <= max_staleness. No token of a group is older
than its admission, so the bound on groups is a bound on tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from message_queue.ledger import Drop, DropKind

GroupCounts = Mapping[int, int]  # admitted update -> number of groups
PolicyName = Literal["wait", "drop", "recycle", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """The staleness bound, and the policy for groups that would exceed it."""

    max_staleness: int = 1
    """Optimizer updates between the weights that sampled a token and those whose gradient is taken."""
    policy: PolicyName = "wait"
    """Treatment of a group that would become older. `wait`: the trainer waits for it, so nothing is given up. `drop`:
    it is given up with a reason. `recycle`: the same, and its prompt is readmitted, ahead of new ones. `mask`: it
    is trained, and its tokens that are older take no gradient."""
    max_requeues: int = 3
    """Times that a prompt is readmitted; then its group is dropped."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(
                f"staleness.max_staleness is {self.max_staleness}; must be >= 0 (0 is synchronous training)"
            )
        if self.policy not in get_args(PolicyName):
            raise ValueError(f"staleness.policy is {self.policy!r}; choose one of {', '.join(get_args(PolicyName))}")
        if self.max_requeues < 1:
            raise ValueError(
                f"staleness.max_requeues is {self.max_requeues}; must be >= 1, or give up at once with "
                "staleness.policy=drop"
            )


class Policy:
    """Policies drop, recycle and mask: the trainer takes ready groups; a group that became too old is given up.

    PolicyName mask counts the newest token of a group, so that an open group never expires; the others its admission.

    Args:
        config: the bound.
        batch_groups: B, groups per batch.
        updates_per_batch: optimizer updates made from one batch. All of a batch is charged with its last update,
            because the trainer decides which group lands in which update.

    Raises:
        ValueError: no group could ever be trained within the bound.
    """

    def __init__(self, config: StalenessConfig, *, batch_groups: int, updates_per_batch: int = 1) -> None:
        if batch_groups < 1:
            raise ValueError(f"batch_groups is {batch_groups}; a batch has at least one group")
        if updates_per_batch < 1:
            raise ValueError(f"updates_per_batch is {updates_per_batch}; a batch makes at least one optimizer update")
        if config.max_staleness < updates_per_batch - 1:
            raise ValueError(
                f"staleness.max_staleness is {config.max_staleness} with {updates_per_batch} optimizer updates per "
                f"batch; the last of them is {updates_per_batch - 1} updates old at best: raise the bound to that"
            )
        self.max_staleness = config.max_staleness
        self.batch_groups = batch_groups
        self.updates_per_batch = updates_per_batch
        self.max_outstanding = (config.max_staleness + 1) // updates_per_batch * batch_groups
        """Groups that may be admitted and not yet taken if all start on the newest weights."""
        self.oldest_first = config.policy != "drop"
        """Whether ready groups of the oldest weights are taken first, not those that were put first."""
        self.newest_counts = config.policy == "mask"
        """Whether a ready group expires with its newest token, not with its admission."""
        self._max_requeues = config.max_requeues if config.policy == "recycle" else None

    def staleness(self, admitted_update: int, *, next_update: int) -> int:
        """Staleness that a group admitted at `admitted_update` has, at most, if it is in the next batch."""
        return next_update + self.updates_per_batch - 1 - admitted_update

    def is_expired(self, admitted_update: int, *, next_update: int) -> bool:
        """Whether such a group is too old for the next batch, hence for every later one."""
        return self.staleness(admitted_update, next_update=next_update) > self.max_staleness

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """Whether a group may start on weights of `admitted_update`: bounded in number, and not expired.

        Args:
            outstanding: groups that are admitted and not taken.
        """
        expired = self.is_expired(admitted_update, next_update=next_update)
        return not expired and sum(outstanding.values()) < self.max_outstanding

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """Whether the trainer may take a batch of ready groups: as soon as there are enough.

        Args:
            ready: groups that are complete, a part of `outstanding`.
        """
        return sum(ready.values()) >= self.batch_groups

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> Drop | None:
        """Why a group is to be given up, as soon as it is too old for the next batch; None if it is not.

        Args:
            newest_update: update of the newest weights that sampled a token of the group; None while the group is open.
        """
        update = newest_update if self.newest_counts else admitted_update
        if update is None or not self.is_expired(update, next_update=next_update):
            return None
        end = " for its newest token: none of its tokens would take gradient" if self.newest_counts else ""
        staleness = self.staleness(update, next_update=next_update)
        return Drop(DropKind.EXPIRED, f"staleness {staleness} exceeds {self.max_staleness}{end}")

    def end_of_expired(self, reason: Drop, *, times: int) -> Drop:
        """Reason of the drop of an expired group; its kind says whether the prompt is readmitted.

        Args:
            reason: result of `expiry`.
            times: earlier requeues of the prompt.
        """
        if self._max_requeues is None:
            return reason
        if times < self._max_requeues:
            return Drop(DropKind.REQUEUED, str(reason))
        more = f"after its prompt was admitted {times + 1} times (staleness.max_requeues)"
        return replace(reason, text=f"{reason.text}, {more}")

    def min_update(self, *, next_update: int) -> int:
        """Tokens of weights with fewer optimizer updates take no gradient in the next batch (policy mask)."""
        return self.staleness(0, next_update=next_update) - self.max_staleness if self.newest_counts else 0


class WaitPolicy(Policy):
    """The trainer waits for old groups; nothing is given up.

    So admission is a schedulability test: each group has a deadline (the last update it may be trained at), each batch
    is a slot for B groups. Earliest deadline first meets every deadline if any order does.
    """

    def is_feasible(self, outstanding: GroupCounts, *, next_update: int) -> bool:
        """Whether all `outstanding` groups meet their deadlines, oldest first, B per batch."""
        no_newer = 0
        for admitted_update in sorted(u for u, groups in outstanding.items() if groups):
            no_newer += outstanding[admitted_update]
            batches_before = (no_newer - 1) // self.batch_groups
            taken_at = next_update + batches_before * self.updates_per_batch
            if self.is_expired(admitted_update, next_update=taken_at):
                return False
        return True

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """As long as one more group still lets every group in on time."""
        return self.is_feasible(Counter(outstanding) + Counter([admitted_update]), next_update=next_update)

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """As soon as taking the B oldest ready groups lets every other group in on time.

        Until then the trainer waits for the old open groups. Taking the oldest leaves the most room, so no other choice
        of ready groups does better.
        """
        left, wanted = Counter(outstanding), self.batch_groups
        for admitted_update in sorted(ready):
            taken = min(wanted, ready[admitted_update])
            left[admitted_update] -= taken
            wanted -= taken
        return not wanted and self.is_feasible(left, next_update=next_update + self.updates_per_batch)

    def expiry(self, admitted_update: int, *, newest_update: int | None = None, next_update: int) -> Drop | None:
        """Never."""
        return None


def build_policy(config: StalenessConfig, *, batch_groups: int, updates_per_batch: int = 1) -> Policy:
    """The policy that `config` names."""
    kind = WaitPolicy if config.policy == "wait" else Policy
    return kind(config, batch_groups=batch_groups, updates_per_batch=updates_per_batch)
