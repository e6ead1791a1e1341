"""Plans of micro-batches."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from async_rl.trainer.batch.packing import plan_micro_batches

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


def cost(micro_batch, lengths, *, padded):
    held = [lengths[i] for i in micro_batch]
    return max(held) * len(held) if padded else sum(held)


@given(LENGTHS, st.integers(1, 800), st.integers(1, 5), st.booleans())
def test_a_plan_holds_every_sequence_once_within_its_bounds(lengths, max_tokens, num_ranks, padded):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, num_ranks=num_ranks, padded=padded)
    micro_batches = [micro_batch for rank in plan for micro_batch in rank]
    assert sorted(i for micro_batch in micro_batches for i in micro_batch) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    for micro_batch in micro_batches:
        assert len(micro_batch) <= 1 or cost(micro_batch, lengths, padded=padded) <= max_tokens


@given(LENGTHS.filter(len), st.integers(1, 800), st.integers(1, 3), st.booleans(), st.integers(1, 4))
@example([10] * 4, 20, 1, False, 3)  # two micro-batches are as good as three
def test_the_number_of_micro_batches_is_the_next_multiple(lengths, max_tokens, num_ranks, padded, multiple):
    limits = {"max_tokens": max_tokens, "num_ranks": num_ranks, "padded": padded}
    free = plan_micro_batches(lengths, **limits)
    plan = plan_micro_batches(lengths, **limits, multiple=multiple)
    assert {len(rank) for rank in plan} == {-(-len(free[0]) // multiple) * multiple}
    assert sorted(i for rank in plan for micro_batch in rank for i in micro_batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5))
def test_ranks_differ_by_at_most_one_sequence_in_tokens(lengths, num_ranks):
    plan = plan_micro_batches(lengths, max_tokens=500, num_ranks=num_ranks)
    loads = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(LENGTHS, st.integers(1, 800), st.integers(1, 3))
def test_sequences_of_similar_length_share_a_micro_batch(lengths, max_tokens, num_ranks):
    for rank in plan_micro_batches(lengths, max_tokens=max_tokens, num_ranks=num_ranks):
        in_order = [lengths[i] for micro_batch in rank for i in micro_batch]
        assert in_order == sorted(in_order, reverse=True)


def test_the_parts_of_a_rank_are_about_equal():
    ((*parts,),) = plan_micro_batches([50] * 9, max_tokens=400, num_ranks=1)
    assert sorted(len(part) for part in parts) == [4, 5]


def test_a_rank_without_sequences_takes_part_with_empty_micro_batches():
    plan = plan_micro_batches([30], max_tokens=100, num_ranks=3)
    assert sorted(plan) == [[[]], [[]], [[0]]]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_ranks", "name"),
    [([3], 0, 1, "max_tokens"), ([3], 1, 0, "num_ranks"), ([3, 0], 1, 1, "tokens")],
)
def test_bad_arguments_of_a_plan_are_refused(lengths, max_tokens, num_ranks, name):
    with pytest.raises(ValueError, match=name):
        plan_micro_batches(lengths, max_tokens=max_tokens, num_ranks=num_ranks)
