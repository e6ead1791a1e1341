"""Rows of a micro-batch: nothing lost, neighbours right, attention slots consistent, ranks together whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.batch.micro_batch import Coordinates, pack_rows, take_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
PARTS = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3)])


def places(tensor, context):
    return [
        Coordinates(tensor=tensor, tensor_rank=t, context=context, context_rank=c)
        for c in range(context)
        for t in range(tensor)
    ]


def rows_of_all_ranks(lengths, tensor, context, packing=True):
    return [pack_rows(lengths, at=at, packing=packing) for at in places(tensor, context)]


@given(LENGTHS, PARTS, st.booleans())
def test_the_rows_of_all_context_ranks_are_every_token_once(lengths, parts, packing):
    tensor, _ = parts
    tokens = torch.cat([rows.index for rows in rows_of_all_ranks(lengths, *parts, packing)[::tensor]])
    assert sorted(tokens[tokens >= 0].tolist()) == list(range(sum(lengths)))


@given(LENGTHS, PARTS, st.booleans())
def test_a_row_says_of_which_sequence_and_position_its_token_is(lengths, parts, packing):
    expected = [(s, p) for s, n in enumerate(lengths) for p in range(n)]
    for rows in rows_of_all_ranks(lengths, *parts, packing):
        real = rows.index >= 0
        found = zip(rows.segments[real].tolist(), rows.positions[real].tolist(), strict=True)
        assert list(found) == [expected[token] for token in rows.index[real].tolist()]
        assert (rows.segments.diff() >= 0).all()


@given(LENGTHS, PARTS)
def test_ranks_have_rows_of_equal_number_that_tensor_parallelism_divides(lengths, parts):
    tensor, context = parts
    counts = {len(rows) for rows in rows_of_all_ranks(lengths, tensor, context)}
    assert len(counts) == 1
    assert counts.pop() % tensor == 0


@given(LENGTHS, PARTS, st.booleans())
def test_a_row_predicts_the_next_token_of_its_sequence(lengths, parts, packing):
    for rows in rows_of_all_ranks(lengths, *parts, packing):
        real = rows.index >= 0
        last = torch.tensor(lengths)[rows.segments[real]] - 1
        assert torch.equal(rows.next_index[real] >= 0, rows.positions[real] < last)
        assert (rows.next_index[~real] == -1).all()
        has_next = rows.next_index >= 0
        assert torch.equal(rows.next_index[has_next], rows.index[has_next] + 1)


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


def test_rows_are_taken_with_a_fill_for_padding():
    assert take_rows(torch.arange(6), torch.tensor([4, -1, 0]), fill=9).tolist() == [4, 9, 0]


def test_a_rank_without_tokens_takes_padding():
    assert take_rows(torch.zeros(0, dtype=torch.int64), torch.tensor([-1, -1]), fill=7).tolist() == [7, 7]
