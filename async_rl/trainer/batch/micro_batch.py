"""Packs the sequences of a micro-batch into the rows of one rank's forward pass.

A row reads one token and predicts the next token of its sequences: the hidden state at position p - 1 gives the logprob
of token p. Sequences with a shared prefix share its rows (see `forest`). With context parallelism each rank reads two
chunks of every node, one from the front and one from the back, so that causal attention costs the same on all ranks.
With sequence parallelism the routers of a rank see one tensor-parallel part of its rows.

Attention is one mechanism for all: a span of rows attends to the keys of its path, from the root to each row itself.
A span is a node, or a chunk of a node with context parallelism. A bucket has spans of similar place and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor

from async_rl.trainer.batch.forest import Forest, Int64Array

WASTE = 0.15
"""Largest share of the query slots of a bucket that are padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Position of a rank in the parallel groups that split rows."""

    tensor: int = 1
    """Tensor-parallel size."""
    tensor_rank: int = 0
    """Rank in the tensor-parallel group."""
    context: int = 1
    """Context-parallel size."""
    context_rank: int = 0
    """Rank in the context-parallel group."""


class AttentionBucket(NamedTuple):
    """Consecutive slots that attention views as [spans, queries] and [spans, keys]; the last query is at the last key.

    Spans that are the rows 3 to 7 and 4 to 6 of their paths have queries=5 and keys=8. The second has a slot of padding
    before its rows and one behind them; the latter is a key too.
    """

    spans: int
    """Spans in the bucket."""
    queries: int
    """Query slots of each span, padding included."""
    keys: int
    """Key slots of each span: those before its first query slot, and one for each query slot."""


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """Base of the carriers with tensors."""

    def to(self, device: torch.device) -> Self:
        """A copy on `device`; `self` if that is the CPU."""
        if device.type == "cpu":
            return self
        return replace(self, **{field.name: _moved(getattr(self, field.name), device) for field in fields(self)})


def _moved(value: Any, device: torch.device) -> Any:
    if type(value) is tuple:
        return tuple(_moved(part, device) for part in cast(tuple[Any, ...], value))
    return value.to(device) if hasattr(value, "to") else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots(OnDevice):
    """Copies of rows in the order of attention; a row may have several, or none."""

    row: Tensor
    """int64 [slots], row of each slot; any row for padding."""
    slot: Tensor
    """int64, the slots of row 0, then those of row 1 and so on, without padding."""
    first: Tensor | None
    """int64 [rows], index in `slot` of the first slot of each row; None if each row has one slot."""

    @classmethod
    def of(cls, row: Int64Array, *, rows: int) -> Slots:
        """From the row of each slot, below `rows`; -1 for padding."""
        real = np.flatnonzero(row >= 0)
        counts = np.bincount(row[real], minlength=rows)
        first = None if (counts == 1).all() else torch.from_numpy(counts.cumsum() - counts)
        slot = real[row[real].argsort(kind="stable")]
        return cls(row=torch.from_numpy(row.clip(min=0)), slot=torch.from_numpy(slot), first=first)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows(OnDevice):
    """Rows of one micro-batch: t on this rank, t * context on all context-parallel ranks.

    Sequences of 3 and 2 tokens that share nothing; tensor=4 pads the 5 rows to 8 with a third node:

        index        0  1  2  3  4 -1 -1 -1     positions    0  1  2  0  1  0  1  2
        token_row    0  1  2  3  4              nodes        0  0  0  1  1  2  2  2
        uses         1  1  1  1  1  0  0  0     boundaries   0  3  5  8
        queries.row  0  1  2  5  6  7  3  4  0  (one bucket of 3 spans, 3 queries, 3 keys; the last slot is padding)

    If they share their first token, the first node has the row 0, and two nodes have the rows 1, 2 and 3:

        index        0  1  2  4                 positions    0  1  2  1
        token_row    0  1  2  0  3              nodes        0  1  1  2
        uses         2  1  1  1
        queries.row  0  1  2  3  0              keys.row     0  0  1  2  0  3  0
        buckets      (1, 1, 1), (2, 2, 3)

    Sequences of 6 and 3 tokens with context=2. They are padded to 8 and 4 and cut into 4 chunks each; rank 0 reads the
    chunks 0 and 3, rank 1 the chunks 1 and 2:

        rank 0   positions   0  1  6  7  0  3       rank 1   positions   2  3  4  5  1  2
                 index       0  1 -1 -1  6 -1                index       2  3  4  5  7  8
        token_row, rank 0    0  1 -1 -1 -1 -1  4 -1 -1
        boundaries  0  8  12
    """

    index: Tensor
    """int64 [t], the row's token among the concatenated tokens of the micro-batch, for a shared row that of its first
    sequence; -1 for padding."""
    token_row: Tensor
    """int64 [tokens], row on this rank of each of the concatenated tokens; -1 if it is on another context rank."""
    positions: Tensor
    """int64 [t], position in the sequence."""
    nodes: Tensor
    """int64 [t], node of the forest; padding at the end is a separate node."""
    uses: Tensor
    """int64 [t], sequences that have the row; 0 for padding."""
    buckets: tuple[AttentionBucket, ...]
    """The slots of `queries` and `keys` are those of the first bucket, then those of the second and so on."""
    queries: Slots
    """Query slots of the rows on this rank; each row has one."""
    keys: Slots
    """Key slots. Their rows are counted over the context ranks one after the other."""
    boundaries: Tensor
    """int32 [nodes + 1], first row of each node before the rows are cut for context parallelism, then the total number
    of rows."""
    longest: int
    """Rows of the longest node, padding included."""
    is_plain: bool
    """Whether no sequences share rows, so that a node is a sequence."""

    def __len__(self) -> int:
        return len(self.index)


def pack_rows(forest: Forest, *, at: Coordinates, packing: bool = True) -> PackedRows:
    """Pack sequences into rows; `PackedRows` has examples.

    Each node is padded to a multiple of 2 * context, if context > 1. The total is padded to a multiple that context and
    tensor parallelism divide. Without sequences there is only padding, so that the rank can take part in collectives.

    Args:
        forest: sequences of the micro-batch.
        at: coordinates of this rank.
        packing: if False, all nodes are padded to the longest.
    """
    real, padded = node_sizes(forest, at=at, packing=packing)
    starts, tail = padded.cumsum() - padded, np.zeros(len(real) - len(forest.length), np.int64)
    sequence, position, uses = (np.append(x, tail) for x in (forest.sequence, forest.start, forest.uses))
    node = np.arange(len(padded)).repeat(padded)
    offset = np.arange(len(node)) - starts[node]
    first_token = np.append(forest.lengths.cumsum() - forest.lengths, tail)  # without sequences there is only the tail
    is_real = offset < real[node]
    place, here = row_places(starts, padded, at=at)
    token = first_token[sequence[node]] + position[node] + offset
    row_of_token = place[_rows_of_tokens(forest, starts)] - at.context_rank * len(here)
    spans = _spans(forest, starts, padded, place, at=at)
    buckets, queries, keys = _attention(spans, rows=len(here), all_rows=len(node))
    return PackedRows(
        index=torch.from_numpy(np.where(is_real, token, -1)[here]),
        token_row=torch.from_numpy(np.where((row_of_token >= 0) & (row_of_token < len(here)), row_of_token, -1)),
        positions=torch.from_numpy((position[node] + offset)[here]),
        nodes=torch.from_numpy(node[here]),
        uses=torch.from_numpy((uses[node] * is_real)[here]),
        buckets=buckets,
        queries=queries,
        keys=keys,
        boundaries=torch.from_numpy(np.append(starts, len(node)).astype(np.int32)),
        longest=int(padded.max()),
        is_plain=bool((forest.parent < 0).all()),
    )


def take_rows(values: Tensor, index: Tensor, *, fill: float) -> Tensor:
    """Entries [t] of `values` [tokens] at `index` [t]; `fill` for index -1."""
    if not len(values):  # a rank without tokens
        return values.new_full((len(index),), fill)
    return values[index.clamp(min=0)].masked_fill(index < 0, fill)


def node_sizes(forest: Forest, *, at: Coordinates, packing: bool) -> tuple[Int64Array, Int64Array]:
    """(tokens, rows) int64 [nodes] of each node, and of a node of padding behind them if it is needed."""
    multiple = 2 * at.context if at.context > 1 else 1
    real = forest.length
    padded = -(-real // multiple) * multiple
    if len(real) and not packing:
        padded = np.full_like(padded, padded.max())
    rows, whole = int(padded.sum()), at.tensor * at.context * (2 if at.context > 1 else 1)
    tail = -rows % whole if rows else whole
    if tail:  # a separate node, so that each padding row has a slot and attends to padding only
        real, padded = np.append(real, 0), np.append(padded, tail)
    return real, padded


def row_places(starts: Int64Array, padded: Int64Array, *, at: Coordinates) -> tuple[Int64Array, Int64Array]:
    """Place of each row if the rows of the context ranks stand one after the other; rows of this rank.

    Of the 2C chunks of each node, rank r has the chunks r and 2C - 1 - r. One node of 8 rows, context=2: rank 0 has the
    rows 0, 1, 6, 7, rank 1 the rows 2, 3, 4, 5, so that the places are 0, 1, 4, 5, 6, 7, 2, 3.
    """
    if at.context == 1:
        return (rows := np.arange(int(padded.sum()))), rows
    ranks: list[Int64Array] = []
    for rank in range(at.context):
        parts = [
            np.arange(length // (2 * at.context)) + start + number * (length // (2 * at.context))
            for start, length in zip(starts.tolist(), padded.tolist(), strict=True)
            for number in (rank, 2 * at.context - 1 - rank)
        ]
        ranks.append(np.concatenate(parts))
    place = np.empty(int(padded.sum()), np.int64)
    place[np.concatenate(ranks)] = np.arange(len(place))
    return place, ranks[at.context_rank]


def _rows_of_tokens(forest: Forest, starts: Int64Array) -> Int64Array:
    """int64 [tokens], row of each of the concatenated tokens of the sequences, before rows are cut."""
    paths = [forest.path(number)[::-1] for number in range(len(forest.leaf))]
    nodes = np.array([node for path in paths for node in path], np.int64)
    counts = forest.length[nodes]
    return np.arange(counts.sum()) + (starts[nodes] - (counts.cumsum() - counts)).repeat(counts)


class _Span(NamedTuple):
    """Rows that attend to a path, by their places."""

    rows: Int64Array
    """Rows on this rank."""
    keys: Int64Array
    """Rows of the path up to the last of `rows`, counted over the context ranks."""


def _spans(
    forest: Forest, starts: Int64Array, padded: Int64Array, place: Int64Array, *, at: Coordinates
) -> list[_Span]:
    """Spans of this rank. Padding in a node is behind its tokens, and no key of the nodes behind it."""
    paths: dict[int, Int64Array] = {-1: np.zeros(0, np.int64)}  # node -> the rows of its path
    chunks = (0,) if at.context == 1 else (at.context_rank, 2 * at.context - 1 - at.context_rank)
    spans: list[_Span] = []
    for node, (start, length) in enumerate(zip(starts.tolist(), padded.tolist(), strict=True)):
        before = paths[int(forest.parent[node]) if node < len(forest.parent) else -1]
        own = place[start : start + length]
        if node < len(forest.parent) and forest.uses[node] > 1:
            paths[node] = np.concatenate((before, own[: forest.length[node]]))
        size = length if at.context == 1 else length // (2 * at.context)
        for chunk in chunks:
            rows = own[chunk * size : (chunk + 1) * size] - at.context_rank * (len(place) // at.context)
            spans.append(_Span(rows, np.concatenate((before, own[: (chunk + 1) * size]))))
    return spans


def _attention(spans: Sequence[_Span], *, rows: int, all_rows: int) -> tuple[tuple[AttentionBucket, ...], Slots, Slots]:
    """Buckets of spans, and their query and key slots.

    Args:
        spans: with at least one row each.
        rows: rows on this rank.
        all_rows: rows on all context ranks.
    """
    # (first query, end) of each span, counted from the first key of its path.
    bounds = [(len(span.keys) - len(span.rows), len(span.keys)) for span in spans]
    order = sorted(range(len(spans)), key=lambda i: (bounds[i][0], -bounds[i][1]))
    buckets, query_rows, key_rows = list[AttentionBucket](), list[Int64Array](), list[Int64Array]()
    for members in _grouped(order, bounds):
        low, high = bounds[members[0]][0], max(bounds[i][1] for i in members)
        buckets.append(AttentionBucket(len(members), high - low, high))
        of_queries, of_keys = np.full((len(members), high - low), -1), np.full((len(members), high), -1)
        for place, i in enumerate(members):
            of_queries[place, bounds[i][0] - low : bounds[i][1] - low] = spans[i].rows
            of_keys[place, : bounds[i][1]] = spans[i].keys
        query_rows.append(of_queries.ravel())
        key_rows.append(of_keys.ravel())
    queries = Slots.of(np.concatenate(query_rows), rows=rows)
    plain = rows == all_rows and all(low == 0 for low, _ in bounds)
    return tuple(buckets), queries, queries if plain else Slots.of(np.concatenate(key_rows), rows=all_rows)


def _grouped(order: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Consecutive spans of `order` whose queries waste at most WASTE of the slots of their bucket."""
    groups: list[list[int]] = []
    filled = low = high = 0
    for i in order:
        start, end = bounds[i]
        slots = (max(high, end) - low) * (len(groups[-1]) + 1) if groups else 0
        if not groups or filled + end - start < (1 - WASTE) * slots:
            groups.append([])
            filled, low, high = 0, start, end
        groups[-1].append(i)
        filled, high = filled + end - start, max(high, end)
    return groups
