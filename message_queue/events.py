"""Events: every change of the queue's state, one type each. The journal stores them, `QueueState.apply` follows them.

Group 7 that is trained makes Admitted(admission of 7), Ready(head of 7), Taken(groups=(7, 9)), Trained(groups=(7, 9)).
"""

from __future__ import annotations

import msgspec

from message_queue.heads import GroupHead
from message_queue.ledger import Drop, DropKind
from message_queue.trajectory import Admission


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A group starts: it is open."""

    admission: Admission
    """Its id is larger than every id before."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An open group is finished and waits for the trainer."""

    head: GroupHead
    """The group without its content."""


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A group that was not trained is given up."""

    group: int
    """Id of an open, ready or taken group."""
    reason: Drop
    """Kind and text."""
    segments: int = 0
    """Segments generated in vain; used if the group was open."""
    tokens: int = 0
    """Tokens sampled in vain; used if the group was open."""

    @property
    def requeue(self) -> bool:
        """Whether the prompt is readmitted."""
        return self.reason.kind is DropKind.REQUEUED


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ready groups are handed to the trainer as one batch."""

    groups: tuple[int, ...]
    """Ids in the order of the batch."""
    update: int
    """Optimizer updates held by the weights whose gradient the batch takes first."""
    masked: tuple[int, ...]
    """Sampled tokens of each group that take no gradient."""
    updates: int = 1
    """Optimizer updates that the trainer makes from the batch."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Taken groups took part in an optimizer step."""

    groups: tuple[int, ...]
    """Ids."""
    train_step: int
    """The optimizer step."""
    tokens: tuple[int, ...]
    """Sampled tokens of each group that took gradient."""


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer published weights."""

    version: int
    """`param_version`, larger than every version before."""
    update: int
    """Optimizer updates that they hold."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every replica serves a version."""

    version: int
    """`param_version` that was published."""


class Checkpointed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A checkpoint is complete: groups trained up to its step are never retrained."""

    train_step: int
    """Optimizer steps in the checkpoint."""


Event = Admitted | Ready | Dropped | Taken | Trained | Published | Loaded | Checkpointed
