"""How old a trained token may be: pure arithmetic on counts of groups, in optimizer updates.

`next_update` is the number of optimizer updates held by the weights whose gradient the next batch takes. A group
admitted with weights of update a may be trained at update u iff u - a <= max_staleness. No token of a group is older
than its admission, so the bound on groups is a bound on tokens.

Policy wait keeps the bound without giving anything up, so admission is a schedulability test: each group has a
deadline (the last update it may be trained at), each batch is a slot for `batch_groups` groups. Earliest deadline first
meets every deadline if any order does. `policies.py` has the behaviour of each policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from message_queue.tokens import ContractError

Policy = Literal["wait", "drop", "recycle", "mask"]

GroupCounts = Mapping[int, int]  # admitted update -> number of groups


class StalenessError(RuntimeError):
    """A token older than the bound reached the trainer's side; names group, version and staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """The staleness bound, and the policy for groups that would exceed it."""

    max_staleness: int = 1
    """Optimizer updates between the weights that sampled a token and those whose gradient is taken."""
    policy: Policy = "wait"
    """Treatment of a group that would become older. `wait`: the trainer waits for it, so nothing is given up. `drop`:
    it is given up with a reason. `recycle`: the same, and its prompt is admitted again, ahead of new ones. `mask`: it
    is trained, and its tokens that are older take no gradient."""
    max_recycles: int = 3
    """Times that a prompt is admitted again; then its group is dropped."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(
                f"staleness.max_staleness is {self.max_staleness}; must be >= 0 (0 is synchronous training)"
            )
        if self.policy not in get_args(Policy):
            raise ValueError(f"staleness.policy is {self.policy!r}; choose one of {', '.join(get_args(Policy))}")
        if self.max_recycles < 1:
            raise ValueError(
                f"staleness.max_recycles is {self.max_recycles}; must be >= 1, or give up at once with "
                "staleness.policy=drop"
            )


class StalenessBudget:
    """Which groups may start and which batches may be taken so that no deadline is missed.

    Args:
        max_staleness: s, the bound.
        batch_groups: B, groups per batch.
        updates_per_batch: optimizer updates made from one batch. All of a batch is charged with its last update,
            because the trainer decides which group lands in which update.

    Raises:
        ValueError: no group could ever be trained within the bound.
    """

    def __init__(self, *, max_staleness: int, batch_groups: int, updates_per_batch: int = 1) -> None:
        if batch_groups < 1:
            raise ValueError(f"batch_groups is {batch_groups}; a batch has at least one group")
        if updates_per_batch < 1:
            raise ValueError(f"updates_per_batch is {updates_per_batch}; a batch makes at least one optimizer update")
        if max_staleness < updates_per_batch - 1:
            raise ValueError(
                f"staleness.max_staleness is {max_staleness} with {updates_per_batch} optimizer updates per batch; "
                f"the last of them is {updates_per_batch - 1} updates old at best: raise the bound to that"
            )
        self.max_staleness = max_staleness
        self.batch_groups = batch_groups
        self.updates_per_batch = updates_per_batch

    @property
    def max_outstanding(self) -> int:
        """Groups that may be admitted and not yet taken if all start on the newest weights."""
        return (self.max_staleness + 1) // self.updates_per_batch * self.batch_groups

    def staleness(self, admitted_update: int, *, next_update: int) -> int:
        """Staleness that a group admitted at `admitted_update` has, at most, if it is in the next batch."""
        return next_update + self.updates_per_batch - 1 - admitted_update

    def min_update(self, *, next_update: int) -> int:
        """Optimizer updates that weights must hold for their tokens to be within the bound in the next batch."""
        return self.staleness(0, next_update=next_update) - self.max_staleness

    def is_expired(self, admitted_update: int, *, next_update: int) -> bool:
        """Whether such a group is too old for the next batch, hence for every later one."""
        return self.staleness(admitted_update, next_update=next_update) > self.max_staleness

    def is_feasible(self, outstanding: GroupCounts, *, next_update: int) -> bool:
        """Whether all `outstanding` groups (admitted, not taken) meet their deadlines, oldest first, B per batch."""
        no_newer = 0
        for admitted_update in sorted(u for u, groups in outstanding.items() if groups):
            no_newer += outstanding[admitted_update]
            batches_before = (no_newer - 1) // self.batch_groups
            taken_at = next_update + batches_before * self.updates_per_batch
            if self.is_expired(admitted_update, next_update=taken_at):
                return False
        return True

    def admits(self, outstanding: GroupCounts, *, admitted_update: int, next_update: int) -> bool:
        """Whether one more group, admitted now with weights of `admitted_update`, still lets every group in on time."""
        with_it = Counter(outstanding)
        with_it[admitted_update] += 1
        return self.is_feasible(with_it, next_update=next_update)

    def batch_ready(self, ready: GroupCounts, outstanding: GroupCounts, *, next_update: int) -> bool:
        """Whether the trainer may take the B oldest ready groups under policy wait.

        It may not while that would push another outstanding group past its deadline; then the trainer waits for the
        old open groups. Taking the oldest leaves the most room, so no other choice of ready groups does better.

        Args:
            ready: groups that are complete, a part of `outstanding`.
            outstanding: all groups that are admitted and not taken.
            next_update: the update the batch would be taken at.
        """
        if sum(ready.values()) < self.batch_groups:
            return False
        left, wanted = Counter(outstanding), self.batch_groups
        for admitted_update in sorted(ready):
            taken = min(wanted, ready[admitted_update])
            left[admitted_update] -= taken
            wanted -= taken
        return self.is_feasible(left, next_update=next_update + self.updates_per_batch)


def oldest_update(tokens_per_version: Mapping[int, int], version_updates: Mapping[int, int]) -> int | None:
    """Optimizer updates of the oldest weights that sampled a token; None if nothing was sampled.

    Args:
        tokens_per_version: `param_version` -> tokens that it sampled.
        version_updates: `param_version` -> optimizer updates held by those weights.

    Raises:
        ContractError: a token names a version that was never published.
    """
    for version, tokens in tokens_per_version.items():
        if version not in version_updates:
            raise ContractError(
                f"{tokens} tokens have param_version {version}, which was never published; "
                f"the newest published version is {max(version_updates, default=None)}"
            )
    return min((version_updates[version] for version in tokens_per_version), default=None)
