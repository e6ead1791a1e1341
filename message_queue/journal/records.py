"""What a journal records: one class for each kind of record, without the arrays of tokens and rows."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from message_queue.ledger import LedgerCounts
from message_queue.tokens import StopReason
from message_queue.trajectory import ResumeRouting
from message_queue.wire.format import MessageHead


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A group starts. trajectories: n. version, update: of its admission."""

    prompt: int
    version: int
    update: int
    trajectories: int
    resume_routing: ResumeRouting


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` tokens that no policy sampled were appended at position `at`."""

    at: int
    tokens: int


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """A segment was appended at position `at`."""

    at: int
    message: MessageHead


class Called(msgspec.Struct, frozen=True, array_like=True):
    """Something outside is about to be called, which is to happen once."""

    at: int
    call: str


class Closed(msgspec.Struct, frozen=True, array_like=True):
    """The trajectory ended."""

    at: int
    stop_reason: StopReason
    reward: float
    info: dict[str, float]


class Ready(msgspec.Struct, frozen=True, array_like=True):
    """The group waits for the trainer."""


class Marked(msgspec.Struct, frozen=True, array_like=True):
    """The group waits for the trainer, and its content is in another journal: whole with that many records.

    segments, tokens: that were sampled for it.
    """

    records: int
    segments: int
    tokens: int


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """The groups of a batch. update: optimizer updates of the weights it is trained from."""

    groups: tuple[int, ...]
    update: int


class Trained(msgspec.Struct, frozen=True, array_like=True):
    """Groups took part in optimizer step `train_step`. tokens: that were sampled for each. masked: without gradient."""

    groups: tuple[int, ...]
    train_step: int
    tokens: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()


class Dropped(msgspec.Struct, frozen=True, array_like=True):
    """The group was given up. tokens: that were sampled for it. again: its prompt is to be admitted again."""

    reason: str
    tokens: int = 0
    again: bool = False


class Published(msgspec.Struct, frozen=True, array_like=True):
    """`version` holds `update` optimizer updates."""

    version: int
    update: int


class Checkpointed(msgspec.Struct, frozen=True, array_like=True):
    """What was trained up to `train_step` is settled: no restart goes back before it."""

    train_step: int


class LiveHead(msgspec.Struct, frozen=True, array_like=True):
    """A group in a Summary. records: how many of its own it has. The rest as in LiveGroup."""

    group: int
    admitted: Admitted
    state: int
    taken_update: int | None
    train_step: int | None
    trained_tokens: int
    trained_update: int | None
    turn: int
    records: int
    masked_tokens: int = 0


class MarkedHead(LiveHead, frozen=True, array_like=True):
    """One whose content is in another journal; a LiveHead is read as one without a mark."""

    mark: Marked | None = None


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """All that was recorded before, but for the content of the live groups.

    waiting: prompts to admit again, in order. recycles: (prompt, times that it was to be).
    """

    next_group: int
    next_turn: int
    prompt_cursor: int
    train_step: int
    settled_step: int
    served: int
    update: int
    versions: tuple[tuple[int, int], ...]
    ledger: LedgerCounts
    groups: tuple[MarkedHead, ...]
    waiting: tuple[int, ...] = ()
    recycles: tuple[tuple[int, int], ...] = ()


Body: TypeAlias = (
    Admitted
    | Observed
    | Sampled
    | Called
    | Closed
    | Ready
    | Taken
    | Trained
    | Dropped
    | Published
    | Checkpointed
    | Summary
    | Marked
)
KINDS: tuple[type[Body], ...] = (
    Summary,
    Admitted,
    Observed,
    Sampled,
    Called,
    Closed,
    Ready,
    Taken,
    Trained,
    Dropped,
    Published,
    Checkpointed,
    Marked,
)
Content: TypeAlias = Observed | Sampled | Called | Closed
