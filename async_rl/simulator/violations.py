"""What must hold in every run, and the error of a run that violates it."""

from __future__ import annotations

INVARIANTS = {
    "ledger": "admitted = trained + dropped + open, and each count is what an outsider counts",
    "staleness": "no trained token is older than max_staleness optimizer updates, and its lag is told right",
    "provenance": "each trained token and logprob is what the weights it names give after its context",
    "rows": "a sequence of T tokens has T - 1 rows; each is of the forward pass that the merge rule names",
    "kept": "tokens that an engine answered are in each later request of their rollout, and in what is trained",
    "reward": "each trained rollout has the reward that it was given, and all its sequences one advantage",
    "advantage": "each advantage is what its formula gives for the rewards of the group or the batch",
    "versions": "versions go up, nothing is served or stamped that was not published, no token is older than its group",
    "exactly once": "no group and no prompt is trained twice or skipped; no tool runs twice; no limit is exceeded",
    "tools": "no worker starts a tool while new weights are loaded",
    "failure": "a run stops early, loses a replica or drops a group only where something was broken on purpose",
    "progress": "a run ends: no deadlock, no standstill",
}


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        assert invariant in INVARIANTS
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


def require(invariant: str, holds: bool, text: str, *values: object) -> None:
    """Raise Violation unless `holds`; `text` is formatted with `values`."""
    if not holds:
        raise Violation(invariant, text.format(*values))
