"""Model chunks of a virtual pipeline share micro-batches."""

import weakref

from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.forward_backward import _for_each_chunk


class Built:
    """Stands for a micro-batch."""

    def __init__(self, number):
        self.number = number


@given(st.integers(1, 3), st.integers(0, 6), st.randoms(use_true_random=False))
def test_all_chunks_take_the_same_micro_batches_and_none_is_kept(chunks, count, random):
    live = weakref.WeakValueDictionary()

    def build(number):
        live[number] = made = Built(number)
        return made

    sources = _for_each_chunk(map(build, range(count)), chunks=chunks)
    order = [chunk for chunk in range(chunks) for _ in range(count)]
    random.shuffle(order)
    taken = [[] for _ in sources]
    for chunk in order:
        taken[chunk].append(next(sources[chunk]).number)
        ahead, behind = max(map(len, taken)), min(map(len, taken))
        assert set(live) == set(range(behind, ahead)), "built, and not taken by all"
    assert all(next(source, None) is None for source in sources)
    assert all(own == list(range(count)) for own in taken)
