"""Random sequences with shared prefixes."""

import numpy as np
from hypothesis import strategies as st

from async_rl.trainer.batch.forest import Forest, shared_prefixes
from message_queue.training_sequence import TrainingSequence


@st.composite
def branching(draw, *, longest=40, most=8):
    """Lists of numbers, whose prefixes are often those of others; the numbers of two lists may meet again."""
    found = [[0]]
    for _ in range(draw(st.integers(0, most))):
        stem = draw(st.sampled_from([[], *found]))
        stem = stem[: draw(st.integers(0, len(stem)))]
        tail = draw(st.lists(st.integers(0, 2), min_size=not stem, max_size=longest - len(stem)))
        found.append([*stem, *tail])
    return draw(st.permutations(found)) if draw(st.booleans()) else found[1:] or found


def forest_of_lists(lists) -> Forest:
    """The forest of lists of numbers as tokens."""
    sequences = [
        TrainingSequence(
            token_ids=np.array([*each], np.int32), runs=(), logprobs=np.zeros(0, np.float32), rows=None, row_runs=()
        )
        for each in lists
    ]
    return shared_prefixes(sequences, with_rows=False)
