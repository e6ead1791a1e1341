"""What crosses a process, as bytes: `messages.py` has the calls, `format.py` the layout."""

from __future__ import annotations

from message_queue.wire.format import WireError
from message_queue.wire.messages import (
    EncodedGroup,
    check_rank_code,
    decode_group,
    decode_segment,
    decode_trajectory,
    encode_group,
    encode_segment,
    encode_trajectory,
    pack_group,
    pack_segment,
    unpack_group,
    unpack_segment,
    with_ids,
)
from message_queue.wire.size import EncodedSize, encoded_size

__all__ = [
    "EncodedGroup",
    "EncodedSize",
    "WireError",
    "check_rank_code",
    "decode_group",
    "decode_segment",
    "decode_trajectory",
    "encode_group",
    "encode_segment",
    "encode_trajectory",
    "encoded_size",
    "pack_group",
    "pack_segment",
    "unpack_group",
    "unpack_segment",
    "with_ids",
]
