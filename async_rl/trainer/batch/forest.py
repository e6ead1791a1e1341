"""Forests: the tokens of sequences as runs in trees, so that a shared prefix exists once.

Two sequences share a position if all positions up to it have the same token and the same row. A position without a row
is shared only with positions without a row: the live router then sees the same input for both, and decides alike. So
sharing never changes the hidden state of a token. The version that sampled a token, the tokens that its sampler kept
and its logprob belong to the sequences: each sequence keeps its tokens in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from message_queue.training_sequence import BoolArray, TrainingSequence

Int64Array = NDArray[np.int64]
Prefix = tuple[int, int]  # (an earlier sequence, tokens of the longest prefix shared with one); (-1, 0) for none
Key = Callable[[int, int], Hashable]  # sequence, position
Common = Callable[[int, int, int], int]  # two sequences, position


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Runs of tokens without a branch (nodes), parents first; the runs from a root to a leaf are a sequence.

    The sequences 0: a b c d e, 1: a b x and 2: a b c y. The node 1 has the c that 0 and 2 share:

        node        0    1  2    3  4
        tokens      a b  c  d e  y  x
        sequence    0    0  0    2  1
        start       0    2  3    3  2
        length      2    1  2    1  1
        parent     -1    0  1    1  0
        uses        3    2  1    1  1        leaf   2  4  3
    """

    sequence: Int64Array
    """int64 [nodes], the first sequence that has the run."""
    start: Int64Array
    """int64 [nodes], position of the first token in its sequences."""
    length: Int64Array
    """int64 [nodes], tokens."""
    parent: Int64Array
    """int64 [nodes], the node before it; -1 for a root."""
    uses: Int64Array
    """int64 [nodes], sequences that have the run."""
    leaf: Int64Array
    """int64 [S], the last node of each sequence."""

    @classmethod
    def of(cls, nodes: Sequence[tuple[int, int, int, int, int]], leaf: Sequence[int]) -> Forest:
        """From (sequence, start, length, parent, uses) of each node."""
        columns = np.array(nodes, np.int64).reshape(-1, 5).T
        names = ("sequence", "start", "length", "parent", "uses")
        return cls(**dict(zip(names, columns, strict=True)), leaf=np.array(leaf, np.int64))

    @classmethod
    def separate(cls, lengths: Sequence[int]) -> Forest:
        """A root for each sequence, for sequences that share nothing."""
        return cls.of([(number, 0, length, -1, 1) for number, length in enumerate(lengths)], range(len(lengths)))

    @property
    def lengths(self) -> Int64Array:
        """int64 [S], tokens of each sequence."""
        return self.start[self.leaf] + self.length[self.leaf]

    def path(self, sequence: int) -> list[int]:
        """Nodes of a sequence, from its last to its root."""
        found = [int(self.leaf[sequence])]
        while (parent := int(self.parent[found[-1]])) >= 0:
            found.append(parent)
        return found


def forest_of(lengths: Sequence[int], *, key: Key, common: Common) -> Forest:
    """The forest of sequences with these lengths, at least 1 each. Parents are before children.

    Args:
        lengths: tokens of each sequence.
        key: equal for two sequences if they share a position; they share all before it.
        common: end of the positions that two sequences share; they share the given position and all before it.
    """
    nodes, leaf = list[tuple[int, int, int, int, int]](), [-1] * len(lengths)
    todo = list[tuple[list[int], int, int]]()  # sequences that share all positions up to `start`, and the node before

    def branch(members: Iterable[int], start: int, parent: int) -> None:
        apart: dict[Hashable, list[int]] = {}
        for number in members:
            apart.setdefault(key(number, start), []).append(number)
        todo.extend((together, start, parent) for together in reversed(apart.values()))

    branch(range(len(lengths)), 0, -1)
    while todo:
        members, start, parent = todo.pop()
        first, *others = members
        stop = min([lengths[first], *(common(first, other, start) for other in others)])
        for number in members:
            leaf[number] = len(nodes)  # overwritten by the nodes behind it
        nodes.append((first, start, stop - start, parent, len(members)))
        branch((number for number in members if lengths[number] > stop), stop, len(nodes) - 1)
    return Forest.of(nodes, leaf)


def shared_prefixes(sequences: Sequence[TrainingSequence], *, with_rows: bool) -> Forest:
    """The forest of the content of sequences; each has at least one token.

    Args:
        sequences: of any trajectories and groups.
        with_rows: whether the rows are replayed. If not, positions with other rows are shared too.
    """
    contents = [_Content.of(sequence, with_rows=with_rows) for sequence in sequences]
    return forest_of(
        [len(sequence) for sequence in sequences],
        key=lambda number, at: contents[number].key(at),
        common=lambda a, b, at: contents[a].common(contents[b], at),
    )


def prefixes_of(sequences: Sequence[TrainingSequence]) -> list[Prefix]:
    """The longest prefix of each sequence that an earlier one has too; see `Prefix`."""
    forest = shared_prefixes(sequences, with_rows=True)
    found: list[Prefix] = []
    for number in range(len(sequences)):
        shared = (node for node in forest.path(number) if forest.sequence[node] < number)
        node = next(shared, None)
        end = (-1, 0) if node is None else (int(forest.sequence[node]), int(forest.start[node] + forest.length[node]))
        found.append(end)
    return found


def forest_of_prefixes(lengths: Sequence[int], prefixes: Sequence[Prefix], of: Sequence[int]) -> Forest:
    """The forest of some sequences without their content.

    The sequences of the example of `Forest` have the prefixes (-1, 0), (0, 2) and (0, 3).

    Args:
        lengths: tokens of all sequences.
        prefixes: what `prefixes_of` has found for all.
        of: numbers of the sequences of the forest.
    """

    def key(number: int, at: int) -> Hashable:
        sequence = of[number]
        while prefixes[sequence][1] > at:
            sequence = prefixes[sequence][0]
        return sequence

    def common(a: int, b: int, _at: int) -> int:
        # What a sequence shares with one before it is at most its longest prefix.
        first, second = of[a], of[b]
        end = min(lengths[first], lengths[second])
        while first != second:
            first, second = min(first, second), max(first, second)
            second, shared = prefixes[second]
            end = min(end, shared)
        return end

    return forest_of([lengths[number] for number in of], key=key, common=common)


@dataclass(frozen=True, slots=True)
class _Content:
    """What positions must have in common to be shared."""

    token_ids: NDArray[np.int32]
    rows: NDArray[np.unsignedinteger]
    """[r, bytes of a row], no rows if they are not replayed."""
    given: BoolArray
    """bool [t], whether an engine gave the row."""

    @classmethod
    def of(cls, sequence: TrainingSequence, *, with_rows: bool) -> _Content:
        given = np.zeros(len(sequence), np.bool_)
        if not with_rows or sequence.rows is None:
            return cls(sequence.token_ids, np.zeros((0, 0), np.uint8), given)
        versions, counts = np.array([(run.version, run.rows) for run in sequence.row_runs], np.int64).reshape(-1, 2).T
        given[: counts.sum()] = (versions >= 0).repeat(counts)
        return cls(sequence.token_ids, sequence.rows.reshape(-1, math.prod(sequence.rows.shape[1:])), given)

    def key(self, at: int) -> Hashable:
        return int(self.token_ids[at]), self.rows[at].tobytes() if self.given[at] else None

    def common(self, other: _Content, at: int) -> int:
        end = min(len(self.token_ids), len(other.token_ids))
        end = at + _first(self.token_ids[at:end] != other.token_ids[at:end])
        end = at + _first(self.given[at:end] != other.given[at:end])
        end_of_rows = min(end, len(self.rows), len(other.rows))
        if end_of_rows <= at:
            return end
        differs = (self.rows[at:end_of_rows] != other.rows[at:end_of_rows]).any(1) & self.given[at:end_of_rows]
        return at + _first(differs) if differs.any() else end


def _first(found: BoolArray) -> int:
    """Index of the first True; the length if there is none."""
    return int(found.argmax()) if found.any() else len(found)
