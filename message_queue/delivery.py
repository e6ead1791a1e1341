"""What the queue refuses of a group that is handed in, or that is about to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from message_queue.contract import Admission, QueuedGroup
from message_queue.staleness import StalenessBudget, StalenessError, oldest_update
from message_queue.tokens import ContractError


def check_delivery(group: QueuedGroup, admission: Admission, version_updates: Mapping[int, int]) -> None:
    """Refuse a group that is not complete, or not what was admitted.

    Raises:
        ContractError: names what does not match.
    """
    given = (group.prompt, group.admitted_version, group.admitted_update)
    if given != (admission.prompt, admission.admitted_version, admission.admitted_update):
        raise ContractError(
            f"group {group.group} has (prompt, admitted_version, admitted_update) {given}; it was {admission}"
        )
    if not group.closed:
        raise ContractError(f"group {group.group} has a trajectory without stop reason and reward; close it first")
    oldest = oldest_update(group.tokens_per_version(), version_updates)
    if oldest is not None and oldest < group.admitted_update:
        raise ContractError(
            f"group {group.group} was admitted at update {group.admitted_update}, "
            f"but weights of update {oldest} sampled some of its tokens"
        )


def check_staleness(
    groups: Sequence[QueuedGroup],
    version_updates: Mapping[int, int],
    *,
    budget: StalenessBudget,
    next_update: int,
    min_update: int = 0,
) -> dict[int, int]:
    """Check each token with gradient by the version that sampled it; return the update of every version in the batch.

    Args:
        min_update: tokens of weights with fewer optimizer updates take no gradient.

    Raises:
        StalenessError: a token with gradient is older than the bound.
    """
    versions: dict[int, int] = {}
    for group in groups:
        counts = group.tokens_per_version()
        versions.update((v, version_updates[v]) for v in counts)
        young = {version: tokens for version, tokens in counts.items() if version_updates[version] >= min_update}
        oldest = oldest_update(young, version_updates)
        if oldest is not None and budget.is_expired(oldest, next_update=next_update):
            staleness = budget.staleness(oldest, next_update=next_update)
            raise StalenessError(
                f"group {group.group} has tokens of staleness {staleness} at update {next_update}; "
                f"staleness.max_staleness is {budget.max_staleness}"
            )
    return versions


def masked_tokens(group: QueuedGroup, version_updates: Mapping[int, int], *, min_update: int) -> int:
    """Tokens of a group without gradient: of weights with fewer than `min_update` updates, or of a failed rollout."""
    counts = group.tokens_per_version()
    return group.num_tokens - sum(n for version, n in counts.items() if version_updates[version] >= min_update)
