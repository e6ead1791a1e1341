"""Distributes sequences to data-parallel ranks and micro-batches.

A unit is a list of sequences that must be in one micro-batch. Units with a common prefix form a block, where a shared
token counts once. A block is split only if a micro-batch cannot hold it, or if the slowest rank gets faster although
the prefix is computed twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.trainer.batch.forest import Forest

Plan = list[list[list[int]]]

GAIN = 0.01
"""Least share of the largest load by which it must fall for a block to be split."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Units in the order of their leaves, with the measures of their nodes."""

    units: list[list[int]]
    nodes: frozenset[int]
    tokens: int
    cost: float


def plan_micro_batches(
    forest: Forest,
    *,
    units: Sequence[list[int]] | None = None,
    max_tokens: int,
    num_ranks: int,
    padded: bool = False,
    multiple: int = 1,
    pair_cost: float = 0.0,
) -> Plan:
    """Plan the micro-batches of each data-parallel rank: plan[rank][micro-batch] is a list of sequences of the forest.

    Every sequence appears once. Every rank has the same number of micro-batches, because collectives require it; some
    are empty if a rank has too few sequences. A micro-batch has at most `max_tokens` unless it is a single unit. The
    blocks of a rank are ordered by cost, so that a micro-batch needs little padding.

    Sequences of (5, 4, 3, 2, 2) tokens that share nothing, max_tokens=6, 2 ranks: rank 0 has [0], [3, 4], rank 1 has
    [1], [2]. If all but the first begin with the same two tokens, they are a block of 5: rank 0 has [0], rank 1 has
    [1, 2, 3, 4].

    Args:
        forest: sequences.
        units: sequences that stay together; None if each is a unit.
        max_tokens: bound on the tokens of a micro-batch.
        num_ranks: data-parallel size.
        padded: whether a micro-batch costs its longest unit times its number of units, in place of the tokens.
        multiple: the number of micro-batches per rank is a multiple of this.
        pair_cost: cost of a token and a token that it attends to, in tokens.

    Raises:
        ValueError: max_tokens, num_ranks or multiple below 1, or a sequence without tokens.
    """
    for name, value in (("max_tokens", max_tokens), ("num_ranks", num_ranks), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name} is {value}; must be >= 1")
    if (forest.lengths < 1).any():
        raise ValueError("the forest has a sequence without tokens; each must have at least 1")
    measure = _Measure(forest, pair_cost=pair_cost)
    shares = _balance(measure.blocks(units or [[i] for i in range(len(forest.leaf))], max_tokens), measure, num_ranks)
    count = max((len(_cut(share, max_tokens, measure, padded)) for share in shares), default=0)
    count += -count % multiple
    cut = (_cut_into(share, count, max_tokens, measure, padded) for share in shares)
    return [[[n for block in part for unit in block.units for n in unit] for part in parts] for parts in cut]


class _Measure:
    """Tokens and costs of units in a forest."""

    def __init__(self, forest: Forest, *, pair_cost: float) -> None:
        self._forest = forest
        self._tokens = forest.length.tolist()
        pairs = forest.length * forest.start + forest.length * (forest.length + 1) // 2
        self._costs = (forest.length + pair_cost * pairs).tolist()

    def blocks(self, units: Sequence[list[int]], max_tokens: int) -> list[_Block]:
        """Blocks of at most `max_tokens`, or of one unit."""
        trees: dict[int, list[list[int]]] = {}
        for unit in sorted(units, key=lambda unit: int(self._forest.leaf[unit[0]])):
            trees.setdefault(self._forest.path(unit[0])[-1], []).append(unit)
        found: list[_Block] = []
        for tree in trees.values():
            parts = [self.block(tree[:1])]
            for unit in tree[1:]:
                longer = self.block([*parts[-1].units, unit], parts[-1].nodes)
                if longer.tokens > max_tokens:
                    parts.append(self.block([unit]))
                else:
                    parts[-1] = longer
            found += parts
        return found

    def block(self, units: list[list[int]], known: frozenset[int] = frozenset()) -> _Block:
        """The block of some units; `known` has nodes of all but the last, or none."""
        new = units[-1] if known else [number for unit in units for number in unit]
        nodes = known.union(node for number in new for node in self._forest.path(number))
        return _Block(units, nodes, self.tokens(nodes), sum(self._costs[node] for node in nodes))

    def tokens(self, nodes: Iterable[int]) -> int:
        """Tokens of some nodes."""
        return sum(self._tokens[node] for node in nodes)

    def halves(self, block: _Block) -> list[_Block]:
        """Two parts of a block with several units, with costs as equal as possible."""
        cuts = ([self.block(block.units[:at]), self.block(block.units[at:])] for at in range(1, len(block.units)))
        return min(cuts, key=lambda parts: max(part.cost for part in parts))


def _balance(blocks: list[_Block], measure: _Measure, num_ranks: int) -> list[list[_Block]]:
    """Assign blocks to ranks; each share has descending costs."""
    shares, loads = _assign(blocks, num_ranks)
    while divisible := [block for block in shares[int(np.argmax(loads))] if len(block.units) > 1]:
        largest = max(divisible, key=lambda block: block.cost)
        blocks = [block for block in blocks if block is not largest] + measure.halves(largest)
        other, lower = _assign(blocks, num_ranks)
        if max(lower) > (1 - GAIN) * max(loads):
            break
        shares, loads = other, lower
    return shares


def _assign(blocks: Sequence[_Block], num_ranks: int) -> tuple[list[list[_Block]], list[float]]:
    """Assign blocks, most expensive first, to the rank with the lowest load; returns the loads too."""
    shares: list[list[_Block]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, 0, rank) for rank in range(num_ranks)]
    for block in sorted(blocks, key=lambda block: -block.cost):
        load, count, rank = heapq.heappop(heap)
        shares[rank].append(block)
        heapq.heappush(heap, (load + block.cost, count + 1, rank))
    loads = {rank: load for load, _, rank in heap}
    return shares, [loads[rank] for rank in range(num_ranks)]


def _cut(share: Sequence[_Block], limit: int, measure: _Measure, padded: bool) -> list[list[_Block]]:
    """Cut into the fewest consecutive parts of at most `limit` tokens each, or of one block."""
    parts: list[list[_Block]] = []
    nodes = frozenset[int]()
    for block in share:
        # Costs descend, so the first block of a part is its longest.
        size = len(parts[-1]) + 1 if parts else 1
        tokens = parts[-1][0].tokens * size if padded and parts else measure.tokens(nodes | block.nodes)
        if not parts or tokens > limit:
            parts.append([])
            nodes = frozenset()
        parts[-1].append(block)
        nodes |= block.nodes
    return parts


def _cut_into(
    share: Sequence[_Block], count: int, max_tokens: int, measure: _Measure, padded: bool
) -> list[list[_Block]]:
    """Cut into exactly `count` consecutive parts with the smallest maximum; the last are empty if blocks run out."""
    if not share:
        return [[] for _ in range(count)]
    low, high = min(max_tokens, max(block.tokens for block in share)), max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cut(share, middle, measure, padded)) <= count:
            high = middle
        else:
            low = middle + 1
    parts = _cut(share, low, measure, padded)
    while len(parts) < count and any(len(part) > 1 for part in parts):
        at = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1, sum(block.tokens for block in parts[i])))
        part = parts[at]
        parts[at : at + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts + [[] for _ in range(count - len(parts))]
