"""Layout of the journal on disk. What the records mean is in `state.py`.

file     header (magic, format, number of the file, sequence number of its first record, run, crc32), a Summary record,
         then records; a file is named after its number
record   header (magic, kind, trajectory, sizes, number within its group, sequence number, group, crc32 of the body,
         crc32 of the header), head (msgpack), payload (arrays, as in a message of the queue); zeros up to a multiple
         of 8 bytes after the head and after the payload

The checksum of a record's header starts from the run and the number of the file, so that bytes of another file are no
record of this one. A segment's head and payload are those of its wire message: `wire/format.py` has them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from message_queue.journal.errors import JournalFormatError, JournalRunError
from message_queue.journal.records import KINDS, Body, Observed, Sampled
from message_queue.tokens import ContractError, Int32Array, TokenOutput
from message_queue.wire.arrays import NO_GROUP as NO_IDS
from message_queue.wire.format import (
    SEGMENT,
    MessageHead,
    RowLayout,
    RowsHead,
    SegmentHead,
    TrajectoryHead,
    TurnHead,
    unseal,
)
from message_queue.wire.packed import Packed

FORMAT = 2
FILE_MAGIC = b"ARLJOURN"
RECORD_MAGIC = b"ARLR"
ALIGNMENT = 8
MAX_RUN_BYTES = 64
MAX_TRAJECTORIES = 1 << 16
NO_GROUP = -1

_FILE = struct.Struct("<8sIIQQ64s")  # magic, format, header bytes, number, first sequence number, run
_RECORD = struct.Struct("<4sHHIIQQqI")  # magic, kind, trajectory, head bytes, number, body bytes, sequence, group, crc
_CRC = struct.Struct("<I")
FILE_BYTES = _FILE.size + ALIGNMENT
RECORD_BYTES = _RECORD.size + _CRC.size


_DECODERS = {kind: msgspec.msgpack.Decoder(kind) for kind in KINDS}


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What is to be recorded. payload: the arrays, not copied before they are written."""

    body: Body
    group: int = NO_GROUP
    trajectory: int = 0
    payload: tuple[memoryview, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About what it takes."""
        return RECORD_BYTES + sum(part.nbytes for part in self.payload)


class RecordHeader(NamedTuple):
    """number: of the record among those with the content of its group, from 0. size: bytes of the record in all."""

    kind: type[Body]
    trajectory: int
    head_bytes: int
    number: int
    body_bytes: int
    seq: int
    group: int
    body_crc: int

    @property
    def size(self) -> int:
        return RECORD_BYTES + padded(self.body_bytes)


def padded(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return size + -size % ALIGNMENT


def file_seed(run: str, number: int) -> int:
    """Where the checksums of the record headers of a file start."""
    return zlib.crc32(number.to_bytes(8, "little"), zlib.crc32(run.encode()))


def pack_file_header(*, run: str, number: int, first_seq: int) -> bytes:
    """The first FILE_BYTES of a file."""
    head = _FILE.pack(FILE_MAGIC, FORMAT, FILE_BYTES, number, first_seq, run.encode())
    return (head + _CRC.pack(zlib.crc32(head))).ljust(FILE_BYTES, b"\0")


def read_file_header(data: memoryview, *, run: str, path: str) -> int | None:
    """Sequence number of the first record of a file; None where the header is cut or damaged.

    Raises:
        JournalFormatError, JournalRunError: it is whole, and of another format or run.
    """
    if not _is_header(data):
        return None
    _, found_format, _, _, first_seq, _ = _FILE.unpack_from(data)
    if found_format != FORMAT:
        raise JournalFormatError(
            f"journal file {path} has format {found_format}, this program reads {FORMAT}; "
            "continue the run with the program that began it, or move the journal away"
        )
    if (name := read_run(data)) != run:
        raise JournalRunError(
            f"journal file {path} is of run {name!r}, this run is {run!r}; "
            "give output_dir a directory of its own, or move the journal away"
        )
    return first_seq


def read_run(data: memoryview) -> str | None:
    """Run of a file; None where its header is cut or damaged."""
    return _FILE.unpack_from(data)[-1].rstrip(b"\0").decode(errors="replace") if _is_header(data) else None


def _is_header(data: memoryview) -> bool:
    if len(data) < FILE_BYTES or _FILE.unpack_from(data)[0] != FILE_MAGIC:
        return False
    return zlib.crc32(data[: _FILE.size]) == _CRC.unpack_from(data, _FILE.size)[0]


def pack_record(entry: Entry, *, seq: int, number: int, seed: int) -> list[bytes | memoryview]:
    """The bytes of a record in pieces; the payload is not copied."""
    head = msgspec.msgpack.encode(entry.body)
    body = [head, bytes(-len(head) % ALIGNMENT), *entry.payload]
    crc, size = 0, 0
    for part in body:
        crc, size = zlib.crc32(part, crc), size + len(part)
    kind = KINDS.index(type(entry.body))
    header = _RECORD.pack(RECORD_MAGIC, kind, entry.trajectory, len(head), number, size, seq, entry.group, crc)
    sealed = header + _CRC.pack(zlib.crc32(header, seed))
    return [part for part in (sealed, *body, bytes(-size % ALIGNMENT)) if len(part)]


def read_header(data: memoryview, offset: int, *, seed: int) -> RecordHeader | None:
    """The record header at `offset`; None where there is none that is whole."""
    if offset + RECORD_BYTES > len(data) or bytes(data[offset : offset + 4]) != RECORD_MAGIC:
        return None
    (crc,) = _CRC.unpack_from(data, offset + _RECORD.size)
    if zlib.crc32(data[offset : offset + _RECORD.size], seed) != crc:
        return None
    _, kind, trajectory, head_bytes, number, body_bytes, seq, group, body_crc = _RECORD.unpack_from(data, offset)
    return RecordHeader(KINDS[kind], trajectory, head_bytes, number, body_bytes, seq, group, body_crc)


def read_body(data: memoryview, offset: int, header: RecordHeader) -> Entry | None:
    """The record at `offset`, its payload a view of `data`; None where it is cut or damaged."""
    start, end = offset + RECORD_BYTES, offset + RECORD_BYTES + header.body_bytes
    if offset + header.size > len(data) or zlib.crc32(data[start:end]) != header.body_crc:
        return None
    body = _DECODERS[header.kind].decode(data[start : start + header.head_bytes])
    payload = data[start + padded(header.head_bytes) : end]
    return Entry(body, group=header.group, trajectory=header.trajectory, payload=(payload,))


def observation_entry(group: int, trajectory: int, token_ids: Int32Array, *, at: int) -> Entry:
    """int32 [n] tokens that no policy sampled.

    Raises:
        ContractError: wrong dtype or shape.
    """
    if token_ids.ndim != 1 or token_ids.dtype != np.int32:
        raise ContractError(f"observation is {token_ids.dtype}{list(token_ids.shape)}; need int32[n]")
    body = Observed(at, len(token_ids))
    return Entry(body, group=group, trajectory=trajectory, payload=(_raw(token_ids, "<i4"),))


def segment_entry(
    group: int, trajectory: int, segment: TokenOutput | Packed | bytes | memoryview, *, at: int, rows_held: int
) -> Entry:
    """A segment, or its wire message; of the rows of a segment those from position `rows_held` on.

    Raises:
        WireError: bytes that are no whole message of a segment.
    """
    if isinstance(segment, TokenOutput):
        message, payload = _segment_message(segment, rows_held=rows_held)
    elif isinstance(segment, Packed):
        message, _ = unseal(segment.head, kind=SEGMENT)
        payload = tuple(buffer.data for buffer in segment.buffers)
    else:
        message, view = unseal(segment, kind=SEGMENT)  # pyright: ignore[reportArgumentType] # it takes any buffer
        payload = (view,)
    return Entry(Sampled(at, message), group=group, trajectory=trajectory, payload=payload)


def _segment_message(segment: TokenOutput, *, rows_held: int) -> tuple[MessageHead, tuple[memoryview, ...]]:
    """Head and payload of the wire message of a segment, its arrays as views."""
    rows = None if segment.routed_experts is None else segment.routed_experts.since(rows_held)
    payload: Sequence[memoryview] = [_raw(segment.token_ids, "<i4"), _raw(segment.logprobs, "<f4")]
    if segment.support is not None:
        payload = [*payload, _raw(segment.support.offsets[1:], "<i4")]
    layout = rows_head = None
    if rows is not None:
        width = rows.experts.dtype.itemsize
        layout = RowLayout(rows.experts.shape[1], rows.experts.shape[2], width, None, False)
        rows_head = RowsHead(rows.first_position, len(rows.experts), rows.unavailable, 0)
        payload = [*payload, _raw(rows.experts, f"<u{width}")]
    if segment.support is not None:
        payload = [*payload, _raw(segment.support.packed, "<u1")]
    support = None if segment.support is None else len(segment.support.packed)
    turn = TurnHead(0, [SegmentHead(len(segment), 0, 0, segment.stop_reason, rows_head, support)])
    weights = [(segment.weights.version, segment.weights.digest)]
    trajectory = TrajectoryHead("append", [turn], None, None, {})
    return MessageHead(NO_IDS, layout, weights, [segment.replica], [trajectory]), tuple(payload)


def _raw(array: np.ndarray, dtype: str) -> memoryview:
    """The bytes of an array; a copy only where it is not laid out as `dtype`, in one piece."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data
