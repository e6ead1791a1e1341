"""Distributes sequences to data-parallel ranks and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Plan = list[list[list[int]]]


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int, padded: bool = False, multiple: int = 1
) -> Plan:
    """Plan the micro-batches of each data-parallel rank: plan[rank][micro-batch] is a list of indices into `lengths`.

    Every index appears once. Every rank has the same number of micro-batches, because collectives require it; some are
    empty if a rank has too few sequences. A micro-batch costs at most `max_tokens` unless it is a single sequence.
    The sequences of a rank are ordered by length, so that a micro-batch needs little padding.

    Lengths (5, 4, 3, 2, 2) with max_tokens=6 on 2 ranks: rank 0 has [0], [3, 4], rank 1 has [1], [2].

    Args:
        lengths: tokens of each sequence.
        max_tokens: bound on the cost of a micro-batch.
        num_ranks: data-parallel size.
        padded: whether a micro-batch costs its longest sequence times its number of sequences, in place of the sum.
        multiple: the number of micro-batches per rank is a multiple of this.

    Raises:
        ValueError: max_tokens, num_ranks or multiple below 1, or a sequence without tokens.
    """
    for name, value in (("max_tokens", max_tokens), ("num_ranks", num_ranks), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name} is {value}; must be >= 1")
    if any(length < 1 for length in lengths):
        raise ValueError("lengths has a sequence without tokens; each must be >= 1")
    shares = _balance(lengths, num_ranks)
    count = max((len(_cut(share, lengths, max_tokens, padded)) for share in shares), default=0)
    count += -count % multiple
    return [_cut_into(share, lengths, count, max_tokens, padded) for share in shares]


def _balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign sequences, longest first, to the rank with the fewest tokens; each share has descending lengths."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [(0, 0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (tokens + lengths[index], count + 1, rank))
    return shares


def _cut(share: Sequence[int], lengths: Sequence[int], limit: int, padded: bool) -> list[list[int]]:
    """Cut into the fewest consecutive parts that cost at most `limit` each, or are one sequence."""
    parts: list[list[int]] = []
    tokens = 0
    for index in share:
        # Lengths descend, so the first sequence of a part is its longest.
        cost = lengths[parts[-1][0]] if padded and parts else lengths[index]
        if not parts or tokens + cost > limit:
            parts.append([])
            tokens, cost = 0, lengths[index]
        parts[-1].append(index)
        tokens += cost
    return parts


def _cut_into(
    share: Sequence[int], lengths: Sequence[int], count: int, max_tokens: int, padded: bool
) -> list[list[int]]:
    """Cut into exactly `count` consecutive parts with the smallest maximum; the last are empty if sequences run out."""
    if not share:
        return [[] for _ in range(count)]
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(share, lengths, middle, padded)) <= count:
            high = middle
        else:
            low = middle + 1
    parts = _cut(share, lengths, low, padded)
    while len(parts) < count and any(len(part) > 1 for part in parts):
        at = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1, sum(lengths[j] for j in parts[i])))
        part = parts[at]
        parts[at : at + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts + [[] for _ in range(count - len(parts))]
