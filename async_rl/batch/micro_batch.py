"""Sequences of a batch laid end to end, as the rows that one rank's forward pass sees.

Row r of the forward pass reads a token and predicts the next one of its sequence: the logits at position p - 1 give the
logprob of token p. With context parallelism each rank reads two chunks of every sequence, one from the front and one
from the back, so that causal attention costs all ranks the same; with sequence parallelism the routers of a rank see
one tensor-parallel part of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands in the groups that split rows."""

    tensor: int = 1
    tensor_rank: int = 0
    context: int = 1
    context_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBucket:
    """Consecutive slots that one attention call takes as [sequences, width]."""

    sequences: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Rows of one micro-batch on one rank; t rows here, over all context ranks t * context.

    index: int64 [t], where the token of row r lies among the tokens of the micro-batch end to end; -1 for padding.
    next_index: int64 [t], the token it predicts; -1 where there is none (last token, padding).
    positions: int64 [t], position in its sequence. segments: int64 [t], which sequence of the micro-batch.
    buckets, slot_row, row_slot: attention without context parallelism works on padded slots: slot_row [slots] is the
        row of each slot (any row for a padding slot), row_slot [t] the slot of each row.
    gathered_positions, gathered_segments: int64 [t * context], of the rows of all context ranks, rank after rank.
    boundaries: int32 [sequences + 1], the first row of each sequence in the rows of all context ranks as they lie end
        to end before they are cut, and the end of the last. longest: rows of the longest.
    """

    index: Tensor
    next_index: Tensor
    positions: Tensor
    segments: Tensor
    buckets: tuple[AttentionBucket, ...]
    slot_row: Tensor
    row_slot: Tensor
    gathered_positions: Tensor
    gathered_segments: Tensor
    boundaries: Tensor
    longest: int

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device) -> PackedRows:
        """The same on `device`."""
        if device.type == "cpu":
            return self
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name not in ("buckets", "longest")}
        return PackedRows(buckets=self.buckets, longest=self.longest, **moved)


def pack_rows(lengths: Sequence[int], *, at: Coordinates, packing: bool = True) -> PackedRows:
    """Lay sequences end to end.

    Each is padded to what context parallelism divides (all to the longest, without packing), and the whole to what
    tensor parallelism divides. Without sequences there is padding only, so that every rank can take part.

    Args:
        lengths: tokens of each sequence of the micro-batch.
    """
    real, padded, segments, positions = _lay_end_to_end(lengths, at=at, packing=packing)
    starts, first_token = padded.cumsum(0) - padded, real.cumsum(0) - real
    gathered_positions, gathered_segments = positions, segments
    if at.context > 1:
        ranks = [_context_rows(starts, padded, context=at.context, rank=r) for r in range(at.context)]
        gathered_positions, gathered_segments = positions[torch.cat(ranks)], segments[torch.cat(ranks)]
        here = ranks[at.context_rank]
        positions, segments = positions[here], segments[here]
        buckets, slot_row, row_slot = (), here.new_zeros(0), here.new_zeros(0)
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
        gathered_positions=gathered_positions,
        gathered_segments=gathered_segments,
        boundaries=torch.cat((starts, starts[-1:] + padded[-1:])).to(torch.int32),
        longest=int(padded.max()),
    )


def take_rows(values: Tensor, index: Tensor, *, fill: float) -> Tensor:
    """[t] entries of `values` [tokens] at `index` [t]; `fill` where the index is -1."""
    if not len(values):  # a rank without tokens
        return values.new_full((len(index),), fill)
    return values[index.clamp(min=0)].masked_fill(index < 0, fill)


def _lay_end_to_end(lengths: Sequence[int], *, at: Coordinates, packing: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequences end to end before context parallelism takes its part; the last may be padding.

    int64 [sequences] tokens without and with padding; int64 [t] sequence and position of each row.
    """
    multiple = 2 * at.context if at.context > 1 else 1
    real = torch.tensor(lengths, dtype=torch.int64)
    padded = (real + multiple - 1) // multiple * multiple
    if len(real) and not packing:
        padded = torch.full_like(padded, int(padded.max()))
    rows, whole = int(padded.sum()), at.tensor * at.context * (2 if at.context > 1 else 1)
    tail = -rows % whole if rows else whole
    if tail:  # padding is a sequence of its own: every row has a slot, and it sees nothing real
        real, padded = torch.cat([real, real.new_zeros(1)]), torch.cat([padded, padded.new_full((1,), tail)])
    segments = torch.repeat_interleave(torch.arange(len(padded)), padded)
    return real, padded, segments, torch.arange(len(segments)) - (padded.cumsum(0) - padded)[segments]


def _context_rows(starts: Tensor, padded: Tensor, *, context: int, rank: int) -> Tensor:
    """int64: rows of a context rank in packed order; of each sequence chunk r and chunk 2C - 1 - r of 2C."""
    parts: list[Tensor] = []
    for start, length in zip(starts.tolist(), padded.tolist(), strict=True):
        chunk = length // (2 * context)
        for number in (rank, 2 * context - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(parts)


def _attention_slots(
    padded: Sequence[int], starts: Sequence[int], *, waste: float = 0.15
) -> tuple[tuple[AttentionBucket, ...], Tensor, Tensor]:
    """Group sequences of similar length, so that at most `waste` of the slots of a bucket are padding."""
    order = sorted(range(len(padded)), key=lambda i: -padded[i])
    groups: list[list[int]] = []
    held = 0
    for i in order:
        width = padded[groups[-1][0]] if groups else 0
        if not groups or (held + padded[i]) < (1 - waste) * width * (len(groups[-1]) + 1):
            groups.append([])
            held = 0
        groups[-1].append(i)
        held += padded[i]
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
        buckets.append(AttentionBucket(sequences=count, width=width))
        offset += count * width
    return tuple(buckets), torch.cat(slot_rows), row_slot
