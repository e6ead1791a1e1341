"""Sequences of a batch laid end to end, as the rows that one rank's forward pass sees.

Row r of the forward pass reads a token and predicts the next one of its sequence: the logits at position p - 1 give the
logprob of token p. With context parallelism each rank holds two chunks of every sequence, one from the front and one
from the back, so that causal attention costs all ranks the same, and is sent those tokens alone; with sequence
parallelism the routers of a rank see one tensor-parallel part of its rows.
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

    index: int64 [t], where the token of row r lies in the flattened [S * T] batch, of which a context rank has the
        tokens it holds (`HeldTokens`) alone; -1 for padding.
    next_index: int64 [t], the token it predicts; -1 where there is none (last token, padding).
    positions: int64 [t], position in its sequence. segments: int64 [t], which sequence of the micro-batch.
    router_index: int64 [t / tensor], the part of `index` that this rank's routers see.
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
    router_index: Tensor
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


def pack_rows(
    lengths: Sequence[int],
    indices: Sequence[int],
    *,
    row_length: int,
    at: Coordinates,
    packing: bool = True,
) -> PackedRows:
    """Lay sequences `indices` end to end.

    Each is padded to what context parallelism divides (all to the longest, without packing), and the whole to what
    tensor parallelism divides. An empty list gives padding only, so that a rank without sequences can take part.

    Args:
        lengths: tokens of every sequence of the batch, whole. row_length: T of the batch, as far as this rank has it.
    """
    laid = _lay_end_to_end(lengths, indices, at=at, packing=packing)
    positions, segments, starts, padded = laid.positions, laid.segments, laid.starts, laid.padded
    gathered_positions, gathered_segments = positions, segments
    if at.context > 1:
        ranks = [_context_rows(starts, padded, context=at.context, rank=r) for r in range(at.context)]
        gathered_positions, gathered_segments = positions[torch.cat(ranks)], segments[torch.cat(ranks)]
        here = ranks[at.context_rank]
        positions, segments = positions[here], segments[here]
        buckets, slot_row, row_slot = (), here.new_zeros(0), here.new_zeros(0)
    else:
        buckets, slot_row, row_slot = _attention_slots(padded.tolist(), starts.tolist())
    held, first, left = held_tokens(laid.real, padded, at=at), laid.source[segments] * row_length, laid.real[segments]
    index = torch.where(positions < left, first + held.columns(segments, positions), -1)
    next_index = torch.where(positions + 1 < left, first + held.columns(segments, positions + 1), -1)
    return PackedRows(
        index=index,
        next_index=next_index,
        positions=positions,
        segments=segments,
        router_index=index.chunk(at.tensor)[at.tensor_rank],
        buckets=buckets,
        slot_row=slot_row,
        row_slot=row_slot,
        gathered_positions=gathered_positions,
        gathered_segments=gathered_segments,
        boundaries=torch.cat((starts, starts[-1:] + padded[-1:])).to(torch.int32),
        longest=int(padded.max()),
    )


def router_index(
    lengths: Sequence[int], indices: Sequence[int], *, row_length: int, at: Coordinates, packing: bool = True
) -> Tensor:
    """int64 [t / tensor]: where the tokens that the routers at `at` see lie in the flattened, whole [S * T] batch.

    -1 for padding. Arguments as of `pack_rows`.
    """
    laid = _lay_end_to_end(lengths, indices, at=at, packing=packing)
    positions, segments = laid.positions, laid.segments
    if at.context > 1:
        here = _context_rows(laid.starts, laid.padded, context=at.context, rank=at.context_rank)
        positions, segments = positions[here], segments[here]
    index = torch.where(positions < laid.real[segments], laid.source[segments] * row_length + positions, -1)
    return index.chunk(at.tensor)[at.tensor_rank]


def take_rows(values: Tensor, index: Tensor, *, fill: float) -> Tensor:
    """[t, ...] entries of `values` [S, T, ...] at flattened `index` [t]; `fill` where the index is -1."""
    flat, absent = values.flatten(0, 1), index < 0
    if not len(flat):  # a rank without tokens
        return flat.new_full((len(index), *flat.shape[1:]), fill)
    taken = flat[index.clamp(min=0)]
    return taken.masked_fill(absent.view(-1, *(1,) * (taken.dim() - 1)), fill)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTokens:
    """Which tokens of n sequences a context rank holds: those it reads, and those they predict.

    begins, ends: int64 [n, 2], of each sequence two ranges of positions, the second behind the first; each is a chunk
    that the rank reads and the token after it. Held tokens lie in the order of their positions.
    """

    begins: Tensor
    ends: Tensor

    @property
    def counts(self) -> Tensor:
        """int64 [n]."""
        return (self.ends - self.begins).sum(1)

    def columns(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """int64 [t]: where tokens that are held lie among those of their sequence, from their positions [t]."""
        first = positions < self.ends[sequences, 0]
        between = self.begins[:, 1] - self.ends[:, 0]
        return positions - self.begins[sequences, 0] - torch.where(first, 0, between[sequences])

    def positions(self, *, width: int) -> Tensor:
        """int64 [n, width]: the position of each token held; -1 after the last."""
        columns = torch.arange(width).expand(len(self.begins), width)
        in_first = (self.ends - self.begins)[:, :1]
        found = torch.where(columns < in_first, self.begins[:, :1] + columns, self.begins[:, 1:] + columns - in_first)
        return torch.where(columns < self.counts.unsqueeze(1), found, -1)


def held_tokens(real: Tensor, padded: Tensor, *, at: Coordinates) -> HeldTokens:
    """What the context rank at `at` holds of sequences of `real` [n] tokens that are laid out as `padded` [n] rows."""
    if at.context == 1:
        return HeldTokens(begins=torch.stack((torch.zeros_like(real), real), 1), ends=torch.stack((real, real), 1))
    chunk = padded // (2 * at.context)
    begins = torch.stack((at.context_rank * chunk, (2 * at.context - 1 - at.context_rank) * chunk), dim=1)
    ends = torch.minimum(begins + chunk.unsqueeze(1) + 1, real.unsqueeze(1))
    begins = torch.minimum(begins, ends)
    begins[:, 1] = torch.maximum(begins[:, 1], ends[:, 0])  # neighbours: the token after the first begins the second
    ends[:, 1] = torch.maximum(ends[:, 1], begins[:, 1])
    return HeldTokens(begins=begins, ends=ends)


def padded_lengths(lengths: Sequence[int], indices: Sequence[int], *, at: Coordinates, packing: bool) -> Tensor:
    """int64 [n]: rows of each sequence of a micro-batch over all context ranks; arguments as of `pack_rows`."""
    multiple = 2 * at.context if at.context > 1 else 1
    real = torch.tensor([lengths[i] for i in indices], dtype=torch.int64)
    padded = (real + multiple - 1) // multiple * multiple
    return torch.full_like(padded, int(padded.max())) if len(real) and not packing else padded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Laid:
    """Sequences end to end before context parallelism takes its part; the last may be padding.

    real, padded, starts: int64 [sequences], tokens with and without padding, and the first row of each.
    source: int64 [sequences], which sequence of the batch each is. segments, positions: int64 [t], as in PackedRows.
    """

    real: Tensor
    padded: Tensor
    starts: Tensor
    source: Tensor
    segments: Tensor
    positions: Tensor


def _lay_end_to_end(lengths: Sequence[int], indices: Sequence[int], *, at: Coordinates, packing: bool) -> _Laid:
    real = torch.tensor([lengths[i] for i in indices], dtype=torch.int64)
    padded = padded_lengths(lengths, indices, at=at, packing=packing)
    rows, whole = int(padded.sum()), at.tensor * at.context * (2 if at.context > 1 else 1)
    tail = -rows % whole if rows else whole
    if tail:  # padding is a sequence of its own: every row has a slot, and it sees nothing real
        real, padded = torch.cat([real, real.new_zeros(1)]), torch.cat([padded, padded.new_full((1,), tail)])
    source = torch.tensor([*indices, *([0] if tail else [])], dtype=torch.int64)

    segments = torch.repeat_interleave(torch.arange(len(padded)), padded)
    starts = torch.cumsum(padded, 0) - padded
    positions = torch.arange(len(segments)) - starts[segments]
    return _Laid(real=real, padded=padded, starts=starts, source=source, segments=segments, positions=positions)


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
