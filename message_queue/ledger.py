"""Records of the ledger. Each group ends trained, dropped with a reason, or open; nothing else.

    admitted -> ready -> trained
        |         |
        +---------+----> dropped(reason)

A sampled token of a trained group took gradient, or it is masked: too old (policy mask), of a rollout that failed, or
of an untrained agent. Tokens of a dropped group are dropped. Events count groups and tokens that enter and end; the
groups that the queue holds count those that are open. `error` and `token_error` compare the two sides.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypedDict


class DropKind(StrEnum):
    """Why groups are dropped. The ledger counts each kind; code compares kinds and never reads a text."""

    EXPIRED = "expired"
    """It can no longer be trained within the staleness bound."""
    REQUEUED = "requeued"
    """It expired, and its prompt is readmitted."""
    ROLLOUT_FAILED = "rollout failed"
    """One of its rollouts failed."""
    TEACHER_FAILED = "teacher failed"
    """A teacher did not score one of its rollouts."""
    TOO_FEW_LEFT = "rollouts failed"
    """Too few of its rollouts are left."""
    NO_SPREAD = "no spread"
    """Its rewards are equal."""
    STOPPED = "stopped before it was trained"
    """The run continues from a checkpoint without journal; the prompt is readmitted."""
    UNRECORDED = "ended before it was recorded"
    """The run was killed between its end and the record."""
    RECORD_LOST = "record missing"
    """The file is incomplete; the group was trained before the checkpoint, or dropped."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Reason of a drop, as in `expired: staleness 3 exceeds 2`."""

    kind: DropKind
    """Kind, for code."""
    text: str
    """Details for people."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class LedgerRecord(TypedDict):
    """One group in `ledger.jsonl`."""

    group: int
    """Id."""
    admitted_version: int
    """`param_version` at its admission."""
    outcome: str
    """trained, dropped or open."""
    kind: DropKind | None
    """Kind of the drop; None if it was not dropped."""
    reason: str | None
    """Kind and text of the drop."""
    train_step: int | None
    """Optimizer step that it took part in."""
    segments: int
    """Segments that it delivered, or that were generated in vain."""
    tokens: int
    """Sampled tokens that it delivered, or that were sampled in vain."""
    masked_tokens: int
    """Tokens without gradient of a trained group."""


LedgerTotal = dict[str, Any]
"""The closing line of `ledger.jsonl`: the fields of `LedgerCounts`, both errors, and the `outcome` "total"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Groups and tokens so far."""

    admitted: int = 0
    """Groups that started."""
    trained: int = 0
    """Groups that took part in an optimizer step."""
    dropped: int = 0
    """Groups that were given up."""
    open: int = 0
    """Groups that the queue holds and that were not trained."""
    tokens: int = 0
    """Sampled tokens of groups that became ready or were given up."""
    trained_tokens: int = 0
    """Sampled tokens that took gradient, as the trainer counts them."""
    masked_tokens: int = 0
    """Sampled tokens of trained groups without gradient."""
    dropped_tokens: int = 0
    """Sampled tokens of dropped groups."""
    open_tokens: int = 0
    """Sampled tokens of ready and taken groups."""
    reasons: dict[DropKind, int] = field(default_factory=dict[DropKind, int])
    """Dropped groups by kind."""

    @property
    def error(self) -> int:
        """Groups that are missing (> 0) or ended twice (< 0); anything but 0 is a defect."""
        return self.admitted - self.trained - self.dropped - self.open

    @property
    def token_error(self) -> int:
        """Tokens that are missing (> 0) or counted twice (< 0); anything but 0 is a defect."""
        return self.tokens - self.trained_tokens - self.masked_tokens - self.dropped_tokens - self.open_tokens

    def total(self) -> LedgerTotal:
        """The closing line."""
        return {"outcome": "total", **asdict(self), "error": self.error, "token_error": self.token_error}
