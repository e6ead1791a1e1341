"""The sampling support: which tokens the sampler kept at each position, if it cut the distribution.

Top-p, top-k and min-p sample from a part of the vocabulary, renormalised. The logprob that the engine returns belongs
to that distribution, so the trainer must normalise over the same tokens. The set cannot be recomputed from other
weights or in another precision; it travels with the segment.

    position   kept tokens   gaps        packed bytes           offsets
    0          {7}           7           07                     0, 1
    1          all           (none)      (none)                 1
    2          {5, 6, 300}   5, 1, 294   05 01 A6 02            5

A gap is the difference to the kept token before it (the first: to 0), in LEB128: seven bits a byte, the lowest first,
the high bit set in all but the last byte. A kept set of a vocabulary of 150,000 takes one to three bytes per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from message_queue.errors import ContractError
from message_queue.tokens import Int32Array, shape_of

_BITS = 7
_MAX_BYTES = 5  # LEB128 bytes of an id below 2^31


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingSupport:
    """Kept tokens of n consecutive positions. A position without bytes has the whole vocabulary."""

    offsets: Int32Array
    """int32 [n + 1], ascending from 0: the bytes of position i are `packed[offsets[i] : offsets[i + 1]]`."""

    packed: NDArray[np.uint8]
    """uint8 [offsets[n]], gaps between ascending token ids in LEB128."""

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or self.offsets.dtype != np.int32 or not len(self.offsets):
            raise ContractError(f"SamplingSupport.offsets is {shape_of(self.offsets)}; need int32[n + 1]")
        if self.packed.ndim != 1 or self.packed.dtype != np.uint8:
            raise ContractError(f"SamplingSupport.packed is {shape_of(self.packed)}; need uint8")
        ends_of_ids = np.concatenate([np.ones(1, np.bool_), self.packed < 1 << _BITS])
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != len(self.packed)
            or (np.diff(self.offsets) < 0).any()
            or not ends_of_ids[self.offsets].all()
        ):
            raise ContractError(
                f"SamplingSupport.offsets do not cut the {len(self.packed)} packed bytes into whole token ids"
            )

    @classmethod
    def whole(cls, positions: int) -> SamplingSupport:
        """`positions` positions, each with the whole vocabulary."""
        return cls(offsets=np.zeros(positions + 1, np.int32), packed=np.zeros(0, np.uint8))

    @classmethod
    def pack(cls, counts: NDArray[np.integer], token_ids: NDArray[np.integer]) -> SamplingSupport:
        """From the number of kept tokens of each position and their ids, ascending within a position.

        Args:
            counts: integer [n]; 0 for the whole vocabulary.
            token_ids: integer [sum(counts)].

        Raises:
            ContractError: another number of ids, a negative id, or ids of a position that do not ascend.
        """
        counts, ids = counts.astype(np.int64), token_ids.astype(np.int64)
        if (counts < 0).any() or counts.sum() != len(ids):
            raise ContractError(f"SamplingSupport.pack got {len(ids)} token ids for counts of {int(counts.sum())}")
        first = np.cumsum(counts) - counts
        gaps = np.diff(ids, prepend=0)
        starts = first[counts > 0]
        inside = np.ones(len(ids), np.bool_)
        inside[starts] = False
        gaps[starts] = ids[starts]
        if (gaps < 0).any() or (gaps[inside] == 0).any() or (len(ids) and int(ids.max()) >= 1 << 31):
            raise ContractError("SamplingSupport.pack: the ids of a position must be ascending and in 0..2^31 - 1")
        lengths = np.ones(len(gaps), np.int64)
        for extra in range(1, _MAX_BYTES):
            lengths += gaps >= 1 << _BITS * extra
        ends = np.cumsum(lengths)
        place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        packed = (np.repeat(gaps, lengths) >> _BITS * place) & 0x7F
        packed |= (place < np.repeat(lengths, lengths) - 1) << _BITS
        byte_ends = np.concatenate([np.zeros(1, np.int64), ends])
        offsets = byte_ends[np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])]
        return cls(offsets=offsets.astype(np.int32), packed=packed.astype(np.uint8))

    @classmethod
    def join(cls, parts: Sequence[SamplingSupport]) -> SamplingSupport:
        """The positions of all parts in order."""
        starts = np.cumsum([0, *(len(part.packed) for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        return cls(
            offsets=np.concatenate([np.zeros(1, np.int32), *offsets]).astype(np.int32),
            packed=np.concatenate([np.zeros(0, np.uint8), *(part.packed for part in parts)]),
        )

    def __len__(self) -> int:
        """n: positions."""
        return len(self.offsets) - 1

    def part(self, start: int, stop: int) -> SamplingSupport:
        """Positions start..stop-1."""
        offsets = self.offsets[start : stop + 1]
        return SamplingSupport(offsets=offsets - offsets[0], packed=self.packed[offsets[0] : offsets[-1]])

    def take(self, positions: NDArray[np.integer]) -> SamplingSupport:
        """The given positions (integer [m]), in the given order."""
        starts, stops = self.offsets[:-1][positions].astype(np.int64), self.offsets[1:][positions].astype(np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(stops - starts)])
        index = np.arange(int(offsets[-1])) + np.repeat(starts - offsets[:-1], stops - starts)
        return SamplingSupport(offsets=offsets.astype(np.int32), packed=self.packed[index])

    def unpack(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """counts int64 [n], 0 for the whole vocabulary, and token ids int64 [sum(counts)], ascending per position."""
        is_last = self.packed < 1 << _BITS
        ids_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_last)])
        counts = np.diff(ids_before[self.offsets])
        if not len(self.packed):
            return counts, np.zeros(0, np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(is_last)[:-1] + 1])
        place = np.arange(len(self.packed)) - np.repeat(starts, np.diff(np.append(starts, len(self.packed))))
        gaps = np.add.reduceat((self.packed.astype(np.int64) & 0x7F) << _BITS * place, starts)
        running = np.cumsum(gaps)
        first = (np.cumsum(counts) - counts)[counts > 0]
        before = np.concatenate([np.zeros(1, np.int64), running])[first]
        return counts, running - np.repeat(before, counts[counts > 0])

    def check(self, token_ids: Int32Array, *, vocab_size: int) -> None:
        """Refuse sets that the sampled tokens cannot come from.

        Args:
            token_ids: int32 [n], the sampled tokens.

        Raises:
            ContractError: another number of positions, an id outside the vocabulary, ids that do not ascend, or a
                sampled token outside its own set.
        """
        if len(self) != len(token_ids):
            raise ContractError(f"SamplingSupport has {len(self)} positions for {len(token_ids)} sampled tokens")
        counts, ids = self.unpack()
        if len(ids) and int(ids.max()) >= vocab_size:
            raise ContractError(f"SamplingSupport has token id {int(ids.max())}; the vocabulary has {vocab_size}")
        position = np.repeat(np.arange(len(counts)), counts)
        same = position[1:] == position[:-1]
        if (same & (np.diff(ids) <= 0)).any():
            raise ContractError("SamplingSupport has a position whose token ids do not ascend")
        holds = np.zeros(len(counts), np.bool_)
        holds[position[ids == token_ids[position]]] = True
        if (absent := (counts > 0) & ~holds).any():
            at = int(np.argmax(absent))
            raise ContractError(
                f"SamplingSupport has a set of {int(counts[at])} tokens at sampled token {at} without the sampled id "
                f"{int(token_ids[at])}"
            )
