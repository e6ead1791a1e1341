"""Lossless coding of expert sets by their rank: within a few percent of the fewest bits that any code can use.

A set of k of n experts is the number sum C(c_i, i) of its members c_1 < c_2 < ... < c_k (the combinatorial number
system; Knuth, The Art of Computer Programming 4A, 7.2.1.3), one of C(n, k). As many such numbers as fit make one of at
most 64 bits, and these are packed without gaps; a number of more than 64 bits is packed in two parts. The order within
the top-k is lost: decoded sets ascend. Where all sets are equally likely no code does better, so there is no entropy
coder behind it.

Everything works on columns (the i-th member of many sets at once), which stay in the cache.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from message_queue.tokens import ContractError, ExpertArray

Uint8Array = NDArray[np.uint8]
Uint64Array = NDArray[np.uint64]

_WORD = 64
_ALL_ONES = (1 << _WORD) - 1
_SETS_AT_ONCE = 1 << 14
_BELOW = 0.01  # more than the float32 error of the estimate, less than what one step mends


class RankCode:
    """Codes sets of `top_k` of `num_experts` experts.

    Raises:
        ContractError: a set takes more than 128 bits.
    """

    def __init__(self, *, num_experts: int, top_k: int) -> None:
        self._num_sets = math.comb(num_experts, top_k)
        if self._num_sets > 1 << 2 * _WORD:
            raise ContractError(
                f"rank coding of {top_k} of {num_experts} experts takes {math.log2(self._num_sets):.1f} bits a set, "
                f"more than {2 * _WORD}; set queue.rank_code_rows=false"
            )
        self._num_experts = num_experts
        self._top_k = top_k
        self._dtype = np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)
        self._tables = [_Table(i, num_experts=num_experts, num_sets=self._num_sets) for i in range(1, top_k + 1)]
        self._swaps = _sorting_network(top_k)
        self._digits, self._width = _grouping(self._num_sets)
        self._widths = [self._width] if self._width <= _WORD else [_WORD, self._width - _WORD]

    @property
    def floor_bits(self) -> float:
        """Bits that a set takes at least where all sets are equally likely: log2 C(n, k)."""
        return math.log2(self._num_sets)

    @property
    def bits_per_set(self) -> float:
        """Bits that a set takes among many."""
        return self._width / self._digits

    def coded_bytes(self, num_sets: int) -> int:
        """Bytes of so many sets."""
        return sum(_packed_bytes(-(-num_sets // self._digits), width) for width in self._widths)

    def encode(self, sets: ExpertArray) -> Uint8Array:
        """uint8 [coded_bytes(m)] of m sets [m, top_k] of distinct experts below num_experts, in any order."""
        numbers = -(-len(sets) // self._digits)
        ranks = np.zeros((len(self._widths), numbers * self._digits), np.uint64)
        for start in range(0, len(sets), _SETS_AT_ONCE):
            part = sets[start : start + _SETS_AT_ONCE]
            self._rank(part, out=ranks[:, start : start + len(part)])
        if self._digits > 1:
            digits = ranks.reshape(self._digits, numbers)
            ranks = digits[-1:].copy()
            for digit in digits[-2::-1]:
                ranks *= np.uint64(self._num_sets)
                ranks += digit
        return np.concatenate([_pack(part, width) for part, width in zip(ranks, self._widths, strict=True)])

    def decode(self, data: Uint8Array, num_sets: int) -> ExpertArray:
        """uint8 or uint16 [num_sets, top_k], each set ascending.

        Raises:
            ContractError: bytes that are not of so many sets.
        """
        if len(data) != self.coded_bytes(num_sets):
            raise ContractError(
                f"rank-coded rows have {len(data)} bytes; {num_sets} sets of {self._top_k} of {self._num_experts} "
                f"experts take {self.coded_bytes(num_sets)}"
            )
        ranks = self._unpacked(data, num_sets)
        sets = np.empty((num_sets, self._top_k), self._dtype)
        for start in range(0, num_sets, _SETS_AT_ONCE):
            part = sets[start : start + _SETS_AT_ONCE]
            self._unrank(ranks[:, start : start + len(part)].copy(), out=part)
        return sets

    def _unpacked(self, data: Uint8Array, num_sets: int) -> Uint64Array:
        """uint64 [1 or 2, at least num_sets], the low part of each rank first."""
        numbers = -(-num_sets // self._digits)
        if len(self._widths) > 1:
            split = _packed_bytes(numbers, _WORD)
            parts = (data[:split], data[split:])
            return np.stack([_unpack(part, w, numbers) for part, w in zip(parts, self._widths, strict=True)])
        packed = _unpack(data, self._width, numbers)
        digits = np.empty((self._digits, numbers), np.uint64)
        for digit in digits[:-1]:
            np.remainder(packed, np.uint64(self._num_sets), out=digit)
            packed //= np.uint64(self._num_sets)
        digits[-1] = packed
        return digits.reshape(1, -1)

    def _rank(self, sets: ExpertArray, *, out: Uint64Array) -> None:
        """Add the rank of each set to `out` [1 or 2, m]."""
        columns = np.ascontiguousarray(sets.T)
        low = np.empty_like(columns[0])
        for i, j in self._swaps:
            np.minimum(columns[i], columns[j], out=low)
            np.maximum(columns[i], columns[j], out=columns[j])
            columns[i] = low
        for i, table in enumerate(self._tables):
            table.add(columns[i], out)

    def _unrank(self, ranks: Uint64Array, *, out: ExpertArray) -> None:
        """Write the sets of `ranks` [1 or 2, m] to `out`, using `ranks` up."""
        past = self._tables[-1].reaches(np.int32(self._num_experts), ranks)
        if past.any():
            rank = sum(int(part) << (_WORD * i) for i, part in enumerate(ranks[:, np.argmax(past)]))
            raise ContractError(
                f"rank-coded rows have rank {rank}; there are {self._num_sets} sets of {self._top_k} of "
                f"{self._num_experts} experts"
            )
        columns = np.empty((self._top_k, ranks.shape[1]), self._dtype)
        for i in range(self._top_k, 1, -1):
            columns[i - 1] = self._tables[i - 1].take_member(ranks)
        columns[0] = ranks[0]
        out[:] = columns.T


class _Table:
    """C(c, i) for c = 0 .. num_experts, of one i, in one or two uint64 parts."""

    def __init__(self, i: int, *, num_experts: int, num_sets: int) -> None:
        values = [min(math.comb(c, i), num_sets) for c in range(num_experts + 1)]
        self._i = i
        self._low: Uint64Array = np.array([v & _ALL_ONES for v in values], np.uint64)
        self._high: Uint64Array | None = None
        if values[-1] > _ALL_ONES:
            self._high = np.array([v >> _WORD for v in values], np.uint64)
        reached = [c for c in range(num_experts) if values[c] < num_sets]
        exact = np.array([[values[c] & _ALL_ONES for c in reached], [values[c] >> _WORD for c in reached]], np.uint64)
        # The estimate falls short most at the C(c, i) themselves.
        self._steps = max(0, int((np.array(reached) - self._estimate(exact)).max()))

    def add(self, members: ExpertArray, ranks: Uint64Array) -> None:
        """ranks [1 or 2, m] += C(member, i)."""
        terms: Uint64Array = np.take(self._low, members, mode="clip")
        ranks[0] += terms
        if len(ranks) > 1:
            ranks[1] += ranks[0] < terms
            if self._high is not None:
                ranks[1] += np.take(self._high, members, mode="clip")

    def take_member(self, ranks: Uint64Array) -> NDArray[np.int32]:
        """The largest c with C(c, i) <= rank; ranks [1 or 2, m] -= C(c, i)."""
        member = self._estimate(ranks)
        for _ in range(self._steps):
            member += self.reaches(member + np.int32(1), ranks)
        terms: Uint64Array = np.take(self._low, member, mode="clip")
        if len(ranks) > 1:
            ranks[1] -= ranks[0] < terms
            if self._high is not None:
                ranks[1] -= np.take(self._high, member, mode="clip")
        ranks[0] -= terms
        return member

    def reaches(self, members: NDArray[np.int32] | np.int32, ranks: Uint64Array) -> NDArray[np.bool_]:
        """bool [m]: C(member, i) <= rank."""
        low: NDArray[np.bool_] = np.take(self._low, members, mode="clip") <= ranks[0]
        if len(ranks) == 1:
            return low
        high = np.uint64(0) if self._high is None else np.take(self._high, members, mode="clip")
        return (high < ranks[1]) | ((high == ranks[1]) & low)

    def _estimate(self, ranks: Uint64Array) -> NDArray[np.int32]:
        """The largest c with C(c, i) <= rank, or a little less: C(c, i) i! is below (c - (i - 1) / 2)^i."""
        root = np.maximum(ranks[0], np.uint64(1)).astype(np.float32)
        scale = math.lgamma(self._i + 1)
        if len(ranks) > 1:  # in units of 2^64, as a float32 ends at 2^128
            root *= np.float32(0.5**_WORD)
            root += ranks[1].astype(np.float32)
            scale += _WORD * math.log(2)
        np.log(root, out=root)
        root += np.float32(scale)
        root *= np.float32(1 / self._i)
        np.exp(root, out=root)
        root += np.float32((self._i - 1) / 2 - _BELOW)
        return np.maximum(root.astype(np.int32), np.int32(self._i - 1))


def _grouping(num_sets: int) -> tuple[int, int]:
    """(d, w): d ranks make a number below 2^w with the fewest bits a rank; where d is not 1, w <= 64."""
    choices: list[tuple[float, int, int]] = []
    digits = 1
    while digits == 1 or (num_sets > 1 and num_sets**digits <= 1 << _WORD):
        width = max(1, (num_sets**digits - 1).bit_length())
        choices.append((width / digits, digits, width))
        digits += 1
    _, digits, width = min(choices)
    return digits, width


def _sorting_network(size: int) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, to put in order one after another (Batcher's merge exchange; Knuth 3, 5.2.2 M)."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (size - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(size - d) if i & p == r]
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs


def _packed_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def _pack(numbers: Uint64Array, width: int) -> Uint8Array:
    """uint8 [ceil(n * width / 8)] of n numbers below 2^width.

    64 numbers fill `width` words; number g of lane l is at bit l * width of word column g. The rest are bits in order.
    """
    whole = len(numbers) // _WORD
    lanes = numbers[: whole * _WORD].reshape(_WORD, whole)
    words = np.zeros((width, whole), "<u8")
    for lane, values in enumerate(lanes):
        word, shift = divmod(lane * width, _WORD)
        words[word] |= values << np.uint64(shift)
        if shift + width > _WORD:
            words[word + 1] |= values >> np.uint64(_WORD - shift)
    rest = numbers[whole * _WORD :].astype("<u8").view(np.uint8).reshape(-1, 8)
    bits = np.unpackbits(rest, axis=1, bitorder="little")[:, :width]
    return np.concatenate([words.reshape(-1).view(np.uint8), np.packbits(bits, bitorder="little")])


def _unpack(data: Uint8Array, width: int, count: int) -> Uint64Array:
    """uint64 [count] numbers that `_pack` was given."""
    whole = count // _WORD
    split = whole * width * 8
    words = data[:split].view("<u8").reshape(width, whole)
    numbers = np.empty(count, np.uint64)
    mask = np.uint64((1 << width) - 1)
    for lane, values in enumerate(numbers[: whole * _WORD].reshape(_WORD, whole)):
        word, shift = divmod(lane * width, _WORD)
        np.right_shift(words[word], np.uint64(shift), out=values)
        if shift + width > _WORD:
            values |= words[word + 1] << np.uint64(_WORD - shift)
        values &= mask
    rest = count - whole * _WORD
    bits = np.zeros((rest, 64), np.uint8)
    bits[:, :width] = np.unpackbits(data[split:], bitorder="little")[: rest * width].reshape(rest, width)
    numbers[whole * _WORD :] = np.packbits(bits, axis=1, bitorder="little").view("<u8").reshape(-1)
    return numbers
