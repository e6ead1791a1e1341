"""Expert sets by their rank: nothing but the order is lost, and a set takes about the fewest bits there are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from message_queue.tokens import ContractError
from message_queue.wire.rank_code import RankCode

SHAPES = [(1, 1), (8, 1), (8, 2), (8, 8), (16, 4), (64, 6), (64, 22), (128, 8), (256, 8), (384, 8), (512, 8)]
SHAPES += [(70, 66), (512, 10), (768, 12), (512, 22)]  # whose tables or ranks take more than 64 bits


def random_sets(count, *, num_experts, top_k, seed=0):
    """[count, top_k], each in the order of the draw; the first two are the ones of lowest and highest rank."""
    rng = np.random.default_rng(seed)
    sets = rng.random((count, num_experts)).argsort(axis=1)[:, :top_k]
    sets[:1], sets[1:2] = np.arange(top_k), np.arange(num_experts - top_k, num_experts)
    return sets.astype(np.uint8 if num_experts <= 256 else np.uint16)


@settings(deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from([0, 1, 2, 63, 64, 65, 700]), st.integers(0, 99))
def test_sets_come_back_ascending(shape, count, seed):
    num_experts, top_k = shape
    code = RankCode(num_experts=num_experts, top_k=top_k)
    sets = random_sets(count, num_experts=num_experts, top_k=top_k, seed=seed)
    coded = code.encode(sets)
    assert (coded.dtype, len(coded)) == (np.uint8, code.coded_bytes(count))
    back = code.decode(coded, count)
    assert back.dtype == sets.dtype
    assert np.array_equal(back, np.sort(sets, axis=1))


@pytest.mark.parametrize(("num_experts", "top_k"), [(12, 4), (20, 3), (9, 9), (7, 1)])
def test_every_set_of_a_small_model_comes_back(num_experts, top_k):
    code = RankCode(num_experts=num_experts, top_k=top_k)
    every = np.array(list(itertools.combinations(range(num_experts), top_k)), np.uint8)
    coded = code.encode(every[:, ::-1])
    assert np.array_equal(code.decode(coded, len(every)), every)


@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES[4:])
def test_sets_at_the_steps_of_each_member_come_back(num_experts, top_k):
    """Where the largest member goes up by one is where an estimate of it is worst."""
    below = np.arange(top_k - 1)
    first = [[*below, largest] for largest in range(top_k - 1, num_experts)]
    last = [range(largest - top_k + 1, largest + 1) for largest in range(top_k - 1, num_experts)]
    sets = np.array([*first, *last], np.uint16 if num_experts > 256 else np.uint8)
    code = RankCode(num_experts=num_experts, top_k=top_k)
    assert np.array_equal(code.decode(code.encode(sets), len(sets)), sets)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "floor", "over"),
    [
        (128, 8, 40.38, 1.02),
        (8, 2, 4.81, 1.01),
        (64, 6, 26.16, 1.02),
        (256, 8, 48.54, 1.02),
        (384, 8, 53.27, 1.02),
        (512, 10, 68.08, 1.02),
        (512, 22, 127.41, 1.02),
    ],
)
def test_a_set_takes_about_the_fewest_bits_there_are(num_experts, top_k, floor, over):
    code = RankCode(num_experts=num_experts, top_k=top_k)
    count = 5000
    coded = code.encode(random_sets(count, num_experts=num_experts, top_k=top_k))
    assert code.floor_bits == pytest.approx(floor, abs=0.005)
    assert 1 <= 8 * len(coded) / count / code.floor_bits <= over
    assert code.bits_per_set == pytest.approx(8 * len(coded) / count, rel=1e-2)


def test_the_layers_of_one_row_take_about_the_fewest_bits_too():
    code = RankCode(num_experts=128, top_k=8)
    assert 8 * len(code.encode(random_sets(48, num_experts=128, top_k=8))) / 48 <= 1.05 * code.floor_bits


def test_sets_of_more_bits_than_two_words_hold_are_refused():
    with pytest.raises(ContractError, match=r"24 of 512 experts takes 136\.\d bits a set, more than 128; set .*=false"):
        RankCode(num_experts=512, top_k=24)


def test_bytes_of_another_number_of_sets_are_refused():
    code = RankCode(num_experts=128, top_k=8)
    coded = code.encode(random_sets(9, num_experts=128, top_k=8))
    with pytest.raises(ContractError, match="rank-coded rows have 47 bytes; 8 sets of 8 of 128 experts take 41"):
        code.decode(coded, 8)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (512, 10), (8, 2)])
def test_a_rank_past_the_last_is_refused(num_experts, top_k):
    code = RankCode(num_experts=num_experts, top_k=top_k)
    with pytest.raises(
        ContractError, match=rf"have rank \d+; there are {math.comb(num_experts, top_k)} sets of {top_k}"
    ):
        code.decode(np.full(code.coded_bytes(33), 255, np.uint8), 33)


def test_the_set_of_the_last_rank_comes_back():
    for num_experts, top_k in SHAPES:
        code = RankCode(num_experts=num_experts, top_k=top_k)
        last = np.arange(num_experts - top_k, num_experts)[None].astype(np.uint16)
        assert np.array_equal(code.decode(code.encode(last), 1), last)
