"""Rows of a micro-batch: tokens, their neighbours and their attention slots on all ranks together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.batch.forest import Forest
from async_rl.trainer.batch.micro_batch import WASTE, Coordinates, pack_rows, take_rows
from tests.helpers.forests import branching, forest_of_lists

PARTS = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3)])


@st.composite
def packed(draw, parts=PARTS):
    """Lists of numbers, rows of all ranks, tensor-parallel size, and whether the lists share prefixes."""
    lists, (tensor, context) = draw(branching()), draw(parts)
    shares = draw(st.booleans())
    forest = forest_of_lists(lists) if shares else Forest.separate([len(each) for each in lists])
    packing = shares or draw(st.booleans())
    places = [
        Coordinates(tensor=tensor, tensor_rank=t, context=context, context_rank=c)
        for c in range(context)
        for t in range(tensor)
    ]
    rows = [pack_rows(forest, at=at, packing=packing) for at in places]
    return lists, rows, tensor, shares


def keys_of_rows(of_ranks):
    """For each rank: (row, rows of the keys that it attends to), counted over the ranks."""
    for rank, rows in enumerate(of_ranks):
        queries, keys = rows.queries.row.tolist(), rows.keys.row.tolist()
        slot_of = {slot: row for row, slot in enumerate(rows.queries.slot.tolist())}
        at_query = at_key = 0
        for spans, num_queries, num_keys in rows.buckets:
            for _ in range(spans):
                for i in range(num_queries):
                    if (row := slot_of.get(at_query + i)) is not None:
                        assert queries[at_query + i] == row
                        yield rank * len(rows) + row, keys[at_key : at_key + num_keys - num_queries + i + 1]
                at_query, at_key = at_query + num_queries, at_key + num_keys
        assert (at_query, at_key) == (len(queries), len(keys))


@given(packed())
def test_rows_of_all_context_ranks_are_every_token_of_the_forest_once(case):
    lists, of_ranks, tensor, shares = case
    starts = [sum(map(len, lists[:i])) for i in range(len(lists) + 1)]
    assert len({len(rows) for rows in of_ranks}) == 1, "collectives need as many rows on each rank"
    assert len(of_ranks[0]) % tensor == 0
    rows_of = [rows.token_row for rows in of_ranks[::tensor]]
    found = {}
    for sequence, each in enumerate(lists):
        for position in range(len(each)):
            token = starts[sequence] + position
            (place,) = [(rank, int(row[token])) for rank, row in enumerate(rows_of) if row[token] >= 0]
            prefix = tuple(each[: position + 1]) if shares else (sequence, position)
            assert found.setdefault(prefix, place) == place
            rank, row = place
            assert of_ranks[rank * tensor].positions[row] == position
    assert len(set(found.values())) == len(found)
    uses = torch.cat([rows.uses for rows in of_ranks[::tensor]])
    index = torch.cat([rows.index for rows in of_ranks[::tensor]])
    assert int(uses.count_nonzero()) == len(found) and int(uses.sum()) == starts[-1]
    assert torch.equal(index >= 0, uses > 0)


@given(packed())
def test_a_row_attends_to_the_tokens_of_its_path_up_to_its_own(case):
    lists, of_ranks, tensor, _ = case
    assert_each_row_attends_to_its_path(lists, of_ranks[::tensor])


def test_spans_that_begin_at_nearly_one_place_are_a_bucket():
    lists = [[stem] * length + [tail] * 40 for stem, length in ((5, 30), (6, 31)) for tail in (1, 2)]
    rows = pack_rows(forest_of_lists(lists), at=Coordinates())
    assert (4, 41, 71) in rows.buckets
    assert_each_row_attends_to_its_path(lists, [rows])


def assert_each_row_attends_to_its_path(lists, of_ranks):
    place = {}  # row, counted over the ranks -> the rows of its sequence up to it
    for start, each in zip([sum(map(len, lists[:i])) for i in range(len(lists))], lists, strict=True):
        own = []
        for token in range(start, start + len(each)):
            (row,) = [
                rank * len(rows) + int(rows.token_row[token])
                for rank, rows in enumerate(of_ranks)
                if rows.token_row[token] >= 0
            ]
            own.append(row)
            place[row] = list(own)
    found = dict(keys_of_rows(of_ranks))
    assert len(found) == sum(map(len, of_ranks))
    assert {row: found[row] for row in place} == place


@given(packed())
def test_slots_know_their_rows_and_rows_their_slots(case):
    _, of_ranks, _, _ = case
    for rows in of_ranks:
        assert rows.queries.first is None, "a row has one query"
        assert torch.equal(rows.queries.row[rows.queries.slot], torch.arange(len(rows)))
        counts = rows.keys.row[rows.keys.slot].bincount(minlength=1)
        assert (rows.keys.row[rows.keys.slot].diff() >= 0).all()
        if rows.keys.first is not None:
            ends = torch.cat((rows.keys.first[1:], torch.tensor([len(rows.keys.slot)])))
            assert torch.equal((ends - rows.keys.first)[: len(counts)], counts)


@given(st.lists(st.integers(20, 60), min_size=2, max_size=40))
def test_attention_slots_waste_little(lengths):
    rows = pack_rows(Forest.separate(lengths), at=Coordinates())
    assert rows.is_plain and rows.keys is rows.queries
    assert len(rows.queries.row) <= len(rows) / (1 - WASTE) + 1


def test_chunks_of_one_place_are_a_bucket_of_each_context_rank():
    first, second = (
        pack_rows(Forest.separate([8, 7, 3]), at=Coordinates(context=2, context_rank=rank)) for rank in range(2)
    )
    assert first.buckets == ((2, 2, 2), (1, 1, 1), (1, 1, 4), (2, 2, 8))
    assert second.buckets == ((1, 1, 2), (2, 2, 4), (1, 1, 3), (2, 2, 6))


def test_an_empty_micro_batch_is_padding():
    for at in (Coordinates(), Coordinates(tensor=2), Coordinates(tensor=2, context=2)):
        rows = pack_rows(Forest.separate([]), at=at)
        assert len(rows) > 0
        assert (rows.index == -1).all()


@pytest.mark.parametrize(
    ("values", "index", "taken"), [(range(6), [4, -1, 0], [4, 9, 0]), ([], [-1, -1], [9, 9])], ids=["tokens", "none"]
)
def test_rows_are_taken_with_a_fill_for_padding(values, index, taken):
    assert take_rows(torch.tensor([*values], dtype=torch.int64), torch.tensor(index), fill=9).tolist() == taken
