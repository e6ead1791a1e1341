"""Forests: a node is what sequences share, by tokens and rows, with and without their content."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.batch.forest import forest_of_prefixes, prefixes_of, shared_prefixes
from message_queue.training_sequence import NOT_SAMPLED, RowRun, TrainingSequence
from tests.helpers.forests import branching, forest_of_lists

COLUMNS = ("sequence", "start", "length", "parent", "uses", "leaf")


def sequence(tokens, rows=None, given=()):
    """A sequence of numbers, whose position i has the row (rows[i], 9), given by an engine if given[i]."""
    runs = tuple(RowRun(1, 3 if by_engine else NOT_SAMPLED) for by_engine in given)
    return TrainingSequence(
        token_ids=np.array([*tokens], np.int32),
        runs=(),
        logprobs=np.zeros(0, np.float32),
        rows=None if rows is None else np.array([[[row, 9]] for row in rows], np.uint8).reshape(-1, 1, 2),
        row_runs=runs,
    )


def routed(tokens, rows):
    """A sequence with rows by the digits of `rows`; "-" is a row that no engine gave."""
    return sequence(tokens.encode(), [0 if r == "-" else int(r) for r in rows], [r != "-" for r in rows])


def columns(forest):
    return {name: getattr(forest, name).tolist() for name in COLUMNS}


def test_the_documented_forest():
    found = forest_of_lists([b"abcde", b"abx", b"abcy"])
    assert columns(found) == {
        "sequence": [0, 0, 0, 2, 1],
        "start": [0, 2, 3, 3, 2],
        "length": [2, 1, 2, 1, 1],
        "parent": [-1, 0, 1, 1, 0],
        "uses": [3, 2, 1, 1, 1],
        "leaf": [2, 4, 3],
    }
    assert found.path(2) == [3, 1, 0]
    assert prefixes_of([sequence(each) for each in (b"abcde", b"abx", b"abcy")]) == [(-1, 0), (0, 2), (0, 3)]


@given(branching())
def test_nodes_are_the_different_prefixes(lists):
    forest = forest_of_lists(lists)
    prefixes = [tuple(each[:end]) for each in lists for end in range(1, len(each) + 1)]
    assert forest.lengths.tolist() == [len(each) for each in lists]
    assert (int(forest.length.sum()), int((forest.length * forest.uses).sum())) == (len(set(prefixes)), len(prefixes))
    for number, each in enumerate(lists):
        for node in forest.path(number):
            start, end = forest.start[node], forest.start[node] + forest.length[node]
            first = lists[forest.sequence[node]]
            assert first[:end] == each[:end]
            assert forest.uses[node] == sum(other[:end] == each[:end] for other in lists)
            assert forest.parent[node] < node
            assert start == 0 if forest.parent[node] < 0 else start > 0


@given(branching(), st.data())
def test_the_forest_of_some_sequences_follows_from_the_prefixes_of_all(lists, data):
    of = sorted(data.draw(st.sets(st.integers(0, len(lists) - 1), min_size=1)))
    prefixes = prefixes_of([sequence(each) for each in lists])
    found = forest_of_prefixes([len(each) for each in lists], prefixes, of)
    assert columns(found) == columns(forest_of_lists([lists[number] for number in of]))


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (("abcd", "1234"), ("abcd", "1234"), 4),
        (("abcd", "1234"), ("abxd", "1234"), 2),
        (("abcd", "1234"), ("abcd", "1274"), 2),
        (("abcd", "1234"), ("abcd", "1334"), 1),
        (("abcd", "123"), ("abcde", "1234"), 3),
        (("abcd", "12--"), ("abcd", "12--"), 4),
        (("abcd", "1-3-"), ("abcd", "1-3-"), 4),
        (("abcd", "1--"), ("abcd", "10-"), 1),
        (("abcd", "12"), ("abcd", "12-"), 4),
        (("abcd", ""), ("abcd", "1"), 0),
    ],
)
def test_a_prefix_ends_at_the_first_other_token_or_row(first, second, shared):
    """Rows that no engine gave are those of the live router, which decides alike over the same prefix."""
    sequences = [routed(*first), routed(*second)]
    for each in (sequences, sequences[::-1]):
        assert prefixes_of(each)[1] == ((0, shared) if shared else (-1, 0))
        tokens = sum(map(len, each))
        assert shared_prefixes(each, with_rows=True).length.sum() == tokens - shared
    same = next((i for i, (a, b) in enumerate(zip(first[0], second[0], strict=False)) if a != b), 4)
    assert shared_prefixes(sequences, with_rows=False).length.sum() == tokens - same
