"""What engines and tools did for each rollout that may still be trained, over all restarts."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.rollout.rollouter import session_name
from async_rl.simulate import model
from async_rl.simulate.engine import Answered
from async_rl.simulate.restarts import Reopened
from async_rl.simulate.violations import require

_FINISHED = 1 << 30  # tokens: nothing is generated any more


class Sessions:
    """By the name of each session.

    Args:
        most: trajectories of a group, with those that make up for failed ones.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._answers: dict[str, list[Answered]] = {}
        self._tool_calls: dict[str, int] = {}
        self._kept: dict[str, int] = {}  # tokens that are not generated again
        self._went_on: set[int] = set()

    def reopened(self, found: Reopened, *, losses: bool, new_driver: bool) -> None:
        """The run goes on with the groups that are found.

        Args:
            losses: what was called may be forgotten, and called again. new_driver: no older one may be heard any more.
        """
        self._went_on |= found.live.keys()
        of = {session_name(g, i): g for g in found.live for i in range(self._most)}
        self._answers = {s: a for s, a in self._answers.items() if s in of}
        self._tool_calls = {s: n for s, n in self._tool_calls.items() if s in of}
        if losses:
            for group, held in found.open.items():
                for i in range(self._most):
                    turns = held[i].turns[:-1] if i < len(held) else []
                    answered = (segment.token_ids for turn in turns for segment in turn.segments)
                    session, calls = session_name(group, i), sum(int((ids == model.CALL).sum()) for ids in answered)
                    self._tool_calls[session] = min(calls, self._tool_calls.get(session, 0))
                    if session in self._kept:  # the record that it ended may be lost, and what it was with that
                        length = len(held[i]) if i < len(held) else 0
                        self._kept[session] = min(length, self._kept[session])
        if new_driver:
            self._kept = {s: _FINISHED for s, group in of.items() if group not in found.open}
            for group, held in found.open.items():
                for i, trajectory in enumerate(held):
                    self._kept[session_name(group, i)] = _FINISHED if trajectory.closed else len(trajectory)

    def moved(self, group: int) -> None:
        """A group goes on at another worker."""
        self._went_on.add(group)

    def answered(self, answer: Answered) -> None:
        """An engine answered."""
        self._answers.setdefault(answer.session, []).append(answer)

    def asked(self, session: str, *, tokens: int) -> None:
        """An engine is to go on after `tokens` tokens."""
        kept = self._kept.get(session, 0)
        text = "{} is generated again from {}; {} were held"
        require("exactly once", tokens >= kept, text, session, tokens, kept)

    def tool_called(self, session: str) -> None:
        """A tool started."""
        self._tool_calls[session] = self._tool_calls.get(session, 0) + 1

    def answers(self, session: str) -> Sequence[Answered]:
        """Of engines to its requests."""
        return self._answers.get(session, [])

    def tool_calls(self, session: str) -> int:
        """Tools that were started."""
        return self._tool_calls.get(session, 0)

    def went_on(self, group: int) -> bool:
        """Whether it was interrupted by a restart, or by the death of its worker."""
        return group in self._went_on
