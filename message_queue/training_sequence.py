"""Training sequences: the input of one forward pass of the trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from message_queue.routing_rows import NOT_ROUTED, NOT_SAMPLED, Int16Array, RowRun, TrajectoryRows
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import ExpertArray, Float32Array, Int32Array, StopReason, TokenOutput

if TYPE_CHECKING:
    from message_queue.trajectory import PromptGroup

BoolArray = NDArray[np.bool_]


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
    return tuple(
        ()
        if trajectory.stop_reason is StopReason.ERROR
        else tuple(
            replace(sequence, recomputed=trajectory.resume_routing == "force") for sequence in trajectory.sequences()
        )
        for trajectory in group.trajectories
    )


def training_sequence(
    segments: Sequence[tuple[int, TokenOutput]],
    *,
    token_ids: Int32Array,
    rows: TrajectoryRows | None,
    path: int = 0,
    shared: Sequence[tuple[int, TokenOutput]] = (),
) -> TrainingSequence:
    """The sequence that has the tokens of `segments` in its loss.

    Args:
        segments: (position of its first token, segment with tokens), in order.
        token_ids: int32 [t], tokens of the sequence.
        rows: rows over which the segments were decoded; None without routing.
        path: number of its path in the trajectory.
        shared: as `segments`, those of the turns that the path shares with another.
    """
    experts, row_runs = (None, ()) if rows is None else rows.compact(len(token_ids))
    return TrainingSequence(
        token_ids=token_ids,
        runs=_runs(segments),
        logprobs=np.concatenate([np.zeros(0, np.float32), *(segment.logprobs for _, segment in segments)]),
        rows=experts,
        row_runs=row_runs,
        support=_support(segments, length=len(token_ids)),
        path=path,
        shared=_runs(shared),
    )


def _runs(segments: Sequence[tuple[int, TokenOutput]]) -> tuple[SampledRun, ...]:
    """Runs of placed segments with tokens."""
    return tuple(
        SampledRun(at, len(segment), segment.weights.version, segment.replica, segment.stop_reason)
        for at, segment in segments
    )


def _support(segments: Sequence[tuple[int, TokenOutput]], *, length: int) -> SamplingSupport | None:
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
