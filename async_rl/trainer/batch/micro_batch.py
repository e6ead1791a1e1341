"""Packs the sequences of a micro-batch into the rows of one rank's forward pass.

A row reads one token and predicts the next token of its sequence: the logits at position p - 1 give the logprob of
token p. With context parallelism each rank reads two chunks of every sequence, one from the front and one from the
back, so that causal attention costs the same on all ranks. With sequence parallelism the routers of a rank see one
tensor-parallel part of its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBucket:
    """Consecutive slots that attention views as [sequences, width].

    A sequence of 8 rows on rank 0 of 2 context ranks has width=8, chunk=2 and ends=(2, 8): its rows 0 and 1 attend to
    the slots 0 and 1, its rows 6 and 7 to the slots 0 to 7.
    """

    sequences: int
    """Sequences in the bucket."""
    width: int
    """Slots of each sequence, padding included."""
    chunk: int
    """Queries of each chunk of a sequence; `width` without context parallelism."""
    ends: tuple[int, ...]
    """For each chunk of a sequence on this rank: slots from the start of the sequence to the end of the chunk."""

    @property
    def queries(self) -> int:
        """Queries of this rank."""
        return self.sequences * self.chunk * len(self.ends)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Rows of one micro-batch: t on this rank, t * context on all context-parallel ranks.

    Sequences of 3 and 2 tokens; tensor=4 pads the 5 rows to 8 with a third sequence:

        index        0  1  2  3  4 -1 -1 -1     positions    0  1  2  0  1  0  1  2
        next_index   1  2 -1  4 -1 -1 -1 -1     segments     0  0  0  1  1  2  2  2
        slot_row     0  1  2  5  6  7  3  4  0  (one bucket of 3 sequences, width 3; the last slot is padding)
        row_slot     0  1  2  6  7  3  4  5     boundaries   0  3  5  8

    Sequences of 6 and 3 tokens with context=2. They are padded to 8 and 4 and cut into 4 chunks each; rank 0 reads the
    chunks 0 and 3, rank 1 the chunks 1 and 2:

        rank 0   positions   0  1  6  7  0  3       rank 1   positions   2  3  4  5  1  2
                 index       0  1 -1 -1  6 -1                index       2  3  4  5  7  8
                 next_index  1  2 -1 -1  7 -1                next_index  3  4  5 -1  8 -1
        slot_row  0  1  6  7  8  9  2  3  4 10 11  5  (buckets of width 8 and 4)
        row_slot  0  1  6  7  8 11  2  3  4  5  9 10
        boundaries  0  8  12
    """

    index: Tensor
    """int64 [t], the row's token among the concatenated tokens of the micro-batch; -1 for padding."""
    next_index: Tensor
    """int64 [t], the token that the row predicts; -1 for the last token of a sequence and for padding."""
    positions: Tensor
    """int64 [t], position in the sequence."""
    segments: Tensor
    """int64 [t], number of the sequence in the micro-batch; padding at the end is a separate sequence."""
    buckets: tuple[AttentionBucket, ...]
    """Attention works on slots, grouped into buckets. Sequences of similar length are padded to one width without
    context parallelism; with it, consecutive sequences of the same length are a bucket."""
    slot_row: Tensor
    """int64 [slots], row of each slot, counted over the context ranks one after the other; any row for padding."""
    row_slot: Tensor
    """int64 [t * context], slot of each row, counted in the same way."""
    boundaries: Tensor
    """int32 [sequences + 1], first row of each sequence before the rows are cut for context parallelism, then the
    total number of rows."""
    longest: int
    """Rows of the longest sequence, padding included."""

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device) -> PackedRows:
        """A copy on `device`; `self` if that is the CPU."""
        if device.type == "cpu":
            return self
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name not in ("buckets", "longest")}
        return PackedRows(buckets=self.buckets, longest=self.longest, **moved)


def pack_rows(lengths: Sequence[int], *, at: Coordinates, packing: bool = True) -> PackedRows:
    """Pack sequences into rows; `PackedRows` has examples.

    Each sequence is padded to a multiple of 2 * context, if context > 1. The total is padded to a multiple that
    context and tensor parallelism divide. Without sequences there is only padding, so that the rank can take part in
    collectives.

    Args:
        lengths: tokens of each sequence of the micro-batch.
        at: coordinates of this rank.
        packing: if False, all sequences are padded to the longest.
    """
    real, padded, segments, positions = _lay_end_to_end(lengths, at=at, packing=packing)
    starts, first_token = padded.cumsum(0) - padded, real.cumsum(0) - real
    if at.context > 1:
        ranks = [_context_rows(starts, padded, context=at.context, rank=r) for r in range(at.context)]
        here, row_slot = ranks[at.context_rank], torch.cat(ranks)
        positions, segments = positions[here], segments[here]
        buckets, slot_row = _context_buckets(padded.tolist(), at=at), row_slot.argsort()
    else:
        buckets, slot_row, row_slot = _attention_slots(padded.tolist(), starts.tolist())
    tokens, left = first_token[segments] + positions, real[segments]
    return PackedRows(
        index=torch.where(positions < left, tokens, -1),
        next_index=torch.where(positions + 1 < left, tokens + 1, -1),
        positions=positions,
        segments=segments,
        buckets=buckets,
        slot_row=slot_row,
        row_slot=row_slot,
        boundaries=torch.cat((starts, starts[-1:] + padded[-1:])).to(torch.int32),
        longest=int(padded.max()),
    )


def take_rows(values: Tensor, index: Tensor, *, fill: float) -> Tensor:
    """Entries [t] of `values` [tokens] at `index` [t]; `fill` for index -1."""
    if not len(values):  # a rank without tokens
        return values.new_full((len(index),), fill)
    return values[index.clamp(min=0)].masked_fill(index < 0, fill)


def _lay_end_to_end(lengths: Sequence[int], *, at: Coordinates, packing: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Concatenate the sequences of all context ranks, followed by a padding sequence if needed.

    Returns:
        (tokens, padded tokens) int64 [sequences], (segments, positions) int64 [t * context].
    """
    multiple = 2 * at.context if at.context > 1 else 1
    real = torch.tensor(lengths, dtype=torch.int64)
    padded = (real + multiple - 1) // multiple * multiple
    if len(real) and not packing:
        padded = torch.full_like(padded, int(padded.max()))
    rows, whole = int(padded.sum()), at.tensor * at.context * (2 if at.context > 1 else 1)
    tail = -rows % whole if rows else whole
    if tail:  # a separate sequence, so that each padding row has a slot and attends to padding only
        real, padded = torch.cat([real, real.new_zeros(1)]), torch.cat([padded, padded.new_full((1,), tail)])
    segments = torch.repeat_interleave(torch.arange(len(padded)), padded)
    return real, padded, segments, torch.arange(len(segments)) - (padded.cumsum(0) - padded)[segments]


def _context_rows(starts: Tensor, padded: Tensor, *, context: int, rank: int) -> Tensor:
    """Rows int64 [t] of a context rank: of the 2C chunks of each sequence the chunks r and 2C - 1 - r.

    One sequence of 8 rows, context=2: rank 0 has the rows 0, 1, 6, 7, rank 1 the rows 2, 3, 4, 5.
    """
    parts: list[Tensor] = []
    for start, length in zip(starts.tolist(), padded.tolist(), strict=True):
        chunk = length // (2 * context)
        for number in (rank, 2 * context - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts)


def _context_buckets(padded: Sequence[int], *, at: Coordinates) -> tuple[AttentionBucket, ...]:
    """Buckets of consecutive sequences of the same length, whose slots are the rows before they are cut."""
    buckets: list[AttentionBucket] = []
    for width, group in itertools.groupby(filter(None, padded)):
        chunk = width // (2 * at.context)
        ends = chunk * (at.context_rank + 1), chunk * (2 * at.context - at.context_rank)
        buckets.append(AttentionBucket(sequences=len([*group]), width=width, chunk=chunk, ends=ends))
    return tuple(buckets)


def _attention_slots(
    padded: Sequence[int], starts: Sequence[int], *, waste: float = 0.15
) -> tuple[tuple[AttentionBucket, ...], Tensor, Tensor]:
    """Group sequences of similar length, so that at most `waste` of the slots of a bucket are padding."""
    order = sorted(range(len(padded)), key=lambda i: -padded[i])
    groups: list[list[int]] = []
    filled = 0
    for i in order:
        width = padded[groups[-1][0]] if groups else 0
        if not groups or (filled + padded[i]) < (1 - waste) * width * (len(groups[-1]) + 1):
            groups.append([])
            filled = 0
        groups[-1].append(i)
        filled += padded[i]
    total = sum(padded)
    row_slot = torch.empty(total, dtype=torch.int64)
    slot_rows: list[Tensor] = []
    buckets: list[AttentionBucket] = []
    offset = 0
    for group in groups:
        width, count = padded[group[0]], len(group)
        first = torch.tensor([starts[i] for i in group]).unsqueeze(1)
        size = torch.tensor([padded[i] for i in group]).unsqueeze(1)
        column = torch.arange(width)
        rows, real = first + column, column < size
        slots = offset + torch.arange(count).unsqueeze(1) * width + column
        row_slot[rows[real]] = slots[real]
        slot_rows.append(torch.where(real, rows, 0).flatten())
        buckets.append(AttentionBucket(sequences=count, width=width, chunk=width, ends=(width,)))
        offset += count * width
    return tuple(buckets), torch.cat(slot_rows), row_slot
