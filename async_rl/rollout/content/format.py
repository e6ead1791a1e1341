"""Records of appends to trajectories, and their bytes: arrays in a data file and small fields in the index.

The arrays of a segment of 3 tokens with rows 6..8 of 2 MoE layers and top-2 (uint8), and a support of 5 packed bytes:

    token_ids   logprobs    rows                offsets of sets   packed sets
    int32[3]    float32[3]  uint8[3, 2, 2]      int32[4]          uint8[5]
    12 bytes    12 bytes    12 bytes            16 bytes          5 bytes

The small fields are those of the record, with type and shape in the place of each array. Tokens that no policy sampled
are int32[n]; a call, a fork and an end have no arrays. The scores of a teacher have for each sequence logprobs
float32[n], ids int32[n, k] and their logprobs float32[n, k].
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from message_queue.sampling_support import SamplingSupport
from message_queue.sqlite_file import checksum, is_written
from message_queue.tokens import Int32Array, RoutedExperts, StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import TeacherScores, TrajectoryScores

FORMAT = 6  # 5 had arrays without types
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
OBSERVATION = "observation"
KINDS: Mapping[type, str] = {
    TokenOutput: "segment",
    CallStarted: "call",
    Forked: "forked",
    TrajectoryClosed: "closed",
    Scored: "scored",
}
"""Type of a step -> its kind; an array is an `OBSERVATION`."""
ARRAY = 1  # msgpack's code of an array's place


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


def encode(what: RolloutStep) -> tuple[str, bytes, list[memoryview]]:
    """Kind, small fields, and the arrays in the order of their places in the fields; contiguous ones are not copied."""
    arrays: list[memoryview] = []

    def place(array: Any) -> msgspec.msgpack.Ext:
        arrays.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode((array.dtype.str, array.shape)))

    return KINDS.get(type(what), OBSERVATION), msgspec.msgpack.encode(what, enc_hook=place), arrays


def decode(row: IndexRow, arrays: memoryview) -> RolloutStep:
    """The record of bytes whose checksum is right; its arrays are views.

    Raises:
        ValueError: the bytes are of another kind of record.
    """
    start = 0

    def array(_code: int, place: memoryview) -> np.ndarray:
        nonlocal start
        dtype, shape = msgspec.msgpack.decode(place)
        found = np.frombuffer(arrays, dtype, count=math.prod(shape), offset=start).reshape(shape)
        start += found.nbytes
        return found

    fields = msgspec.msgpack.decode(row.fields, ext_hook=array)
    match row.kind:
        case "observation":
            return fields
        case "segment":
            rows, support = fields.pop("routed_experts"), fields.pop("support")
            return TokenOutput(
                token_ids=fields["token_ids"],
                logprobs=fields["logprobs"],
                routed_experts=None if rows is None else RoutedExperts.trusted(**rows),
                weights=WeightVersion(**fields["weights"]),
                stop_reason=StopReason(fields["stop_reason"]),
                replica=fields["replica"],
                support=None if support is None else SamplingSupport(**support),
            )
        case "scored":
            return Scored(scores=tuple(None if each is None else TeacherScores(**each) for each in fields["scores"]))
        case "call" | "forked" | "closed":
            return msgspec.convert(fields, type=next(step for step, kind in KINDS.items() if kind == row.kind))
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
