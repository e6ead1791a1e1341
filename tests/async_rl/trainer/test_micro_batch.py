"""Rows of a micro-batch: tokens, their neighbours and their attention slots on all ranks together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.batch.micro_batch import Coordinates, pack_rows, take_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
PARTS = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3)])


def rows_of_all_ranks(lengths, tensor, context, packing=True):
    places = [
        Coordinates(tensor=tensor, tensor_rank=t, context=context, context_rank=c)
        for c in range(context)
        for t in range(tensor)
    ]
    return [pack_rows(lengths, at=at, packing=packing) for at in places]


def places(rows):
    """(sequence, position) of each row."""
    return [*zip(rows.segments.tolist(), rows.positions.tolist(), strict=True)]


@given(LENGTHS, PARTS, st.booleans())
def test_rows_of_all_context_ranks_are_every_token_once(lengths, parts, packing):
    tensor, _ = parts
    of_ranks = rows_of_all_ranks(lengths, *parts, packing)
    tokens = torch.cat([rows.index for rows in of_ranks[::tensor]])
    assert sorted(tokens[tokens >= 0].tolist()) == list(range(sum(lengths)))
    counts = {len(rows) for rows in of_ranks}
    assert len(counts) == 1, "collectives need as many rows on each rank"
    assert counts.pop() % tensor == 0


@given(LENGTHS, PARTS, st.booleans())
def test_a_row_has_the_sequence_and_position_of_its_token(lengths, parts, packing):
    expected = [(s, p) for s, n in enumerate(lengths) for p in range(n)]
    for rows in rows_of_all_ranks(lengths, *parts, packing):
        real = rows.index >= 0
        found = zip(rows.segments[real].tolist(), rows.positions[real].tolist(), strict=True)
        assert list(found) == [expected[token] for token in rows.index[real].tolist()]
        assert (rows.segments.diff() >= 0).all()


@given(LENGTHS, st.booleans())
def test_every_row_has_a_slot_behind_those_of_its_sequence(lengths, packing):
    (rows,) = rows_of_all_ranks(lengths, 1, 1, packing)
    assert torch.equal(rows.slot_row[rows.row_slot], torch.arange(len(rows)))
    start = 0
    for bucket in rows.buckets:
        size = bucket.sequences * bucket.width
        held = rows.slot_row[start : start + size].view(bucket.sequences, bucket.width)
        used = torch.isin(start + torch.arange(size), rows.row_slot).view(held.shape)
        for line, real in zip(held, used, strict=True):
            count = int(real.sum())
            assert real[:count].all()  # padding is on the right
            assert torch.equal(rows.positions[line[:count]], torch.arange(count))
            assert rows.segments[line[:count]].unique().numel() == 1
        start += size
    assert start == len(rows.slot_row)


@given(st.lists(st.integers(0, 40), max_size=12), st.sampled_from([(1, 2), (2, 2), (1, 3), (1, 4)]), st.booleans())
def test_a_row_of_a_context_rank_attends_to_all_tokens_up_to_its_own(lengths, parts, packing):
    tensor, context = parts
    of_ranks = rows_of_all_ranks(lengths, *parts, packing)[::tensor]
    rank_after_rank = [pair for rows in of_ranks for pair in places(rows)]
    for rows in of_ranks:
        assert torch.equal(rows.slot_row[rows.row_slot], torch.arange(len(rows) * context))
        slots = [rank_after_rank[row] for row in rows.slot_row.tolist()]
        found = []
        for bucket in rows.buckets:
            taken, slots = slots[: bucket.sequences * bucket.width], slots[bucket.sequences * bucket.width :]
            for line in (taken[i : i + bucket.width] for i in range(0, len(taken), bucket.width)):
                found += [line[: end - bucket.chunk + i + 1] for end in bucket.ends for i in range(bucket.chunk)]
        assert slots == []
        assert found == [[(segment, p) for p in range(position + 1)] for segment, position in places(rows)]
        assert sum(bucket.queries for bucket in rows.buckets) == len(rows)


def test_sequences_of_one_length_are_a_bucket_of_each_context_rank():
    (first, second) = rows_of_all_ranks([8, 7, 3], 1, 2)
    assert [(b.sequences, b.width, b.chunk, b.ends) for b in first.buckets] == [(2, 8, 2, (2, 8)), (1, 4, 1, (1, 4))]
    assert [(b.sequences, b.width, b.chunk, b.ends) for b in second.buckets] == [(2, 8, 2, (4, 6)), (1, 4, 1, (2, 3))]


@given(st.lists(st.integers(20, 60), min_size=2, max_size=40))
def test_attention_slots_waste_little(lengths):
    (rows,) = rows_of_all_ranks(lengths, 1, 1)
    assert len(rows.slot_row) <= len(rows) / (1 - 0.15) + 1


def test_an_empty_micro_batch_is_padding():
    for at in (Coordinates(), Coordinates(tensor=2), Coordinates(tensor=2, context=2)):
        rows = pack_rows([], at=at)
        assert len(rows) > 0
        assert (rows.index == -1).all()


@pytest.mark.parametrize(
    ("values", "index", "taken"), [(range(6), [4, -1, 0], [4, 9, 0]), ([], [-1, -1], [9, 9])], ids=["tokens", "none"]
)
def test_rows_are_taken_with_a_fill_for_padding(values, index, taken):
    assert take_rows(torch.tensor([*values], dtype=torch.int64), torch.tensor(index), fill=9).tolist() == taken
