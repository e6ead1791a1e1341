"""Chunks of rows for layers with a recurrent state: which rows a chunk has, and the chunk whose state it continues.

The state begins at zero at the start of a sequence. A node of a forest begins with the state at the end of its parent,
so that a shared prefix is computed once. All chunks of a wave are computed together; a wave needs the states at the end
of the wave before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.trainer.batch.forest import Forest, Int64Array
from async_rl.trainer.batch.micro_batch import Coordinates, OnDevice, Slots, node_sizes, row_places

CHUNK = 64
"""Most rows of a chunk. The work in a chunk grows with its square, the number of waves with its inverse."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains(OnDevice):
    """Chunks of the rows of all context ranks, sorted by wave.

    Sequences of 5 and 2 tokens that share their first token are the nodes with the rows 0, then 1 2 3 4, then 5. With
    chunks of 2 rows and a convolution that reads 1 earlier row, `-` for padding:

        chunk         0       1       2       3
        inputs.row    - 0 -   0 1 2   0 5 -   2 3 4
        wave          0       1       1       2
        continues     -       0       0       1         waves  (1, 2, 1)
    """

    size: int
    """Rows of a chunk."""
    earlier: int
    """Rows in front of a chunk that the convolution reads."""
    inputs: Slots
    """Slots [chunks * (earlier + size)] of the inputs. The earlier rows end at slot `earlier` of a chunk."""
    is_row: Tensor
    """bool [chunks, earlier + size], whether a slot of `inputs` has a row; not for padding."""
    outputs: Slots
    """Slots [chunks * size] of the outputs; each row has one."""
    waves: tuple[int, ...]
    """Chunks of each wave."""
    continued: tuple[Slots, ...]
    """Of each wave but the first: the chunk in the wave before whose final state each chunk continues."""


class _Chunk(NamedTuple):
    """Rows of a chunk, counted over the context ranks."""

    wave: int
    continues: int
    """Number of the chunk before it; -1 at the start of a sequence."""
    earlier: Int64Array
    rows: Int64Array


def chains_of(forest: Forest, *, at: Coordinates, packing: bool = True, earlier: int, largest: int = CHUNK) -> Chains:
    """Cut the rows of `pack_rows` into chunks.

    Padding behind the tokens of a node is a separate chain, so that it changes no state.

    Args:
        forest: sequences of the micro-batch.
        at: coordinates of this rank.
        packing: as for `pack_rows`.
        earlier: rows before each row that the convolution reads.
        largest: most rows of a chunk.
    """
    runs = _runs(forest, at=at, packing=packing)
    size = min(largest, max(len(rows) for rows, _ in runs))
    chunks = _chunks(runs, size=size, earlier=earlier)
    order = sorted(range(len(chunks)), key=lambda number: chunks[number].wave)
    waves = np.bincount([chunk.wave for chunk in chunks])
    place_in_wave = np.empty(len(chunks), np.int64)
    place_in_wave[order] = np.concatenate([np.arange(count) for count in waves])
    slots = np.full((len(chunks), earlier + size), -1, np.int64)
    for place, number in enumerate(order):
        before, rows = chunks[number].earlier, chunks[number].rows
        slots[place, earlier - len(before) : earlier] = before
        slots[place, earlier : earlier + len(rows)] = rows
    of_wave = np.split(np.array(order), waves.cumsum()[:-1])
    continued = [place_in_wave[[chunks[number].continues for number in wave]] for wave in of_wave[1:]]
    total = int(sum(len(rows) for rows, _ in runs))
    return Chains(
        size=size,
        earlier=earlier,
        inputs=Slots.of(slots.ravel(), rows=total),
        is_row=torch.from_numpy(slots >= 0),
        outputs=Slots.of(slots[:, earlier:].ravel(), rows=total),
        waves=tuple(waves.tolist()),
        continued=tuple(Slots.of(places, rows=count) for places, count in zip(continued, waves.tolist(), strict=False)),
    )


def _runs(forest: Forest, *, at: Coordinates, packing: bool) -> list[tuple[Int64Array, int]]:
    """(rows, node before it) of each node, then those of the padding of each node."""
    real, padded = node_sizes(forest, at=at, packing=packing)
    starts = padded.cumsum() - padded
    place, _ = row_places(starts, padded, at=at)
    own = [place[start : start + length] for start, length in zip(starts.tolist(), padded.tolist(), strict=True)]
    parents = [*forest.parent.tolist(), *[-1] * (len(own) - len(forest.parent))]
    nodes = [(rows[:tokens], parent) for rows, tokens, parent in zip(own, real.tolist(), parents, strict=True)]
    return nodes + [(rows[tokens:], -1) for rows, tokens in zip(own, real.tolist(), strict=True)]


def _chunks(runs: Sequence[tuple[Int64Array, int]], *, size: int, earlier: int) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    ends = list[tuple[Int64Array, int]]()  # of each run: the rows that a convolution behind it reads, its last chunk
    for rows, parent in runs:
        tail, last = ends[parent] if parent >= 0 else (np.zeros(0, np.int64), -1)
        path = np.concatenate((tail, rows))
        for start in range(len(tail), len(path), size):
            before, own = path[max(0, start - earlier) : start], path[start : start + size]
            wave = chunks[last].wave + 1 if last >= 0 else 0
            chunks.append(_Chunk(wave, last, before, own))
            last = len(chunks) - 1
        ends.append((path[max(0, len(path) - earlier) :], last))
    return chunks
