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
