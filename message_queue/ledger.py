"""What became of every group and token. Each group ends trained, dropped with a reason, or open; nothing else.

admitted -> delivered -> trained
    |           |
    +-----------+------> dropped(reason)

A sampled token of a trained group took gradient, or it is masked: too old (policy mask), or of a rollout that failed.
Those of a dropped group are dropped. Each count is made where it happens: tokens that came in by what was handed in,
those with gradient by what the trainer was given, those that are held by who holds the groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict


class LedgerError(RuntimeError):
    """A transition that the ledger does not allow: a group ended twice, or was never admitted."""


class LedgerRecord(TypedDict):
    """One group in `ledger.jsonl`. segments and tokens are what it delivered, or what was generated in vain.

    masked_tokens: of these, without gradient although it was trained.
    """

    group: int
    admitted_version: int
    outcome: str
    reason: str | None
    train_step: int | None
    segments: int
    tokens: int
    masked_tokens: int


class LedgerTotal(TypedDict):
    """The closing line of `ledger.jsonl`."""

    outcome: str
    admitted: int
    trained: int
    dropped: int
    open: int
    error: int
    trained_tokens: int
    masked_tokens: int
    dropped_tokens: int
    open_tokens: int
    token_error: int
    reasons: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Groups so far. `admitted` is counted where groups start, the others where they end or are held.

    tokens: sampled tokens of groups that were handed in, finished or given up. They are trained_tokens, which took
    gradient, masked_tokens of trained groups, dropped_tokens, or open_tokens, of groups that are held.
    reasons: dropped groups by the part of their reason before the first colon.
    """

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    open: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    dropped_tokens: int = 0
    open_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def error(self) -> int:
        """Groups that were lost (> 0) or ended twice (< 0); anything but 0 is a defect."""
        return self.admitted - self.trained - self.dropped - self.open

    @property
    def token_error(self) -> int:
        """Tokens that were lost (> 0) or counted twice (< 0); anything but 0 is a defect."""
        return self.tokens - self.trained_tokens - self.masked_tokens - self.dropped_tokens - self.open_tokens


@dataclass(slots=True)
class _Entry:
    admitted_version: int
    segments: int = 0
    tokens: int = 0
    masked: int = 0
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
        self._tokens = before.trained_tokens + before.masked_tokens + before.dropped_tokens
        self._trained_tokens = before.trained_tokens
        self._masked_tokens = before.masked_tokens
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
        self._tokens += tokens

    def masked(self, group: int, *, tokens: int) -> None:
        """So many tokens of a delivered group are to take no gradient."""
        self._entry(group).masked = tokens

    def masked_of(self, group: int) -> int:
        """Its tokens that are to take no gradient."""
        return self._entry(group).masked

    def trained(self, group: int, *, train_step: int, tokens: int | None = None) -> None:
        """A delivered group took part in optimizer step `train_step`.

        Args:
            tokens: of it that took gradient, as the trainer's side counts them; None where that does not count.
        """
        entry = self._entry(group)
        if not entry.delivered:
            raise LedgerError(f"group {group} cannot be trained: it was never delivered")
        self._trained += 1
        self._trained_tokens += entry.tokens - entry.masked if tokens is None else tokens
        self._masked_tokens += entry.masked
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
            self._tokens += tokens
        entry.masked = 0
        self._dropped += 1
        self._dropped_tokens += entry.tokens
        self._reasons[reason.partition(":")[0]] += 1
        self._end(group, entry, outcome="dropped", reason=reason, train_step=None)

    def counts(self, *, open_groups: int, open_tokens: int = 0) -> LedgerCounts:
        """Counts so far.

        Args:
            open_groups: live groups as the holder of the groups counts them, which is what `error` compares with.
            open_tokens: of those among them that are finished, likewise for `token_error`.
        """
        return LedgerCounts(
            admitted=self._admitted,
            trained=self._trained,
            dropped=self._dropped,
            open=open_groups,
            tokens=self._tokens,
            trained_tokens=self._trained_tokens,
            masked_tokens=self._masked_tokens,
            dropped_tokens=self._dropped_tokens,
            open_tokens=open_tokens,
            reasons=dict(self._reasons),
        )

    def drain_records(self) -> list[LedgerRecord]:
        """Records of the groups that ended since the last call, in that order."""
        ended, self._ended = self._ended, []
        return ended

    def closing_records(self, open_groups: Iterable[int], *, open_tokens: int = 0) -> list[LedgerRecord | LedgerTotal]:
        """What completes `ledger.jsonl`: groups that ended since the last drain, open groups, and the total.

        Args: as of `counts`.
        """
        live = sorted(open_groups)
        records: Sequence[LedgerRecord] = [*self.drain_records(), *(self._open_record(group) for group in live)]
        counts = self.counts(open_groups=len(live), open_tokens=open_tokens)
        total = LedgerTotal(
            outcome="total",
            admitted=counts.admitted,
            trained=counts.trained,
            dropped=counts.dropped,
            open=counts.open,
            error=counts.error,
            trained_tokens=counts.trained_tokens,
            masked_tokens=counts.masked_tokens,
            dropped_tokens=counts.dropped_tokens,
            open_tokens=counts.open_tokens,
            token_error=counts.token_error,
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
        masked_tokens=entry.masked if outcome == "trained" else 0,
    )
