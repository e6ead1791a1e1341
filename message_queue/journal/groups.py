"""What the journal knows of a live group: its admission, its state, and how far its trajectories are."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec

from message_queue.contract import Admission
from message_queue.journal.records import (
    Admitted,
    Called,
    Closed,
    Content,
    LiveHead,
    Marked,
    MarkedHead,
    Observed,
    Sampled,
)
from message_queue.trajectory import ResumeRouting


class GroupState(IntEnum):
    OPEN = 0
    READY = 1
    TAKEN = 2
    TRAINED = 3


class Span(NamedTuple):
    """Where a record is. file: its number. offset, size: in bytes."""

    file: int
    offset: int
    size: int


class Step(NamedTuple):
    """What one record adds to its trajectory."""

    at: int
    length: int = 0
    segments: int = 0
    sampled: int = 0
    closed: bool = False
    call: str | None = None


def step_of(body: Content) -> Step:
    """What a record adds."""
    match body:
        case Observed():
            return Step(body.at, length=body.tokens)
        case Sampled():
            sampled = body.message.num_sampled()
            return Step(body.at, length=sampled, segments=1, sampled=sampled)
        case Called():
            return Step(body.at, call=body.call)
        case Closed():
            return Step(body.at, closed=True)


class Progress:
    """How far a trajectory is. call: begun outside, and nothing was recorded after it."""

    __slots__ = ("call", "closed", "length", "sampled", "segments")

    def __init__(self) -> None:
        self.length = self.segments = self.sampled = 0
        self.closed = False
        self.call: str | None = None

    def add(self, step: Step) -> None:
        """Append a record."""
        self.length += step.length
        self.segments += step.segments
        self.sampled += step.sampled
        self.closed = step.closed
        self.call = step.call


class LiveGroup:
    """A group and where the records of its content are, in order.

    turn: its place among the ready, or among those taken with it. trained_tokens: sampled tokens, once it was trained;
    masked_tokens: of them, those without gradient.
    trained_update: the last update that it was trained at, also if a restart went back before that, as are
    masked_tokens. mark: where its content is in another journal, how much there is of it; None until it is ready.
    """

    __slots__ = (
        "admission",
        "mark",
        "masked_tokens",
        "progress",
        "resume_routing",
        "spans",
        "state",
        "taken_update",
        "train_step",
        "trained_tokens",
        "trained_update",
        "turn",
    )

    def __init__(self, group: int, admitted: Admitted) -> None:
        self.admission = Admission(
            group=group,
            prompt=admitted.prompt,
            admitted_version=admitted.version,
            admitted_update=admitted.update,
        )
        self.resume_routing: ResumeRouting = admitted.resume_routing
        self.progress = [Progress() for _ in range(admitted.trajectories)]
        self.state = GroupState.OPEN
        self.taken_update: int | None = None
        self.train_step: int | None = None
        self.trained_tokens = self.masked_tokens = 0
        self.trained_update: int | None = None
        self.turn = 0
        self.mark: Marked | None = None
        self.spans: list[Span] = []

    @property
    def group(self) -> int:
        return self.admission.group

    @property
    def complete(self) -> bool:
        """Whether every trajectory is closed."""
        return self.mark is not None or all(p.closed for p in self.progress)

    @property
    def num_segments(self) -> int:
        return self.mark.segments if self.mark is not None else sum(p.segments for p in self.progress)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return self.mark.tokens if self.mark is not None else sum(p.sampled for p in self.progress)

    def trajectory(self, number: int) -> Progress:
        """One of its trajectories; a group grows where a rollout that failed is made up for by one more."""
        self.progress.extend(Progress() for _ in range(len(self.progress), number + 1))
        return self.progress[number]

    def restart(self, turn: int) -> None:
        """It was taken or ready: ready again, or open where content was lost."""
        self.taken_update, self.train_step, self.trained_tokens = None, None, 0
        if self.complete:
            self.state, self.turn = GroupState.READY, turn
        else:
            self.state, self.trained_update, self.masked_tokens = GroupState.OPEN, None, 0

    def head(self) -> LiveHead:
        """The group in a Summary."""
        a = self.admission
        head = LiveHead(
            group=a.group,
            admitted=Admitted(a.prompt, a.admitted_version, a.admitted_update, len(self.progress), self.resume_routing),
            state=int(self.state),
            taken_update=self.taken_update,
            train_step=self.train_step,
            trained_tokens=self.trained_tokens,
            trained_update=self.trained_update,
            turn=self.turn,
            records=len(self.spans),
            masked_tokens=self.masked_tokens,
        )
        return head if self.mark is None else MarkedHead(*msgspec.structs.astuple(head), mark=self.mark)

    @classmethod
    def of(cls, head: LiveHead) -> LiveGroup:
        """The group of a Summary, without content."""
        group = cls(head.group, head.admitted)
        group.state, group.turn = GroupState(head.state), head.turn
        group.taken_update, group.train_step = head.taken_update, head.train_step
        group.trained_tokens, group.trained_update = head.trained_tokens, head.trained_update
        group.masked_tokens = head.masked_tokens
        group.mark = head.mark if isinstance(head, MarkedHead) else None
        return group
