"""Records of appends to trajectories, and their bytes: arrays in a data file and small fields in the index.

The arrays of a segment of 3 tokens with rows 6..8 of 2 MoE layers and top-2 (uint8), and a support of 5 packed bytes:

    token_ids   logprobs    ends of sets   rows                packed sets
    int32[3]    float32[3]  int32[3]       uint8[3, 2, 2]      uint8[5]
    12 bytes    12 bytes    12 bytes       12 bytes            5 bytes

All are little endian. Tokens that no policy sampled are int32[n]; a call, a fork and an end have no arrays. The scores
of a teacher have for each sequence logprobs float32[n], ids int32[n, k] and their logprobs float32[n, k].
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from message_queue.sampling_support import SamplingSupport
from message_queue.sqlite_file import checksum, is_written
from message_queue.tokens import Int32Array, RoutedExperts, StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import TeacherScores, TrajectoryScores

FORMAT = 5  # 4 had no scores
APPLICATION_ID = 0x41524C43  # "ARLC", in the header of the index
WRITER_TABLE = "CREATE TABLE writer (run TEXT NOT NULL) STRICT"
RECORDS_TABLE = """CREATE TABLE records (
    group_id INTEGER NOT NULL,
    trajectory INTEGER NOT NULL,
    path INTEGER NOT NULL,
    handout INTEGER NOT NULL,
    number INTEGER NOT NULL,
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    fields BLOB NOT NULL,
    file INTEGER NOT NULL,
    start INTEGER NOT NULL,
    length INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    PRIMARY KEY (group_id, trajectory, number)
) STRICT, WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class CallStarted:
    """An outside call that must happen once is about to be made."""

    call: str
    """Text that the agent loop gives the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The path started with the first turns of another one; see `Trajectory.fork`. It is the first record of a path."""

    parent: int
    """Number of the other path."""
    turns: int
    """Number of shared turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryClosed:
    """The trajectory ended with its reward, and all its paths with it."""

    stop_reason: StopReason
    """Stop reason of its last segment; ERROR for a rollout that failed."""
    reward: float
    """Reward of the whole trajectory."""
    rewards: Mapping[str, float] | None = None
    """Agent -> its reward, for the agents that are trained; None trains all paths with `reward`."""
    agents: Mapping[int, str] = field(default_factory=dict[int, str])
    """Number of a path -> its agent, if that is not the policy."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that the agent loop or the task noted."""
    forks: Mapping[int, int] = field(default_factory=dict[int, int])
    """Number of each fork -> its tokens, shared ones included."""
    awaits_scores: bool = False
    """Whether a teacher scores the trajectory; its `Scored` follows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """A teacher scored the closed trajectory."""

    scores: TrajectoryScores
    """Of each sequence."""


RolloutStep: TypeAlias = Int32Array | TokenOutput | CallStarted | Forked | TrajectoryClosed | Scored


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """`what` was appended to a path of a trajectory."""

    group: int
    """Id of the group."""
    trajectory: int
    """Number of the trajectory in its group."""
    handout: int
    """Number of the hand-out of the group to a worker; a later one is greater, also after a restart of the run."""
    at: int
    """Tokens that the path held before; those that it shares if this is its start."""
    what: RolloutStep
    """int32 [n] tokens that no policy sampled, a segment with its rows, a call outside, the start of a fork, the end,
    or the scores after it."""
    path: int = 0
    """Number of the path; 0 is the root."""


class IndexRow(NamedTuple):
    """A row of the index: the place of a record, and its small fields."""

    group: int
    """Id of the group."""
    trajectory: int
    """Number of the trajectory in its group."""
    path: int
    """Number of the path in the trajectory."""
    handout: int
    """Number of the hand-out of the group to the worker that wrote it."""
    number: int
    """Records that the writer wrote up to this one."""
    at: int
    """Tokens that the path held before."""
    kind: str
    """observation, segment, call, forked, closed or scored."""
    fields: bytes
    """The small fields, msgpack."""
    file: int
    """Number of the data file."""
    start: int
    """Offset of its arrays in that file."""
    length: int
    """Bytes of its arrays."""
    checksum: bytes
    """Of all else but file and start, and of the arrays."""


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    """Routing rows of a segment without their experts."""

    first_position: int
    """Absolute position of the first row."""
    unavailable: int
    """Rows before the first that the engine could not give."""
    shape: tuple[int, int, int]
    """Rows, MoE layers, top-k."""
    width: int
    """Bytes of an expert id."""


class _Segment(msgspec.Struct, frozen=True, array_like=True):
    """A segment without its arrays."""

    tokens: int
    """Sampled tokens."""
    version: int
    """`param_version` of its weights."""
    digest: str
    """Content hash of its weights."""
    stop_reason: StopReason
    """Why the decode ended."""
    replica: str
    """Name of the engine replica."""
    rows: _Rows | None
    """None if the segment has no rows."""
    support: int | None
    """Bytes of its packed sets; None if the sampler did not cut the distribution."""


def encode(what: RolloutStep) -> tuple[str, bytes, list[memoryview]]:
    """Kind, small fields, and the arrays without a copy."""
    match what:
        case TokenOutput():
            return "segment", *_encode_segment(what)
        case CallStarted():
            return "call", msgspec.msgpack.encode(what), []
        case Forked():
            return "forked", msgspec.msgpack.encode(what), []
        case TrajectoryClosed():
            return "closed", msgspec.msgpack.encode(what), []
        case Scored():
            return "scored", *_encode_scores(what)
        case _:
            return "observation", b"", [_raw(what, "<i4")]


def decode(row: IndexRow, arrays: memoryview) -> RolloutStep:
    """The record of bytes whose checksum is right; its arrays are views.

    Raises:
        ValueError: the bytes are of another kind of record.
    """
    match row.kind:
        case "observation":
            return np.frombuffer(arrays, "<i4")
        case "segment":
            return _decode_segment(msgspec.msgpack.decode(row.fields, type=_Segment), arrays)
        case "call":
            return msgspec.msgpack.decode(row.fields, type=CallStarted)
        case "forked":
            return msgspec.msgpack.decode(row.fields, type=Forked)
        case "closed":
            return msgspec.msgpack.decode(row.fields, type=TrajectoryClosed)
        case "scored":
            return _decode_scores(msgspec.msgpack.decode(row.fields, type=list[tuple[int, int] | None]), arrays)
        case _:
            raise ValueError(f"no record has the kind {row.kind!r}")


def row_checksum(row: IndexRow, arrays: Sequence[memoryview]) -> bytes:
    """Checksum of a record; `file`, `start` and `checksum` of the row do not matter."""
    return checksum(f"{tuple(row[:6])}{row.kind}".encode(), row.fields, *arrays)


def index_run(index: sqlite3.Connection, path: Path) -> str | None:
    """The run of the content; None if the writer died before its first write.

    Raises:
        JournalFormatError: a foreign file, or one of another format.
        sqlite3.Error: it cannot be read.
    """
    if not is_written(index, path, application=APPLICATION_ID, version=FORMAT):
        return None
    if (row := index.execute("SELECT run FROM writer").fetchone()) is None:
        raise sqlite3.DatabaseError("its run is missing")
    return row[0]


def data_path(directory: Path, name: str, file: int) -> Path:
    """Path of a data file."""
    return directory / f"{name}-{file:06d}.data"


def _encode_segment(segment: TokenOutput) -> tuple[bytes, list[memoryview]]:
    rows, support = segment.routed_experts, segment.support
    fields = _Segment(
        tokens=len(segment),
        version=segment.weights.version,
        digest=segment.weights.digest,
        stop_reason=segment.stop_reason,
        replica=segment.replica,
        rows=None
        if rows is None
        else _Rows(rows.first_position, rows.unavailable, rows.experts.shape, rows.experts.dtype.itemsize),
        support=None if support is None else len(support.packed),
    )
    arrays = [_raw(segment.token_ids, "<i4"), _raw(segment.logprobs, "<f4")]
    if support is not None:
        arrays.append(_raw(support.offsets[1:], "<i4"))
    if rows is not None:
        arrays.append(_raw(rows.experts, f"<u{rows.experts.dtype.itemsize}"))
    if support is not None:
        arrays.append(_raw(support.packed, "<u1"))
    return msgspec.msgpack.encode(fields), arrays


def _decode_segment(fields: _Segment, arrays: memoryview) -> TokenOutput:
    at = 0

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(arrays, dtype, count=count, offset=at)
        at += array.nbytes
        return array

    token_ids, logprobs = take("<i4", fields.tokens), take("<f4", fields.tokens)
    ends = None if fields.support is None else take("<i4", fields.tokens)
    rows = None
    if fields.rows is not None:
        shape = fields.rows.shape
        rows = RoutedExperts.trusted(
            first_position=fields.rows.first_position,
            experts=take(f"<u{fields.rows.width}", shape[0] * shape[1] * shape[2]).reshape(shape),
            unavailable=fields.rows.unavailable,
        )
    support = None
    if ends is not None and fields.support is not None:
        offsets = np.concatenate([np.zeros(1, np.int32), ends])
        support = SamplingSupport(offsets=offsets, packed=take("<u1", fields.support))
    return TokenOutput(
        token_ids=token_ids,
        logprobs=logprobs,
        routed_experts=rows,
        weights=WeightVersion(fields.version, fields.digest),
        stop_reason=fields.stop_reason,
        replica=fields.replica,
        support=support,
    )


def _encode_scores(scored: Scored) -> tuple[bytes, list[memoryview]]:
    """(tokens, k) of each sequence, and the arrays."""
    fields = [None if each is None else (len(each), each.top_k) for each in scored.scores]
    arrays = [
        _raw(array, dtype)
        for each in scored.scores
        if each is not None
        for array, dtype in ((each.logprobs, "<f4"), (each.ids, "<i4"), (each.top_logprobs, "<f4"))
        if array is not None
    ]
    return msgspec.msgpack.encode(fields), arrays


def _decode_scores(fields: list[tuple[int, int] | None], arrays: memoryview) -> Scored:
    at = 0

    def take(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(arrays, dtype, count=math.prod(shape), offset=at).reshape(shape)
        at += array.nbytes
        return array

    scores: list[TeacherScores | None] = []
    for each in fields:
        if each is None:
            scores.append(None)
            continue
        logprobs = take("<f4", each[:1])
        ids, top = (take("<i4", each), take("<f4", each)) if each[1] else (None, None)
        scores.append(TeacherScores(logprobs=logprobs, ids=ids, top_logprobs=top))
    return Scored(scores=tuple(scores))


def _raw(array: np.ndarray, dtype: str) -> memoryview:
    """The bytes of an array; a copy only if it is not contiguous or of another type."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data
