"""Plans of micro-batches."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from async_rl.trainer.batch import packing
from async_rl.trainer.batch.forest import Forest
from tests.helpers.forests import branching, forest_of_lists

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


def plan_micro_batches(lengths, **settings):
    """A plan of sequences that share nothing."""
    return packing.plan_micro_batches(Forest.separate(lengths), **settings)


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


def groups(*shapes):
    """The forest of groups of (prompt, replies of equal length, their number)."""
    lists = [
        [number] * prompt + [100 + reply] * tokens
        for number, (prompt, tokens, count) in enumerate(shapes)
        for reply in range(count)
    ]
    return forest_of_lists(lists)


def computed(forest, numbers):
    """Tokens of a micro-batch, a shared one once."""
    return sum(int(forest.length[node]) for node in {node for n in numbers for node in forest.path(n)})


@given(branching(), st.integers(1, 200), st.integers(1, 3), st.integers(1, 3))
def test_a_micro_batch_holds_a_shared_token_once_within_its_bound(lists, max_tokens, num_ranks, multiple):
    forest = forest_of_lists(lists)
    plan = packing.plan_micro_batches(forest, max_tokens=max_tokens, num_ranks=num_ranks, multiple=multiple)
    assert sorted(n for rank in plan for numbers in rank for n in numbers) == list(range(len(lists)))
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple == 0
    for numbers in (numbers for rank in plan for numbers in rank):
        assert len(numbers) <= 1 or computed(forest, numbers) <= max_tokens


def test_the_documented_plans():
    plain = Forest.separate([5, 4, 3, 2, 2])
    assert packing.plan_micro_batches(plain, max_tokens=6, num_ranks=2) == [[[0], [3, 4]], [[1], [2]]]
    shared = forest_of_lists([[0] * 5, [1, 1, 2, 2], [1, 1, 3], [1, 1], [1, 1]])
    assert packing.plan_micro_batches(shared, max_tokens=6, num_ranks=2) == [[[0]], [[3, 4, 1, 2]]]


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((1000, 2, 4), [0, 4]), ((10, 100, 4), [2, 2]), ((100, 100, 4), [2, 2]), ((1000, 10, 4), [2, 2])],
    ids=["hardly faster", "short prompt", "equal", "long prompt"],
)
def test_a_group_is_split_if_the_slowest_rank_gets_faster(shape, parts):
    plan = packing.plan_micro_batches(groups(shape), max_tokens=4000, num_ranks=2)
    assert sorted(sum(map(len, rank)) for rank in plan) == parts


def test_ranks_are_balanced_by_computed_tokens_and_by_attention():
    forest = groups((300, 100, 6), (20, 300, 3))  # 900 and 920 tokens; 2,400 and 960 with each from its first token
    plan = packing.plan_micro_batches(forest, max_tokens=4000, num_ranks=2)
    assert sorted(sorted(n for numbers in rank for n in numbers) for rank in plan) == [[*range(6)], [6, 7, 8]]
    long = Forest.separate([1000, *[100] * 10])
    loads = [
        sum(100 for rank in plan if [0] not in rank for numbers in rank for _ in numbers)
        for plan in (packing.plan_micro_batches(long, max_tokens=1000, num_ranks=2, pair_cost=c) for c in (0.0, 1.0))
    ]
    assert loads == [1000, 1000], "the long sequence is alone"
    mixed = Forest.separate([1000, *[100] * 20])
    of_long = [
        next(sum(map(len, rank)) for rank in plan if any(0 in numbers for numbers in rank))
        for plan in (packing.plan_micro_batches(mixed, max_tokens=1500, num_ranks=2, pair_cost=c) for c in (0.0, 0.001))
    ]
    assert of_long[0] > of_long[1] >= 1, "its attention costs as much as short sequences"


def test_sequences_of_a_unit_stay_together():
    forest = groups((50, 10, 4), (50, 10, 4))
    units = [[0, 5], [1, 4], [2], [3], [6], [7]]
    plan = packing.plan_micro_batches(forest, units=units, max_tokens=130, num_ranks=2)
    found = [set(numbers) for rank in plan for numbers in rank]
    assert all(any(set(unit) <= numbers for numbers in found) for unit in units)
