"""Values and errors of the queue's calls: admissions, batches, snapshots and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field

from message_queue.heads import GroupHead
from message_queue.ledger import LedgerCounts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """State of a queue at one instant, as a checkpoint stores it; JSON through msgspec."""

    next_group: int = 0
    """Id of the next admission."""
    next_update: int = 0
    """Optimizer updates of the batches whose training was acknowledged."""
    version: int = 0
    """Newest `param_version` that every replica serves."""
    update: int = 0
    """Optimizer updates held by those weights."""
    ready: int = 0
    """Finished groups that wait for the trainer."""
    open: int = 0
    """Groups being rolled out."""
    taken: int = 0
    """Groups handed to the trainer and not acknowledged."""
    replay: int = 0
    """Batches of ready groups that are repeated after a restart."""
    unfinished: tuple[Admission, ...] = ()
    """Admissions of all open, ready and taken groups, by id."""
    waiting: tuple[int, ...] = ()
    """Prompts of expired groups that are readmitted, in that order."""
    requeues: dict[int, int] = field(default_factory=dict[int, int])
    """Prompt -> times that it was to be readmitted, for prompts that have not ended."""
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    """Counts of groups and tokens."""
    closed: bool = False
    """Whether the queue is closed."""

    @property
    def prompts(self) -> tuple[int, ...]:
        """Prompts that a restarted run readmits."""
        return (*(admission.prompt for admission in self.unfinished), *self.waiting)
