"""What crosses the boundary of the queue: admissions, batches, snapshots and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from message_queue.ledger import LedgerCounts


class QueuedGroup(Protocol):
    """What the queue reads of a group: a PromptGroup, or its encoded form."""

    @property
    def group(self) -> int: ...
    @property
    def prompt(self) -> int: ...
    @property
    def admitted_version(self) -> int: ...
    @property
    def admitted_update(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def tokens_per_version(self) -> Mapping[int, int]:
        """`param_version` -> tokens that it sampled, of rollouts that did not fail."""
        ...


P = TypeVar("P")


class QueueError(RuntimeError):
    """The queue refuses a call."""


class QueueClosed(QueueError):
    """The queue is closed; the message says what is left in it."""


class UnknownGroup(QueueError):
    """The group was never admitted by this queue."""


class DuplicateGroup(QueueError):
    """The group was put before, or has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Leave to roll out one prompt. The id is unique in a run and never reused.

    admitted_version, admitted_update: newest weights that every replica serves, and the optimizer updates they hold.
    """

    group: int
    prompt: int
    admitted_version: int
    admitted_update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """expired: None where the group became ready, else why it was given up at the door."""

    expired: str | None = None

    @property
    def accepted(self) -> bool:
        return self.expired is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[P]):
    """Groups of one batch.

    update: optimizer updates held by the weights whose gradient the batch takes first.
    version_updates: `param_version` -> optimizer updates it holds, for every version that sampled a token of the batch.
    min_update: tokens of weights with fewer optimizer updates take no gradient (policy mask).
    """

    groups: list[P]
    update: int
    version_updates: dict[int, int]
    min_update: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """State of a queue at one instant; JSON through msgspec. A queue restored from it continues ids and ledger.

    next_group: the id of the next admission. next_update: updates of the batches whose training was acknowledged.
    version, update: newest weights that every replica serves.
    ready, open, taken: groups in each state. replay: batches of the ready ones that are trained again.
    unfinished: the admissions of all of them, by id. waiting: prompts whose groups expired and that are admitted again,
    in that order. recycles: prompt -> times that it was to be admitted again, of those and of `unfinished`.
    """

    next_group: int = 0
    next_update: int = 0
    version: int = 0
    update: int = 0
    ready: int = 0
    open: int = 0
    taken: int = 0
    replay: int = 0
    unfinished: tuple[Admission, ...] = ()
    waiting: tuple[int, ...] = ()
    recycles: dict[int, int] = field(default_factory=dict[int, int])
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    closed: bool = False

    @property
    def outstanding(self) -> int:
        """Groups admitted and not taken; what the staleness budget bounds."""
        return self.ready + self.open

    @property
    def prompts(self) -> tuple[int, ...]:
        """Prompts that a restarted run admits again."""
        return (*(admission.prompt for admission in self.unfinished), *self.waiting)
