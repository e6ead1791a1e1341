"""The arrays of one message: collected without copies on the way out, handed out as views on the way in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from message_queue.support import SamplingSupport
from message_queue.tokens import ExpertArray, RoutedExperts, RoutingSpec, TokenOutput, WeightVersion
from message_queue.trajectory import Trajectory
from message_queue.wire.format import (
    MessageHead,
    RowLayout,
    RowsHead,
    SegmentHead,
    TrajectoryHead,
    TurnHead,
    WireError,
    seal,
)
from message_queue.wire.packed import Buffers, Packed
from message_queue.wire.rank_code import RankCode

NO_GROUP = (0, 0, 0, 0)


class MessageWriter:
    """Collects the arrays of one message without copying them, and the names that repeat in it.

    Args:
        rank_coded: send expert sets by their rank.
    """

    def __init__(self, *, rank_coded: bool) -> None:
        self._rank_coded = rank_coded
        self._tokens: list[memoryview] = []
        self._logprobs: list[memoryview] = []
        self._set_ends: list[memoryview] = []
        self._kept_ids: list[memoryview] = []
        self._rows: list[ExpertArray] = []
        self._layout: RowLayout | None = None
        self._weights: dict[tuple[int, str], int] = {}
        self._replicas: dict[str, int] = {}

    def message(
        self, kind: str, trajectories: Sequence[TrajectoryHead], *, ids: tuple[int, int, int, int] = NO_GROUP
    ) -> bytes:
        """The message of everything collected."""
        before, after = [*self._tokens, *self._logprobs, *self._set_ends], self._kept_ids
        return seal(kind, self._head(trajectories, ids), [*before, *self._encoded_rows(), *after])

    def packed(
        self, kind: str, trajectories: Sequence[TrajectoryHead], *, ids: tuple[int, int, int, int] = NO_GROUP
    ) -> Packed:
        """The same with its arrays apart. Rows are not copied; what is small beside them is put together."""
        before = (b"".join(self._tokens), b"".join(self._logprobs), b"".join(self._set_ends))
        parts = (*before, *self._encoded_rows(), b"".join(self._kept_ids))
        buffers = tuple(np.frombuffer(part, np.uint8) for part in parts)
        return Packed(seal(kind, self._head(trajectories, ids), []), buffers)

    def _head(self, trajectories: Sequence[TrajectoryHead], ids: tuple[int, int, int, int]) -> MessageHead:
        return MessageHead(
            ids=ids,
            row_layout=self._layout,
            weights=list(self._weights),
            replicas=list(self._replicas),
            trajectories=list(trajectories),
        )

    def trajectory(self, trajectory: Trajectory) -> TrajectoryHead:
        """Collect a trajectory."""
        turns: list[TurnHead] = []
        rows = iter(_rows_to_send(trajectory))
        for turn in trajectory.turns:
            self._tokens.append(_raw(turn.observation, "<i4"))
            segments = [self._segment(s, *next(rows), trajectory.routing) for s in turn.segments]
            turns.append(TurnHead(observation=len(turn.observation), segments=segments))
        return TrajectoryHead(
            resume_routing=trajectory.resume_routing,
            turns=turns,
            stop_reason=trajectory.stop_reason,
            reward=trajectory.reward,
            info=trajectory.info,
        )

    def segment(self, segment: TokenOutput, *, rows: RoutedExperts | None, routing: RoutingSpec | None) -> SegmentHead:
        """Collect a segment, of its rows only `rows`."""
        return self._segment(segment, rows, 0, routing)

    def _segment(
        self, segment: TokenOutput, rows: RoutedExperts | None, replaced: int, routing: RoutingSpec | None
    ) -> SegmentHead:
        self._tokens.append(_raw(segment.token_ids, "<i4"))
        self._logprobs.append(_raw(segment.logprobs, "<f4"))
        if segment.support is not None:
            self._set_ends.append(_raw(segment.support.offsets[1:], "<i4"))
            self._kept_ids.append(_raw(segment.support.packed, "<u1"))
        weights = (segment.weights.version, segment.weights.digest)
        return SegmentHead(
            tokens=len(segment),
            weights=self._weights.setdefault(weights, len(self._weights)),
            replica=self._replicas.setdefault(segment.replica, len(self._replicas)),
            stop_reason=segment.stop_reason,
            rows=None if rows is None else self._take_rows(rows, replaced, routing),
            support=None if segment.support is None else len(segment.support.packed),
        )

    def _take_rows(self, rows: RoutedExperts, replaced: int, routing: RoutingSpec | None) -> RowsHead:
        experts = rows.experts
        if self._rank_coded and routing is None:
            raise WireError("rank coding of a segment's rows needs the RoutingSpec; give `routing`")
        layout = RowLayout(
            moe_layers=experts.shape[1],
            top_k=experts.shape[2],
            width=experts.dtype.itemsize,
            num_experts=None if routing is None else routing.num_experts,
            rank_coded=self._rank_coded,
        )
        if self._layout not in (None, layout):
            raise WireError(f"rows of {layout} after {self._layout}; a message holds rows of one model")
        self._layout = layout
        self._rows.append(experts)
        return RowsHead(
            first_position=rows.first_position, count=len(experts), unavailable=rows.unavailable, replaced=replaced
        )

    def _encoded_rows(self) -> list[memoryview]:
        layout = self._layout
        if layout is None or not layout.rank_coded:
            return [_raw(experts, f"<u{experts.dtype.itemsize}") for experts in self._rows]
        sets = np.concatenate([experts.reshape(-1, layout.top_k) for experts in self._rows])
        return [_rank_code(layout.num_experts, layout.top_k).encode(sets).data]


def _rows_to_send(trajectory: Trajectory) -> Iterator[tuple[RoutedExperts | None, int]]:
    """For each segment the rows that the merge took of it, and how many after them a later segment replaced."""
    if trajectory.routing is None:
        yield from ((None, 0) for _ in trajectory.segments)
        return
    match trajectory.resume_routing:
        case "append" | "force":
            yield from ((rows, 0) for rows in _uncovered(trajectory, keep_empty=True, whole=()))
        case "split":
            starts = trajectory.sequence_starts[1:]
            yield from ((rows, 0) for rows in _uncovered(trajectory, keep_empty=False, whole=starts))
        case "replace":
            yield from _surviving(trajectory)


def _uncovered(trajectory: Trajectory, *, keep_empty: bool, whole: Sequence[int]) -> Iterator[RoutedExperts | None]:
    """Rows from the first position not yet covered; all rows of the segments numbered in `whole`.

    keep_empty: segments without tokens bring rows too.
    """
    covered = 0
    for number, segment in enumerate(trajectory.segments):
        rows = segment.routed_experts
        if rows is None or not (len(segment) or keep_empty):
            yield None
            continue
        if number not in whole and rows.first_position < covered:
            rows = rows.since(covered)
        covered = rows.end_position
        yield rows


def _surviving(trajectory: Trajectory) -> Iterator[tuple[RoutedExperts | None, int]]:
    """Rows that no later segment replaced, and how many were."""
    sent: list[tuple[RoutedExperts | None, int]] = []
    position = replaced_from = len(trajectory)
    for turn in reversed(trajectory.turns):
        for segment in reversed(turn.segments):
            rows, end = segment.routed_experts, position - 1
            position -= len(segment)
            if rows is None or not len(segment):
                sent.append((None, 0))
                continue
            kept = rows.before(replaced_from)
            sent.append((kept, end - kept.end_position))  # a trajectory that was read back holds no more than is left
            replaced_from = min(replaced_from, rows.first_position)
        position -= len(turn.observation)
    yield from reversed(sent)


def _raw(array: np.ndarray, dtype: str) -> memoryview:
    """The bytes of an array; a copy only where it is not laid out as `dtype`, in one piece."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


@lru_cache(maxsize=8)
def _rank_code(num_experts: int | None, top_k: int) -> RankCode:
    """A code is made in milliseconds, which is long for a small message."""
    assert num_experts is not None
    return RankCode(num_experts=num_experts, top_k=top_k)


class MessageReader:
    """Hands out the arrays of a message in order.

    Rows are not looked at for experts that are named twice: those of the sender were, and nothing changed since.

    Args:
        payload: all arrays in one piece, or the buffers of a `Packed`.

    Raises:
        WireError: rows that are not of the receiver's model, or arrays that are not as long as the head says.
    """

    def __init__(self, head: MessageHead, payload: memoryview | Buffers, routing: RoutingSpec | None) -> None:
        self._head = head
        self._routing = routing
        num_tokens, sampled = head.num_tokens(), head.num_sampled()
        supported, kept_bytes = head.num_supported(), head.num_support_bytes()
        if isinstance(payload, memoryview):
            cuts = np.cumsum([0, 4 * num_tokens, 4 * sampled, 4 * supported]).tolist()
            cuts += [max(cuts[-1], len(payload) - kept_bytes), len(payload)]
            tokens, logprobs, ends, rows, kept = (payload[start:stop] for start, stop in pairwise(cuts))
            pieces = [rows]
        else:
            tokens, logprobs, ends, *pieces, kept = payload
        sizes = (len(tokens), len(logprobs), len(ends), len(kept))
        if sizes != (4 * num_tokens, 4 * sampled, 4 * supported, kept_bytes):
            raise WireError(
                f"message has {sizes[0]} bytes of tokens, {sizes[1]} of logprobs, {sizes[2]} of set ends and "
                f"{sizes[3]} of kept ids; its head says {num_tokens} tokens, {sampled} sampled, {supported} with a "
                f"kept set, and {kept_bytes} bytes of kept ids"
            )
        self._tokens = np.frombuffer(tokens, "<i4")
        self._logprobs = np.frombuffer(logprobs, "<f4")
        self._set_ends = np.frombuffer(ends, "<i4")
        self._kept_ids = np.frombuffer(kept, np.uint8)
        self._rows = iter(list(self._row_arrays(pieces)))
        self._token_at = self._logprob_at = self._set_at = self._kept_at = 0

    def trajectories(self) -> list[Trajectory]:
        """All of them."""
        return [self._trajectory(head) for head in self._head.trajectories]

    def segment(self, head: SegmentHead) -> TokenOutput:
        """The next segment."""
        version, digest = self._head.weights[head.weights]
        start, self._logprob_at = self._logprob_at, self._logprob_at + head.tokens
        return TokenOutput(
            token_ids=self._next_tokens(head.tokens),
            logprobs=self._logprobs[start : self._logprob_at],
            routed_experts=None if head.rows is None else self._next_rows(head.rows),
            weights=WeightVersion(version, digest),
            stop_reason=head.stop_reason,
            replica=self._head.replicas[head.replica],
            support=None if head.support is None else self._next_support(head.tokens, head.support),
        )

    def _trajectory(self, head: TrajectoryHead) -> Trajectory:
        trajectory = Trajectory(routing=self._routing, resume_routing=head.resume_routing)
        for turn in head.turns:
            trajectory.observe(self._next_tokens(turn.observation))
            for segment in turn.segments:
                replaced = 0 if segment.rows is None else segment.rows.replaced
                trajectory.extend(self.segment(segment), rows_replaced=replaced)
        if head.stop_reason is not None and head.reward is not None:
            trajectory.close(stop_reason=head.stop_reason, reward=head.reward, info=head.info)
        return trajectory

    def _next_tokens(self, count: int) -> np.ndarray:
        start, self._token_at = self._token_at, self._token_at + count
        return self._tokens[start : self._token_at]

    def _next_support(self, count: int, kept_bytes: int) -> SamplingSupport:
        at, self._set_at = self._set_at, self._set_at + count
        start, self._kept_at = self._kept_at, self._kept_at + kept_bytes
        offsets = np.concatenate([np.zeros(1, np.int32), self._set_ends[at : self._set_at]])
        return SamplingSupport(offsets=offsets, packed=self._kept_ids[start : self._kept_at])

    def _next_rows(self, head: RowsHead) -> RoutedExperts:
        return RoutedExperts.trusted(
            first_position=head.first_position, experts=next(self._rows), unavailable=head.unavailable
        )

    def _row_arrays(self, pieces: Sequence[memoryview] | Sequence[NDArray[np.uint8]]) -> Iterator[ExpertArray]:
        """uint8 or uint16 [rows, moe_layers, top_k] of each segment that has rows, from one piece or one for each."""
        layout = self._head.row_layout
        if layout is None:
            return
        self._check_layout(layout)
        counts = [segment.rows.count for segment in self._head.segments() if segment.rows is not None]
        if len(pieces) == 1:
            counts, whole = [sum(counts)], counts
        else:
            whole = None
        if len(pieces) != len(counts):
            raise WireError(f"message has rows in {len(pieces)} pieces; its head says {len(counts)}")
        arrays = [self._row_array(piece, count, layout) for piece, count in zip(pieces, counts, strict=True)]
        if whole is not None:
            arrays = np.split(arrays[0], np.cumsum(whole)[:-1])
        yield from arrays

    def _row_array(self, piece: memoryview | NDArray[np.uint8], rows: int, layout: RowLayout) -> ExpertArray:
        shape = (rows, layout.moe_layers, layout.top_k)
        if layout.rank_coded:
            sets = _rank_code(layout.num_experts, layout.top_k).decode(
                np.frombuffer(piece, np.uint8), math.prod(shape[:2])
            )
            return sets.reshape(shape)
        if len(piece) != math.prod(shape) * layout.width:
            raise WireError(f"message has {len(piece)} bytes of rows; its head says {shape} of {layout.width} bytes")
        return np.frombuffer(piece, f"<u{layout.width}").reshape(shape)

    def _check_layout(self, layout: RowLayout) -> None:
        sent = (layout.moe_layers, layout.top_k, layout.num_experts)
        spec = self._routing
        known = None if spec is None else (*spec.row_shape, layout.num_experts and spec.num_experts)
        if sent != known:
            raise WireError(
                f"message has routing rows of (moe_layers, top_k, num_experts) {sent}; the receiver's RoutingSpec has "
                f"{known}: give sender and receiver the same model"
            )
