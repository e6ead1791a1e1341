"""Sampled tokens of the groups in rollout, counted when engines return them.

The queue counts the tokens of the groups it receives. If the two counts of a group differ, tokens are missing or were
counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from message_queue.ledger import LedgerCounts, LedgerRecord


class TokenCount:
    """Sampled tokens by group."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}

    def add(self, group: int, tokens: int) -> None:
        """Count `tokens` of a group, from an engine or held from before a restart."""
        self._of[group] = self._of.get(group, 0) + tokens

    def pop(self, group: int) -> int:
        """Remove a group; returns its tokens."""
        return self._of.pop(group, 0)

    def settle(self, records: Iterable[LedgerRecord]) -> list[str]:
        """Describe differences to the queue's counts of ended groups; groups of an earlier start are skipped."""
        wrong: list[str] = []
        for record in records:
            counted = self._of.pop(record["group"], None)
            if counted is not None and counted != record["tokens"]:
                wrong.append(f"group {record['group']} ended with {record['tokens']} tokens, of {counted} generated")
        return wrong


def require_closed(counts: LedgerCounts, *, wrong: Sequence[str]) -> None:
    """Stop a run whose ledger does not close.

    Args:
        wrong: result of `TokenCount.settle`.

    Raises:
        RuntimeError: a group or a token is missing or was counted twice; the message has the counts.
    """
    if counts.error:
        raise RuntimeError(f"ledger/error is {counts.error}: {counts}; a group was lost or counted twice")
    if counts.token_error or wrong:
        raise RuntimeError(
            f"ledger/token_error is {counts.token_error}: {counts}; tokens were lost or counted twice: "
            f"{'; '.join(wrong[:5]) or 'between the queue and the trainer'}"
        )
