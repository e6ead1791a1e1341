"""Lossless delta of the tensors of a bucket against the same tensors of an earlier version.

Bit patterns are compared as integers. For example, the second and the fifth of five bfloat16 values change:

    base      0.5   1.0      0.25   2.0   -0.5
    new       0.5   1.0078   0.25   2.0   -0.498
    gaps            1                      2        unchanged values before each changed one
    steps           +1                     -1       units in the last place, away from zero
    codes           2                      1        zigzag of the steps: -1, +1, -2, +2 -> 1, 2, 3, 4

Gaps are bytes: 255 means 255 and the next byte. Codes have the size of a value; their first bytes precede their second
ones. Both streams are compressed with zstandard. The layout is

    magic, xxh3_128 of the rest; then, each after its length: header, gaps, codes, dense tensors
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray
from xxhash import xxh3_128

from async_rl.weights.digest import bytes_of
from message_queue.errors import AsyncRLError

if TYPE_CHECKING:
    import torch

MAX_CHANGED = 1 / 3
"""A tensor travels dense if a larger fraction of its values changed."""
_MAGIC = b"async_rl delta 1"
_BODY = len(_MAGIC) + 16  # where the part under the check starts
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 20  # values that are encoded at a time; bounds the memory of their positions
_SKIP = 255  # as a gap: this many unchanged values, then another gap
# The streams are noise with a skewed histogram: a short match takes more bytes than entropy coding.
_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)

Bytes = NDArray[np.uint8]
Integers = NDArray[Any]


class DeltaError(AsyncRLError):
    """Encoded data is damaged, or its base is another one."""


class _Tensor(msgspec.Struct, array_like=True):
    """A tensor in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: list[int] | None
    """Bytes of gaps of each `_PIECE` values; None if the tensor is dense."""


class _Header(msgspec.Struct, array_like=True):
    base_digest: str
    tensors: list[_Tensor]


def encode(tensors: Sequence[tuple[str, torch.Tensor]], *, base: Mapping[str, torch.Tensor], base_digest: str) -> bytes:
    """Encode tensors as a delta against the base.

    Args:
        tensors: (name, CPU tensor of any dtype and shape).
        base: name -> CPU tensor of the base version, with equal dtype and shape. Other tensors are ignored.
        base_digest: `WeightsDigest.hexdigest()` of the base.

    Returns:
        The input of `decode`. A dense tensor takes its own size in bytes, the others take less.

    Raises:
        ValueError: the base has no tensor of that name, dtype and shape.
    """
    header, dense, streams = _Header(base_digest, []), list[Bytes](), (bytearray(), bytearray())
    for name, tensor in tensors:
        found = _kind(base[name]) if name in base else "no such tensor"
        if found != _kind(tensor):
            raise ValueError(f"{name} is {_kind(tensor)}, but the base has {found}; publish the bucket without a base")
        old, new = _bits(base[name]), _bits(tensor)
        pieces = _write_changes(streams, old, new)
        header.tensors.append(_Tensor(name, *_kind(tensor), pieces))
        if pieces is None:
            dense.append(new.view(np.uint8))
    compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
    parts: list[Any] = []
    for part in (msgspec.msgpack.encode(header), *streams):
        compressed = compressor.compress(part)
        parts += [_LENGTH.pack(len(compressed)), compressed]
    parts += [_LENGTH.pack(sum(part.nbytes for part in dense)), *(part.data for part in dense)]
    check = xxh3_128()
    for part in parts:
        check.update(part)
    return b"".join([_MAGIC, check.digest(), *parts])


def decode(data: bytes, *, base: Mapping[str, torch.Tensor], base_digest: str) -> list[tuple[str, torch.Tensor]]:
    """Decode the tensors that `encode` got, bit by bit.

    Args:
        data: result of `encode`.
        base: name -> CPU tensor of the base version; not modified.
        base_digest: `WeightsDigest.hexdigest()` of the base; the caller has verified it.

    Returns:
        (name, contiguous CPU tensor with its own memory), in the order of `encode`.

    Raises:
        DeltaError: the data is truncated, damaged or not from `encode`, or its base is another one.
    """
    body = memoryview(data)[_BODY:]
    if data[:_BODY] != _MAGIC + xxh3_128(body).digest():
        raise DeltaError(f"{len(data)} bytes are not a whole delta: truncated, damaged, or of another format")
    packed, decompressor = _Reader(body), zstandard.ZstdDecompressor()
    head, gaps, codes = (_Reader(decompressor.decompress(packed.take_part())) for _ in range(3))
    dense = _Reader(packed.take_part())
    header = msgspec.msgpack.decode(head.rest, type=_Header)
    if header.base_digest != base_digest:
        raise DeltaError(f"wrong base: the delta is against {header.base_digest}, but the base is {base_digest}")
    tensors: list[tuple[str, torch.Tensor]] = []
    for tensor in header.tensors:
        old = base.get(tensor.name)
        if old is None or _kind(old) != (tensor.dtype, tensor.shape):
            raise DeltaError(f"wrong base: it has no {tensor.name} of {tensor.dtype} {tensor.shape}")
        new = old.new_empty(old.shape)
        if tensor.pieces is None:
            _bits(new).view(np.uint8)[:] = np.frombuffer(dense.take(new.nbytes), np.uint8)
        else:
            new.copy_(old.detach())
            _apply_changes((gaps, codes), tensor.pieces, _bits(new))
        tensors.append((tensor.name, new))
    return tensors


class _Reader:
    """Consecutive parts of a buffer."""

    def __init__(self, buffer: bytes | memoryview) -> None:
        self.rest = memoryview(buffer)

    def take(self, num_bytes: int) -> memoryview:
        taken, self.rest = self.rest[:num_bytes], self.rest[num_bytes:]
        return taken

    def take_part(self) -> memoryview:
        """Part after its length."""
        return self.take(_LENGTH.unpack(self.take(_LENGTH.size))[0])


def _write_changes(streams: tuple[bytearray, bytearray], old: Integers, new: Integers) -> list[int] | None:
    """Append to (gaps, codes) and return `_Tensor.pieces`; if the tensor is dense, append nothing."""
    gaps, codes = streams
    changed = old != new
    if np.count_nonzero(changed) > MAX_CHANGED * len(new):
        return None
    pieces: list[int] = []
    for start in range(0, len(new), _PIECE):
        piece = slice(start, start + _PIECE)
        positions = np.flatnonzero(changed[piece])
        skipped = _gaps(positions)
        pieces.append(len(skipped))
        gaps += skipped.data
        zigzag = _zigzag(old[piece][positions], new[piece][positions])
        codes += zigzag.view(np.uint8).reshape(-1, zigzag.itemsize).T.reshape(-1).data
    return pieces


def _apply_changes(streams: tuple[_Reader, _Reader], pieces: Sequence[int], values: Integers) -> None:
    """Change the values of the base, in place, to the encoded ones."""
    gaps, codes = streams
    for number, num_gaps in enumerate(pieces):
        positions = _positions(np.frombuffer(gaps.take(num_gaps), np.uint8))
        coded = np.frombuffer(codes.take(len(positions) * values.itemsize), np.uint8)
        zigzag = coded.reshape(values.itemsize, -1).T.reshape(-1).view(f"<u{values.itemsize}")
        piece = values[number * _PIECE : (number + 1) * _PIECE]
        piece[positions] = _undo_zigzag(piece[positions], zigzag)


def _gaps(positions: Integers) -> Bytes:
    """Unchanged values before each position: a `_SKIP` for each 255 values, then the remainder."""
    skips, rest = np.divmod(np.diff(positions, prepend=-1) - 1, _SKIP)
    coded = np.full(len(positions) + int(skips.sum()), _SKIP, np.uint8)
    coded[np.cumsum(skips + 1) - 1] = rest
    return coded


def _positions(gaps: Bytes) -> Integers:
    """Positions [n] of the changed values; the inverse of `_gaps`."""
    is_position = gaps != _SKIP
    found = np.cumsum(gaps, dtype=np.int64)[is_position]
    return found + np.arange(len(found))


def _zigzag(old: Integers, new: Integers) -> Integers:
    """Unsigned codes of the steps. A float that changes its sign has a large one; this is rare."""
    steps = new - old  # wraps around
    return (steps << 1 ^ steps >> (8 * steps.itemsize - 1)).view(f"<u{steps.itemsize}")


def _undo_zigzag(old: Integers, codes: Integers) -> Integers:
    """Bit patterns after the steps; the inverse of `_zigzag`."""
    steps = (codes >> 1 ^ -(codes & 1)).view(old.dtype)
    return old + steps


def _kind(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Dtype, for example `bfloat16`, and shape."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _bits(tensor: torch.Tensor) -> Integers:
    """Values of a CPU tensor as signed integers [n], in the memory of the tensor if it is contiguous."""
    return bytes_of(tensor).view(f"<i{min(tensor.dtype.itemsize, 8)}")
