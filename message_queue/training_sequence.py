"""Training sequences: the input of one forward pass of the trainer, and the routing rows that they are trained over."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import (
    ExpertArray,
    Float32Array,
    Int32Array,
    RoutedExperts,
    RoutingSpec,
    StopReason,
)

if TYPE_CHECKING:
    from message_queue.trajectory import PlacedSegment, PromptGroup, SequencePart

BoolArray = NDArray[np.bool_]
Int16Array = NDArray[np.int16]

NOT_ROUTED = -1  # a row the trainer routes with its live router
NOT_SAMPLED = -1  # param_version of a token that no policy sampled, and of a row that no forward pass gave


class RowRun(NamedTuple):
    """Consecutive rows of one forward pass."""

    rows: int
    """Number of rows."""
    version: int
    """`param_version` of the weights that gave them; -1 if no engine could give them."""


class TrajectoryRows:
    """Rows 0..len-1, views of the arrays that the engines returned: nothing is copied or widened until it is read.

    Every position has a row, or is known to have none.

    Args:
        routing: meaning of a row.
    """

    def __init__(self, routing: RoutingSpec) -> None:
        self._routing = routing
        self._blocks: list[tuple[int, ExpertArray]] = []  # (version, rows); rows that are unavailable are 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def num_unavailable(self) -> int:
        """Rows that are -1."""
        return sum(len(experts) for version, experts in self._blocks if version == NOT_SAMPLED)

    def add(self, rows: RoutedExperts, *, version: int) -> None:
        """Append the part of `rows` after the held ones; a gap is filled with rows that are unavailable."""
        self._append(NOT_SAMPLED, self._zeros(max(0, rows.first_position - self._count)))
        self._append(version, rows.experts[max(0, self._count - rows.first_position) :])

    def first(self, count: int) -> TrajectoryRows:
        """The first `count` rows, or all if fewer are held."""
        kept = TrajectoryRows(self._routing)
        for version, experts in self._blocks:
            kept._append(version, experts[: max(0, count - len(kept))])
        return kept

    def differ(self, rows: RoutedExperts) -> bool:
        """Whether `rows` and the held rows choose different experts at any position that both have.

        The order within the top-k does not count. A row that is -1 differs from every other.
        """
        at = 0
        for version, experts in self._blocks:
            start, end = max(at, rows.first_position), min(at + len(experts), rows.end_position)
            if start < end:
                given = rows.experts[start - rows.first_position : end - rows.first_position]
                if version == NOT_SAMPLED or not _same_sets(experts[start - at : end - at], given):
                    return True
            at += len(experts)
        return False

    def leading(self) -> RoutedExperts | None:
        """The rows before the first one that is -1; None if there are none."""
        blocks = [experts for _, experts in takewhile(lambda block: block[0] != NOT_SAMPLED, self._blocks)]
        return RoutedExperts.trusted(first_position=0, experts=self._joined(blocks)) if blocks else None

    def compact(self, length: int) -> tuple[ExpertArray, tuple[RowRun, ...]]:
        """The rows of positions before `length`, 0 if no engine could give them, and their runs.

        Rows of one forward pass are a view of the array that the engine returned.
        """
        blocks = self.first(length)._blocks
        runs = groupby(blocks, key=lambda block: block[0])
        return (
            self._joined([experts for _, experts in blocks]),
            tuple(RowRun(sum(len(experts) for _, experts in run), version) for version, run in runs),
        )

    def _append(self, version: int, experts: ExpertArray) -> None:
        if len(experts):
            self._blocks.append((version, experts))
            self._count += len(experts)

    def _zeros(self, count: int) -> ExpertArray:
        return np.zeros((count, *self._routing.row_shape), self._routing.dtype)

    def _joined(self, blocks: Sequence[ExpertArray]) -> ExpertArray:
        return blocks[0] if len(blocks) == 1 else np.concatenate([self._zeros(0), *blocks])


def _same_sets(one: ExpertArray, other: ExpertArray) -> bool:
    """Whether two [rows, moe_layers, top_k] hold the same sets of experts."""
    unequal = (one != other).any(axis=(1, 2))
    return np.array_equal(np.sort(one[unequal], axis=-1), np.sort(other[unequal], axis=-1))


class SampledRun(NamedTuple):
    """The sampled tokens of one segment."""

    start: int
    """Position of the first token."""
    tokens: int
    """Number of tokens, at least one."""
    version: int
    """`param_version` that sampled them."""
    replica: str = ""
    """Name of the engine replica; "" if no engine sampled them."""
    stop_reason: StopReason = StopReason.STOP
    """Why the decode ended."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherScores:
    """Logprobs of a frozen teacher at the n sampled tokens of a sequence, over its whole vocabulary.

    Two sampled tokens with top_k=2, the second of probability 0.1: logprobs (-0.1, -2.3), ids ((7, 3), (5, 9)),
    top_logprobs ((-0.1, -2.6), (-0.4, -1.6)).
    """

    logprobs: Float32Array
    """float32 [n], of each sampled token."""
    ids: Int32Array
    """int32 [n, k], the most likely tokens, distinct; -1 for a token that the student does not have."""
    top_logprobs: Float32Array
    """float32 [n, k], their logprobs, -inf for -1."""

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def top_k(self) -> int:
        """k."""
        return self.ids.shape[1]

    @classmethod
    def absent(cls, tokens: int, *, top_k: int) -> TeacherScores:
        """Of tokens without a teacher: NaN, and -1 with -inf."""
        return cls(
            logprobs=np.full(tokens, np.nan, np.float32),
            ids=np.full((tokens, top_k), -1, np.int32),
            top_logprobs=np.full((tokens, top_k), -np.inf, np.float32),
        )

    def take(self, places: NDArray[Any]) -> TeacherScores:
        """The scores at some places, by number or bool [n]."""
        return TeacherScores(
            logprobs=self.logprobs[places], ids=self.ids[places], top_logprobs=self.top_logprobs[places]
        )


def joined_scores(sequences: Sequence[TrainingSequence]) -> TeacherScores | None:
    """Scores of the tokens in the loss of sequences, one after another; None if none has a teacher."""
    top_k = next((s.teacher.top_k for s in sequences if s.teacher is not None), None)
    if top_k is None:
        return None
    parts = [s.teacher or TeacherScores.absent(len(s.logprobs), top_k=top_k) for s in sequences]
    return TeacherScores(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )


TrajectoryScores = tuple[TeacherScores | None, ...]
"""Scores of each sequence of a trajectory; None for those of an untrained agent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """The first t tokens of a path of a trajectory over one set of rows; n tokens are in the loss. Nothing is padded.

    A prompt of 3 tokens, 2 tokens sampled by version 4, a tool reply of 1 token, and 1 token sampled by version 5:

        position     0    1    2    3    4    5    6
        sampled by                  4    4         5     runs      (3, 2, 4), (6, 1, 5)
        row of       4    4    4    4    5    5          row_runs  (4, 4), (2, 5)
    """

    token_ids: Int32Array
    """int32 [t]."""
    runs: tuple[SampledRun, ...]
    """The n tokens in the loss, by position."""
    logprobs: Float32Array
    """float32 [n], behaviour logprobs of the tokens in the loss."""
    rows: ExpertArray | None
    """uint8 or uint16 [r, moe_layers, top_k], the rows of positions 0..r-1; 0 if no engine could give the row, see
    `row_runs`. None without routing."""
    row_runs: tuple[RowRun, ...]
    """The r rows by the version whose forward pass gave them."""
    support: SamplingSupport | None = None
    """t positions, the tokens that the sampler kept; the whole vocabulary outside the loss. None if no token in the
    loss was cut."""
    path: int = 0
    """Number of its path in the trajectory."""
    shared: tuple[SampledRun, ...] = ()
    """Sampled tokens in the turns that its path shares with another, by position; they are in the loss of the other."""
    recomputed: bool = False
    """Whether a resumed request recomputes K/V over these rows (`resume_routing=force`)."""
    teacher: TeacherScores | None = None
    """Scores of the n tokens in the loss by a teacher; None without one."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def routed_experts(self) -> Int16Array | None:
        """int16 [t, moe_layers, top_k], -1 for rows that the trainer's live router decides; None without routing."""
        if self.rows is None:
            return None
        out, at = np.full((len(self), *self.rows.shape[1:]), NOT_ROUTED, np.int16), 0
        for rows, version in self.row_runs:
            if version != NOT_SAMPLED:
                out[at : at + rows] = self.rows[at : at + rows]
            at += rows
        return out


GroupContent = tuple[tuple[TrainingSequence, ...], ...]
"""Training sequences of each trajectory of a group; none for a rollout that failed."""
Content = GroupContent | Awaitable[GroupContent]
"""Content of a group, or a reference that is awaited for it."""


def content_of(group: PromptGroup) -> GroupContent:
    """The content of a finished group; `message_queue.heads.head_of` is the rest."""
    return tuple(() if t.stop_reason is StopReason.ERROR else tuple(t.sequences()) for t in group.trajectories)


def training_sequence(part: SequencePart, *, teacher: TeacherScores | None = None) -> TrainingSequence:
    """The sequence that has the tokens of the part's segments in its loss, with their scores by a teacher."""
    path, length = part.path, part.length
    rows, row_runs = (None, ()) if part.rows is None else part.rows.compact(length)
    return TrainingSequence(
        token_ids=path.token_ids()[:length],
        runs=_runs(part.segments),
        logprobs=np.concatenate([np.zeros(0, np.float32), *(segment.logprobs for _, segment in part.segments)]),
        rows=rows,
        row_runs=row_runs,
        support=_support(part.segments, length=length),
        path=path.path,
        shared=_runs(path.shared_segments),
        recomputed=path.resume_routing == "force",
        teacher=teacher,
    )


def _runs(segments: Sequence[PlacedSegment]) -> tuple[SampledRun, ...]:
    return tuple(
        SampledRun(at, len(segment), segment.weights.version, segment.replica, segment.stop_reason)
        for at, segment in segments
        if len(segment)
    )


def _support(segments: Sequence[PlacedSegment], *, length: int) -> SamplingSupport | None:
    """Of `length` positions, the tokens that the sampler kept; None if it kept all for every token.

    Position t has the set that token t was sampled from, the whole vocabulary if t is not in the loss. Kept sets of a
    prompt of two tokens, a segment of two, a tool reply of one and a segment of one:

        position   0     1     2        3        4     5
        set        all   all   {5, 9}   {7}      all   {5, 6, 7}
    """
    if all(segment.support is None for _, segment in segments):
        return None
    parts: list[SamplingSupport] = []
    end = 0
    for at, segment in segments:
        parts += [SamplingSupport.whole(at - end), segment.support or SamplingSupport.whole(len(segment))]
        end = at + len(segment)
    return SamplingSupport.join([*parts, SamplingSupport.whole(length - end)])
