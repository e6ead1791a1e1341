"""Groups, trajectories and segments as bytes, for crossing a process: compact, checked, copied once.

Rows are the delta rows of the merge rule: each row of a trajectory is sent once, by the segment that owns it. They are
never widened, and the RoutingSpec is not sent: the receiver has it. `wire_format.py` has the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from message_queue.tokens import ExpertArray, RoutedExperts, RoutingSpec, TokenOutput, WeightVersion
from message_queue.trajectory import PromptGroup, Trajectory
from message_queue.wire_format import (
    GROUP,
    SEGMENT,
    TRAJECTORY,
    MessageHead,
    RowsHead,
    SegmentHead,
    TrajectoryHead,
    TurnHead,
    WireError,
    seal,
    unseal,
)

__all__ = [
    "EncodedGroup",
    "EncodedSize",
    "WireError",
    "decode_group",
    "decode_segment",
    "decode_trajectory",
    "encode_group",
    "encode_segment",
    "encode_trajectory",
    "encoded_size",
]

NO_GROUP = (0, 0, 0, 0)


def encode_group(group: PromptGroup) -> bytes:
    """A prompt group, its trajectories closed or not."""
    writer = _Writer()
    trajectories = [writer.trajectory(t) for t in group.trajectories]
    ids = (group.group, group.prompt, group.admitted_version, group.admitted_update)
    return writer.message(GROUP, trajectories, ids=ids)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """One trajectory, closed or not."""
    writer = _Writer()
    return writer.message(TRAJECTORY, [writer.trajectory(trajectory)])


def encode_segment(segment: TokenOutput) -> bytes:
    """One segment with the rows it has."""
    writer = _Writer()
    turn = TurnHead(observation=0, segments=[writer.segment(segment, rows=segment.routed_experts)])
    return writer.message(SEGMENT, [TrajectoryHead(turns=[turn], stop_reason=None, reward=None, info={})])


def decode_group(data: bytes, *, routing: RoutingSpec | None) -> PromptGroup:
    """The group that `encode_group` was given. Its arrays are read-only views of `data`.

    Raises:
        WireError: the bytes are damaged, no group, or have rows that do not fit `routing`.
        ContractError: the content breaks the contract of tokens and trajectories.
    """
    head, payload = unseal(data, kind=GROUP)
    group, prompt, admitted_version, admitted_update = head.ids
    return PromptGroup(
        group=group,
        prompt=prompt,
        admitted_version=admitted_version,
        admitted_update=admitted_update,
        trajectories=_Reader(head, payload, routing).trajectories(),
    )


def decode_trajectory(data: bytes, *, routing: RoutingSpec | None) -> Trajectory:
    """The trajectory that `encode_trajectory` was given; raises as `decode_group` does."""
    head, payload = unseal(data, kind=TRAJECTORY)
    return _Reader(head, payload, routing).trajectories()[0]


def decode_segment(data: bytes, *, routing: RoutingSpec | None) -> TokenOutput:
    """The segment that `encode_segment` was given; raises as `decode_group` does."""
    head, payload = unseal(data, kind=SEGMENT)
    segment = _Reader(head, payload, routing).segment(next(head.segments()))
    if routing is not None and segment.routed_experts is not None:
        segment.routed_experts.check(routing)
    return segment


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSize:
    """Bytes of a message by what they hold. num_tokens: tokens of its trajectories, sampled or not."""

    structure: int
    tokens: int
    logprobs: int
    rows: int
    num_tokens: int

    @property
    def total(self) -> int:
        return self.structure + self.tokens + self.logprobs + self.rows

    def per_token(self) -> dict[str, float]:
        """Part -> bytes per token; NaN where there is no token."""
        parts = {name: getattr(self, name) for name in ("structure", "tokens", "logprobs", "rows", "total")}
        return {name: size / self.num_tokens if self.num_tokens else float("nan") for name, size in parts.items()}


def encoded_size(data: bytes) -> EncodedSize:
    """What the bytes of a message hold.

    Raises:
        WireError: the bytes are damaged.
    """
    head, payload = unseal(data, kind=None)
    num_tokens, sampled = head.num_tokens(), head.num_sampled()
    return EncodedSize(
        structure=len(data) - len(payload),
        tokens=4 * num_tokens,
        logprobs=4 * sampled,
        rows=len(payload) - 4 * (num_tokens + sampled),
        num_tokens=num_tokens,
    )


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A prompt group that stays bytes: the queue reads its head, nobody touches its arrays.

    Raises:
        WireError: the bytes are damaged, or no group.
    """

    data: bytes
    _head: MessageHead = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_head", unseal(self.data, kind=GROUP)[0])

    @property
    def group(self) -> int:
        return self._head.ids[0]

    @property
    def prompt(self) -> int:
        return self._head.ids[1]

    @property
    def admitted_version(self) -> int:
        return self._head.ids[2]

    @property
    def admitted_update(self) -> int:
        return self._head.ids[3]

    @property
    def closed(self) -> bool:
        """Whether every trajectory has its stop reason and reward."""
        trajectories = self._head.trajectories
        return bool(trajectories) and all(t.stop_reason is not None for t in trajectories)

    @property
    def num_segments(self) -> int:
        return sum(1 for _ in self._head.segments())

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return self._head.num_sampled()

    def tokens_per_version(self) -> dict[int, int]:
        """`param_version` -> tokens that it sampled."""
        counts: dict[int, int] = {}
        for segment in self._head.segments():
            if segment.tokens:
                version = self._head.weights[segment.weights][0]
                counts[version] = counts.get(version, 0) + segment.tokens
        return counts


class _Writer:
    """Collects the arrays of one message without copying them, and the names that repeat in it."""

    def __init__(self) -> None:
        self._tokens: list[memoryview] = []
        self._logprobs: list[memoryview] = []
        self._rows: list[memoryview] = []
        self._row_shape: tuple[int, int, int] | None = None
        self._weights: dict[tuple[int, str], int] = {}
        self._replicas: dict[str, int] = {}

    def message(
        self, kind: str, trajectories: Sequence[TrajectoryHead], *, ids: tuple[int, int, int, int] = NO_GROUP
    ) -> bytes:
        head = MessageHead(
            ids=ids,
            row_shape=self._row_shape,
            weights=list(self._weights),
            replicas=list(self._replicas),
            trajectories=list(trajectories),
        )
        return seal(kind, head, [*self._tokens, *self._logprobs, *self._rows])

    def trajectory(self, trajectory: Trajectory) -> TrajectoryHead:
        turns: list[TurnHead] = []
        covered = 0
        for turn in trajectory.turns:
            self._tokens.append(_raw(turn.observation, "<i4"))
            segments: list[SegmentHead] = []
            for segment in turn.segments:
                rows = None if trajectory.routing is None else _uncovered(segment.routed_experts, covered)
                covered = covered if rows is None else rows.end_position
                segments.append(self.segment(segment, rows=rows))
            turns.append(TurnHead(observation=len(turn.observation), segments=segments))
        return TrajectoryHead(
            turns=turns, stop_reason=trajectory.stop_reason, reward=trajectory.reward, info=trajectory.info
        )

    def segment(self, segment: TokenOutput, *, rows: RoutedExperts | None) -> SegmentHead:
        self._tokens.append(_raw(segment.token_ids, "<i4"))
        self._logprobs.append(_raw(segment.logprobs, "<f4"))
        weights = (segment.weights.version, segment.weights.digest)
        return SegmentHead(
            tokens=len(segment),
            weights=self._weights.setdefault(weights, len(self._weights)),
            replica=self._replicas.setdefault(segment.replica, len(self._replicas)),
            stop_reason=segment.stop_reason,
            rows=None if rows is None else self._delta_rows(rows),
        )

    def _delta_rows(self, rows: RoutedExperts) -> RowsHead:
        experts = rows.experts
        shape = (experts.shape[1], experts.shape[2], experts.dtype.itemsize)
        if self._row_shape not in (None, shape):
            raise WireError(f"rows of (moe_layers, top_k, bytes) {shape} after {self._row_shape}; need one shape")
        self._row_shape = shape
        self._rows.append(_raw(experts, f"<u{experts.dtype.itemsize}"))
        return RowsHead(first_position=rows.first_position, count=len(experts), unavailable=rows.unavailable)


def _uncovered(rows: RoutedExperts | None, covered: int) -> RoutedExperts | None:
    """The rows that the merge rule takes: those from the first position not yet covered."""
    if rows is None or rows.first_position >= covered:
        return rows
    if rows.end_position <= covered:
        return RoutedExperts(first_position=covered, experts=rows.experts[:0])
    return RoutedExperts(first_position=covered, experts=rows.experts[covered - rows.first_position :])


def _raw(array: np.ndarray, dtype: str) -> memoryview:
    """The bytes of an array; a copy only where it is not laid out as `dtype`, in one piece."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


class _Reader:
    """Hands out the arrays of a message in order."""

    def __init__(self, head: MessageHead, payload: memoryview, routing: RoutingSpec | None) -> None:
        self._head = head
        self._routing = routing
        num_tokens, sampled = head.num_tokens(), head.num_sampled()
        logprobs_at, rows_at = 4 * num_tokens, 4 * (num_tokens + sampled)
        self._tokens = np.frombuffer(payload[:logprobs_at], "<i4")
        self._logprobs = np.frombuffer(payload[logprobs_at:rows_at], "<f4")
        self._rows = self._row_array(payload[rows_at:])
        self._token_at = self._logprob_at = self._row_at = 0

    def trajectories(self) -> list[Trajectory]:
        return [self._trajectory(head) for head in self._head.trajectories]

    def segment(self, head: SegmentHead) -> TokenOutput:
        version, digest = self._head.weights[head.weights]
        start, self._logprob_at = self._logprob_at, self._logprob_at + head.tokens
        return TokenOutput(
            token_ids=self._next_tokens(head.tokens),
            logprobs=self._logprobs[start : self._logprob_at],
            routed_experts=None if head.rows is None else self._next_rows(head.rows),
            weights=WeightVersion(version, digest),
            stop_reason=head.stop_reason,
            replica=self._head.replicas[head.replica],
        )

    def _trajectory(self, head: TrajectoryHead) -> Trajectory:
        trajectory = Trajectory(routing=self._routing)
        for turn in head.turns:
            trajectory.observe(self._next_tokens(turn.observation))
            for segment in turn.segments:
                trajectory.extend(self.segment(segment))
        if head.stop_reason is not None and head.reward is not None:
            trajectory.close(stop_reason=head.stop_reason, reward=head.reward, info=head.info)
        return trajectory

    def _next_tokens(self, count: int) -> np.ndarray:
        start, self._token_at = self._token_at, self._token_at + count
        return self._tokens[start : self._token_at]

    def _next_rows(self, head: RowsHead) -> RoutedExperts:
        start, self._row_at = self._row_at, self._row_at + head.count
        experts = self._rows[start : self._row_at]
        return RoutedExperts(first_position=head.first_position, experts=experts, unavailable=head.unavailable)

    def _row_array(self, payload: memoryview) -> ExpertArray:
        """uint8 or uint16 [rows, moe_layers, top_k]."""
        if self._head.row_shape is None:
            return np.zeros((0, 1, 1), np.uint8)
        layers, top_k, width = self._head.row_shape
        if self._routing is None or self._routing.row_shape != (layers, top_k):
            expected = None if self._routing is None else self._routing.row_shape
            raise WireError(
                f"message has routing rows of (moe_layers, top_k) {(layers, top_k)}; the receiver's RoutingSpec has "
                f"{expected}: give sender and receiver the same model"
            )
        return np.frombuffer(payload, f"<u{width}").reshape(-1, layers, top_k)
