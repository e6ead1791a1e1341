"""SamplingSupport: packing is lossless, and sets that the sampled tokens cannot come from are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from message_queue.errors import ContractError
from message_queue.sampling_support import SamplingSupport
from tests.helpers.groups import sets_of, support_of

IDS = st.one_of(st.integers(0, 200), st.integers(0, 2**31 - 1))
SETS = st.lists(st.sets(IDS, max_size=6).map(sorted), max_size=8)


@given(SETS)
def test_support_unpacks_to_the_sets_it_was_packed_from(sets):
    assert sets_of(support_of(sets)) == sets


@given(SETS, st.data())
def test_support_of_parts_joins_to_the_whole(sets, data):
    cut = data.draw(st.integers(0, len(sets)))
    support = support_of(sets)
    parts = [support.part(0, cut), support.part(cut, len(sets))]
    assert [sets_of(part) for part in parts] == [sets[:cut], sets[cut:]]
    joined = SamplingSupport.join(parts)
    assert joined.offsets.tolist() == support.offsets.tolist()
    assert joined.packed.tobytes() == support.packed.tobytes()


@given(SETS.filter(bool), st.data())
def test_support_takes_positions_in_the_order_asked_for(sets, data):
    places = data.draw(st.lists(st.integers(0, len(sets) - 1), max_size=8))
    assert sets_of(support_of(sets).take(np.array(places, np.int64))) == [sets[place] for place in places]


def test_support_has_the_bytes_of_its_docstring():
    support = support_of([[7], [], [5, 6, 300]])
    assert support.packed.tobytes() == bytes([7, 5, 1, 0xA6, 2])
    assert support.offsets.tolist() == [0, 1, 1, 5]
    assert sets_of(SamplingSupport.whole(3)) == [[], [], []]


def test_support_of_top_p_takes_at_most_40_bytes_a_token():
    """Over 150,000 tokens, with entropies of a reasoning model at temperature 1, and ids without any order.

    Measured on Qwen3-8B (arXiv 2506.01939): half of the tokens are below 0.01 nat and a fifth above 0.672. That fifth
    is taken at 2 nats here. If probabilities fall as 1 / rank^s, top-p 0.95 keeps 1 token of 150,000 at 0.01 nat, 3
    at 0.672 and 22 at 2.
    """
    rng = np.random.default_rng(0)
    kept = [1] * 500 + [3] * 300 + [22] * 200
    sets = [sorted(rng.choice(150_000, count, replace=False).tolist()) for count in kept]
    support = support_of(sets)
    assert (support.offsets.nbytes + support.packed.nbytes) / len(sets) <= 40


@pytest.mark.parametrize(
    ("sets", "tokens"),
    [([[1, 4]], [2]), ([[1, 4], [3]], [1]), ([[1, 40]], [1])],
    ids=["without the sampled token", "another number of positions", "outside the vocabulary"],
)
def test_support_check_refuses_sets_without_the_tokens(sets, tokens):
    support_of([[1, 4], [], [39]]).check(np.array([4, 7, 39], np.int32), vocab_size=40)
    with pytest.raises(ContractError, match="SamplingSupport"):
        support_of(sets).check(np.array(tokens, np.int32), vocab_size=40)


@pytest.mark.parametrize(
    ("counts", "ids"),
    [([2], [4, 4]), ([2], [4, 1]), ([1], [-1]), ([2], [4]), ([1], [2**31])],
    ids=["twice", "descending", "negative", "too few", "too large"],
)
def test_support_refuses_ids_that_do_not_ascend(counts, ids):
    with pytest.raises(ContractError, match="SamplingSupport"):
        SamplingSupport.pack(np.array(counts, np.int64), np.array(ids, np.int64))


def test_support_refuses_offsets_and_bytes_that_do_not_fit():
    for offsets in ([0, 1], [0, 2, 1, 2], [1, 2], [0, 3]):  # in an id, falls, late, long
        with pytest.raises(ContractError, match=r"SamplingSupport\.offsets"):
            SamplingSupport(offsets=np.array(offsets, np.int32), packed=np.array([0x80, 1], np.uint8))
    gap_of_zero = SamplingSupport(offsets=np.array([0, 2], np.int32), packed=np.array([4, 0], np.uint8))
    with pytest.raises(ContractError, match="SamplingSupport"):
        gap_of_zero.check(np.array([4], np.int32), vocab_size=40)
