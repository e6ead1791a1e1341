"""Rollouts that are counted and stored while they grow, so that a restart continues unfinished ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from agent_loop.text import safe_text, safe_value
from async_rl.inference.notifier import Notifier
from async_rl.rollout.content.format import CallStarted, Forked, RolloutRecord, RolloutStep, Scored, TrajectoryClosed
from async_rl.rollout.content.writer import ContentWriter
from message_queue.errors import AsyncRLError
from message_queue.ledger import LedgerCounts, LedgerRecord
from message_queue.tokens import Int32Array, StopReason, TokenOutput
from message_queue.training_sequence import TrajectoryScores
from message_queue.trajectory import POLICY, Trajectory


class RolloutLogError(AsyncRLError):
    """Rollouts can no longer be stored; the cause is chained. The rollouts themselves are sound."""


class RolloutLog:
    """Stores records in order; records that arrive during a call are sent together in the next one."""

    def __init__(self, store: ContentWriter) -> None:
        self._store = store
        self._waiting: list[RolloutRecord] = []
        self._num_appended = self._num_written = 0
        self._progress = Notifier()
        self._sending: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def append(self, record: RolloutRecord) -> None:
        """Store a record soon, after all earlier ones."""
        if self._failure is not None:
            return
        self._num_appended += 1
        self._waiting.append(record)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="rollout-log")

    async def flush(self) -> None:
        """Return once all earlier records are stored.

        Raises:
            RolloutLogError: writing failed; nothing more is written.
        """
        wanted = self._num_appended
        while self._failure is None and self._num_written < wanted:
            await self._progress.wait()
        if self._failure is not None:
            raise RolloutLogError(f"rollouts cannot be written down any more: {self._failure}") from self._failure

    async def _send(self) -> None:
        try:
            while self._waiting:
                records, self._waiting = self._waiting, []
                await self._store.append(records)
                self._num_written += len(records)
                self._progress.notify_all()
        except Exception as error:  # noqa: BLE001 - every later flush raises it
            self._failure = error
        finally:
            self._sending = None
            self._progress.notify_all()


class RecordedTrajectory(Trajectory):
    """A trajectory that reports everything appended to it and to its forks.

    Args:
        existing: initial content, possibly with forks; this object takes it over.
        record: called with the number of tokens before each appended step, the step, and the number of the path.
        flush: returns once all recorded steps are stored.
    """

    def __init__(
        self,
        existing: Trajectory,
        *,
        record: Callable[[int, RolloutStep, int], None],
        flush: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        vars(self).update(vars(existing))
        self._record = record
        self._flush = flush
        self._forks = [RecordedTrajectory(f, record=record, flush=flush) for f in existing._forks]
        for fork in self._forks:
            fork._root = self

    async def start_call(self, call: str) -> None:
        """See Trajectory. The call is stored when this returns."""
        self._record(len(self), CallStarted(safe_text(call)), self.path)
        if self._flush is not None:
            await self._flush()

    def observe(self, token_ids: Int32Array) -> None:
        """See Trajectory."""
        at = len(self)
        super().observe(token_ids)
        self._record(at, token_ids, self.path)

    def extend(self, segment: TokenOutput) -> None:
        """See Trajectory."""
        at = len(self)
        super().extend(segment)
        self._record(at, segment, self.path)

    def fork(self, *, turns: int) -> Trajectory:
        """See Trajectory."""
        made = super().fork(turns=turns)
        self._record(len(made), Forked(parent=self.path, turns=turns), made.path)
        return made

    def close(
        self,
        *,
        stop_reason: StopReason,
        reward: float,
        info: dict[str, float] | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        """See Trajectory."""
        super().close(stop_reason=stop_reason, reward=reward, info=safe_value(info), rewards=safe_value(rewards))
        end = TrajectoryClosed(
            stop_reason=stop_reason,
            reward=float(reward),
            info=self.info,
            forks={fork.path: len(fork) for fork in self._forks},
            rewards=self.rewards,
            agents={path.path: path.agent for path in self.paths if path.agent != POLICY},
            awaits_scores=self.awaits_scores,
        )
        self._record(len(self), end, self.path)

    def add_scores(self, scores: TrajectoryScores) -> None:
        """See Trajectory."""
        super().add_scores(scores)
        self._record(len(self), Scored(scores=scores), self.path)


class TokenCount:
    """Sampled tokens of the groups in rollout, counted when engines return them.

    The queue counts the tokens of the groups it receives. If the two counts of a group differ, tokens are missing or
    were counted twice.
    """

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
