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
    groups: Sequence[QueuedGroup], version_updates: Mapping[int, int], *, budget: StalenessBudget, next_update: int
) -> dict[int, int]:
    """Check each token by the version that sampled it; return the update of every version in the batch.

    Raises:
        StalenessError: a token is older than the bound.
    """
    versions: dict[int, int] = {}
    for group in groups:
        counts = group.tokens_per_version()
        versions.update((v, version_updates[v]) for v in counts)
        oldest = oldest_update(counts, version_updates)
        if oldest is not None and budget.is_expired(oldest, next_update=next_update):
            staleness = budget.staleness(oldest, next_update=next_update)
            raise StalenessError(
                f"group {group.group} has tokens of staleness {staleness} at update {next_update}; "
                f"staleness.max_staleness is {budget.max_staleness}"
            )
    return versions
