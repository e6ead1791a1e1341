"""Layout of one message: preamble, head, payload. What is in them is written and read by `arrays.py`.

preamble   magic "ARLQ", format, kind, bytes of head and payload, crc32 of all else
head       msgpack: everything but the arrays, and how long each array is; zeros up to a multiple of 8 bytes
payload    token ids (int32), logprobs (float32), ends of kept sets (int32), routing rows (uint8 or uint16, or
           rank-coded), kept token ids (uint8), little endian, in that order

Kept sets are those of `message_queue.support`, of the segments that have any: ends are `offsets[1:]`, ids are `packed`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec

from message_queue.tokens import ContractError, StopReason
from message_queue.trajectory import ResumeRouting

FORMAT = 3
MAGIC = b"ARLQ"
GROUP, TRAJECTORY, SEGMENT = KINDS = ("group", "trajectory", "segment")

_PREAMBLE = struct.Struct("<4sHHIQ")  # magic, format, kind, head bytes, payload bytes
_CRC = struct.Struct("<I")
_BODY = _PREAMBLE.size + _CRC.size
_ALIGNMENT = 8


class WireError(ContractError):
    """Bytes that are not a whole message of this format, or do not fit the receiver's model."""


class RowsHead(msgspec.Struct, frozen=True, array_like=True):
    """Rows `first_position .. first_position + count - 1`; the engine could not give `unavailable` before them.

    replaced: rows after them that are not sent, because a later segment replaces them.
    """

    first_position: int
    count: int
    unavailable: int
    replaced: int


class RowLayout(msgspec.Struct, frozen=True, array_like=True):
    """What all rows of a message are.

    width: bytes of an expert id. num_experts: None where the sender does not know. rank_coded: sets by their rank.
    """

    moe_layers: int
    top_k: int
    width: int
    num_experts: int | None
    rank_coded: bool


class SegmentHead(msgspec.Struct, frozen=True, array_like=True):
    """weights, replica: indices into the lists of the message. support: bytes of its kept token ids; None without."""

    tokens: int
    weights: int
    replica: int
    stop_reason: StopReason
    rows: RowsHead | None
    support: int | None


class TurnHead(msgspec.Struct, frozen=True, array_like=True):
    """observation: number of its tokens."""

    observation: int
    segments: list[SegmentHead]


class TrajectoryHead(msgspec.Struct, frozen=True, array_like=True):
    """stop_reason and reward are None while the trajectory is open."""

    resume_routing: ResumeRouting
    turns: list[TurnHead]
    stop_reason: StopReason | None
    reward: float | None
    info: dict[str, float]


class MessageHead(msgspec.Struct, frozen=True, array_like=True):
    """ids: group, prompt, admitted_version, admitted_update; zeros where there is no group.

    row_layout: None without rows. weights: (version, digest).
    """

    ids: tuple[int, int, int, int]
    row_layout: RowLayout | None
    weights: list[tuple[int, str]]
    replicas: list[str]
    trajectories: list[TrajectoryHead]

    def segments(self) -> Iterator[SegmentHead]:
        """All segments in the order of their arrays."""
        return (segment for t in self.trajectories for turn in t.turns for segment in turn.segments)

    def num_sampled(self) -> int:
        """Sampled tokens, each with a logprob."""
        return sum(segment.tokens for segment in self.segments())

    def num_tokens(self) -> int:
        """All tokens."""
        return self.num_sampled() + sum(turn.observation for t in self.trajectories for turn in t.turns)

    def num_supported(self) -> int:
        """Sampled tokens with a kept set."""
        return sum(segment.tokens for segment in self.segments() if segment.support is not None)

    def num_support_bytes(self) -> int:
        """Bytes of the kept token ids."""
        return sum(segment.support or 0 for segment in self.segments())

    def num_rows(self) -> int:
        """Routing rows in the payload."""
        return sum(segment.rows.count for segment in self.segments() if segment.rows is not None)


def seal(kind: str, head: MessageHead, payload: Sequence[memoryview]) -> bytes:
    """One message; the only copy of the arrays is made here."""
    encoded = msgspec.msgpack.encode(head)
    preamble = _PREAMBLE.pack(MAGIC, FORMAT, KINDS.index(kind), len(encoded), sum(part.nbytes for part in payload))
    body = [encoded, bytes(-len(encoded) % _ALIGNMENT), *payload]
    crc = zlib.crc32(preamble)
    for part in body:
        crc = zlib.crc32(part, crc)
    return b"".join([preamble, _CRC.pack(crc), *body])


def unseal(data: bytes, *, kind: str | None) -> tuple[MessageHead, memoryview]:
    """Head and payload of a message.

    Args:
        kind: what is expected; None for any.

    Raises:
        WireError: not a message of this format and kind, cut, or damaged; the message says which.
    """
    if len(data) < _BODY:
        raise WireError(f"message has {len(data)} bytes; the preamble alone has {_BODY}: it was cut")
    magic, found_format, found_kind, head_size, payload_size = _PREAMBLE.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"message starts with {magic!r}, not {MAGIC!r}; it is no message of the queue, or damaged")
    if found_format != FORMAT:
        raise WireError(f"message has format {found_format}, this program reads {FORMAT}; run one version everywhere")
    payload_at = _BODY + head_size + -head_size % _ALIGNMENT
    if len(data) != payload_at + payload_size:
        raise WireError(f"message has {len(data)} bytes, its preamble says {payload_at + payload_size}: it was cut")
    view = memoryview(data)
    (crc,) = _CRC.unpack_from(data, _PREAMBLE.size)
    if zlib.crc32(view[_BODY:], zlib.crc32(view[: _PREAMBLE.size])) != crc:
        raise WireError(f"message of {len(data)} bytes is damaged: its checksum is not {crc:#010x}")
    if kind is not None and KINDS[found_kind] != kind:
        raise WireError(f"message is a {KINDS[found_kind]}; a {kind} is read here")
    try:
        return msgspec.msgpack.decode(view[_BODY : _BODY + head_size], type=MessageHead), view[payload_at:]
    except msgspec.MsgspecError as error:
        raise WireError(f"head of a {KINDS[found_kind]} message cannot be read: {error}") from error
