"""What became of every group. Each admitted group ends trained, dropped with a reason, or open; nothing else.

admitted -> delivered -> trained
    |           |
    +-----------+------> dropped(reason)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict


class LedgerError(RuntimeError):
    """A transition that the ledger does not allow: a group ended twice, or was never admitted."""


class LedgerRecord(TypedDict):
    """One group in `ledger.jsonl`. segments and tokens are what it delivered, or what was generated in vain."""

    group: int
    admitted_version: int
    outcome: str
    reason: str | None
    train_step: int | None
    segments: int
    tokens: int


class LedgerTotal(TypedDict):
    """The closing line of `ledger.jsonl`."""

    outcome: str
    admitted: int
    trained: int
    dropped: int
    open: int
    error: int
    trained_tokens: int
    dropped_tokens: int
    reasons: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Groups so far. `admitted` is counted where groups start, the others where they end or are held.

    trained_tokens, dropped_tokens: sampled tokens of the groups that ended so.
    reasons: dropped groups by the part of their reason before the first colon.
    """

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    open: int = 0
    trained_tokens: int = 0
    dropped_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def error(self) -> int:
        """Groups that were lost (> 0) or ended twice (< 0); anything but 0 is a defect."""
        return self.admitted - self.trained - self.dropped - self.open


@dataclass(slots=True)
class _Entry:
    admitted_version: int
    segments: int = 0
    tokens: int = 0
    delivered: bool = False


class Ledger:
    """Counts of one queue, and the records of the groups that ended.

    Args:
        before: counts of the runs that this one continues; their groups are all ended.
    """

    def __init__(self, *, before: LedgerCounts | None = None) -> None:
        before = before or LedgerCounts()
        self._admitted = before.admitted
        self._trained = before.trained
        self._dropped = before.dropped
        self._trained_tokens = before.trained_tokens
        self._dropped_tokens = before.dropped_tokens
        self._reasons = Counter(before.reasons)
        self._entries: dict[int, _Entry] = {}
        self._ended: list[LedgerRecord] = []

    def admitted(self, group: int, *, version: int) -> None:
        """A group started on weights of `version`."""
        if group in self._entries:
            raise LedgerError(f"group {group} was admitted twice; group ids are never reused")
        self._entries[group] = _Entry(version)
        self._admitted += 1

    def delivered(self, group: int, *, segments: int, tokens: int) -> None:
        """A group is complete and held by the queue."""
        entry = self._entry(group)
        if entry.delivered:
            raise LedgerError(f"group {group} was delivered twice")
        entry.segments, entry.tokens, entry.delivered = segments, tokens, True

    def trained(self, group: int, *, train_step: int) -> None:
        """A delivered group took part in optimizer step `train_step`."""
        entry = self._entry(group)
        if not entry.delivered:
            raise LedgerError(f"group {group} cannot be trained: it was never delivered")
        self._trained += 1
        self._trained_tokens += entry.tokens
        self._end(group, entry, outcome="trained", reason=None, train_step=train_step)

    def dropped(self, group: int, *, reason: str, segments: int = 0, tokens: int = 0) -> None:
        """A group was given up. `segments` and `tokens` count for a group that was never delivered.

        Raises:
            LedgerError: also where the reason is empty.
        """
        entry = self._entry(group)
        if not reason:
            raise LedgerError(f"group {group} was dropped without a reason; say why")
        if not entry.delivered:
            entry.segments, entry.tokens = segments, tokens
        self._dropped += 1
        self._dropped_tokens += entry.tokens
        self._reasons[reason.partition(":")[0]] += 1
        self._end(group, entry, outcome="dropped", reason=reason, train_step=None)

    def counts(self, *, open_groups: int) -> LedgerCounts:
        """Counts so far.

        Args:
            open_groups: live groups as the holder of the groups counts them, which is what `error` compares with.
        """
        return LedgerCounts(
            admitted=self._admitted,
            trained=self._trained,
            dropped=self._dropped,
            open=open_groups,
            trained_tokens=self._trained_tokens,
            dropped_tokens=self._dropped_tokens,
            reasons=dict(self._reasons),
        )

    def drain_records(self) -> list[LedgerRecord]:
        """Records of the groups that ended since the last call, in that order."""
        ended, self._ended = self._ended, []
        return ended

    def closing_records(self, open_groups: Iterable[int]) -> list[LedgerRecord | LedgerTotal]:
        """What completes `ledger.jsonl`: groups that ended since the last drain, open groups, and the total."""
        live = sorted(open_groups)
        records: Sequence[LedgerRecord] = [*self.drain_records(), *(self._open_record(group) for group in live)]
        counts = self.counts(open_groups=len(live))
        total = LedgerTotal(
            outcome="total",
            admitted=counts.admitted,
            trained=counts.trained,
            dropped=counts.dropped,
            open=counts.open,
            error=counts.error,
            trained_tokens=counts.trained_tokens,
            dropped_tokens=counts.dropped_tokens,
            reasons=counts.reasons,
        )
        return [*records, total]

    def _entry(self, group: int) -> _Entry:
        if group not in self._entries:
            raise LedgerError(f"group {group} is not open: it was never admitted, or was trained or dropped before")
        return self._entries[group]

    def _open_record(self, group: int) -> LedgerRecord:
        return _record(group, self._entry(group), outcome="open", reason=None, train_step=None)

    def _end(self, group: int, entry: _Entry, *, outcome: str, reason: str | None, train_step: int | None) -> None:
        del self._entries[group]
        self._ended.append(_record(group, entry, outcome=outcome, reason=reason, train_step=train_step))


def _record(group: int, entry: _Entry, *, outcome: str, reason: str | None, train_step: int | None) -> LedgerRecord:
    return LedgerRecord(
        group=group,
        admitted_version=entry.admitted_version,
        outcome=outcome,
        reason=reason,
        train_step=train_step,
        segments=entry.segments,
        tokens=entry.tokens,
    )
