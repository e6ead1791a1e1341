"""Routing rows that are held, whole: every position from 0 on has a row, or is known to have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from message_queue.tokens import ExpertArray, RoutedExperts, RoutingSpec

Int16Array = NDArray[np.int16]

NOT_ROUTED = -1  # a row the trainer routes with its live router
NOT_SAMPLED = -1  # param_version of a token that no policy sampled, and of a row that no forward pass gave


class RowRun(NamedTuple):
    """Consecutive rows of one forward pass."""

    rows: int
    """Number of rows."""
    version: int
    """`param_version` of the weights that gave them; -1 if no engine could give them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Consecutive rows of one forward pass, with their experts."""

    count: int
    """Rows."""
    version: int
    """`param_version` of the weights that gave them; -1 if no engine could give them."""
    experts: ExpertArray | None
    """uint8 or uint16 [count, moe_layers, top_k]; None if no engine can give the rows."""


class TrajectoryRows:
    """Rows 0..len-1, views of the arrays that the engines returned: nothing is copied or widened until it is read.

    Args:
        routing: meaning of a row.
    """

    def __init__(self, routing: RoutingSpec) -> None:
        self._routing = routing
        self._blocks: list[_Block] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def num_unavailable(self) -> int:
        """Rows that are -1."""
        return sum(block.count for block in self._blocks if block.experts is None)

    def add(self, rows: RoutedExperts, *, version: int) -> None:
        """Append the part of `rows` after the held ones; a gap is filled with rows that are unavailable."""
        self.add_unavailable(rows.first_position - self._count)
        fresh = rows.experts[max(0, self._count - rows.first_position) :]
        self._append(_Block(len(fresh), version, fresh))

    def add_unavailable(self, count: int) -> None:
        """Append `count` rows that are -1; none if `count` is negative."""
        self._append(_Block(max(0, count), NOT_SAMPLED, None))

    def first(self, count: int) -> TrajectoryRows:
        """The first `count` rows, or all if fewer are held."""
        kept = TrajectoryRows(self._routing)
        for block in self._blocks:
            size = min(block.count, count - len(kept))
            experts = None if block.experts is None else block.experts[:size]
            kept._append(_Block(size, block.version, experts))
        return kept

    def differ(self, rows: RoutedExperts) -> bool:
        """Whether `rows` and the held rows choose different experts at any position that both have.

        The order within the top-k does not count. A row that is -1 differs from every other.
        """
        at = 0
        for block in self._blocks:
            start, end = max(at, rows.first_position), min(at + block.count, rows.end_position)
            if start < end:
                given = rows.experts[start - rows.first_position : end - rows.first_position]
                if block.experts is None or not _same_sets(block.experts[start - at : end - at], given):
                    return True
            at += block.count
        return False

    def leading(self) -> RoutedExperts | None:
        """The rows before the first one that is -1; None if there are none."""
        parts: list[ExpertArray] = []
        for block in self._blocks:
            if block.experts is None:
                break
            parts.append(block.experts)
        if not parts:
            return None
        experts = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return RoutedExperts.trusted(first_position=0, experts=experts)

    def compact(self, length: int) -> tuple[ExpertArray, tuple[RowRun, ...]]:
        """The rows of positions before `length`, 0 if no engine could give them, and their runs.

        Rows of one forward pass are a view of the array that the engine returned.
        """
        runs: list[RowRun] = []
        parts: list[ExpertArray] = []
        for block in self.first(length)._blocks:
            shape = (block.count, *self._routing.row_shape)
            parts.append(np.zeros(shape, self._routing.dtype) if block.experts is None else block.experts)
            if runs and runs[-1].version == block.version:
                runs[-1] = RowRun(runs[-1].rows + block.count, block.version)
            else:
                runs.append(RowRun(block.count, block.version))
        if not parts:
            parts.append(np.zeros((0, *self._routing.row_shape), self._routing.dtype))
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return rows.astype(self._routing.dtype, copy=False), tuple(runs)

    def _append(self, block: _Block) -> None:
        if block.count > 0:
            self._blocks.append(block)
            self._count += block.count


def _same_sets(one: ExpertArray, other: ExpertArray) -> bool:
    """Whether two [rows, moe_layers, top_k] hold the same sets of experts."""
    unequal = (one != other).any(axis=(1, 2))
    if not unequal.any():
        return True
    return bool(np.array_equal(np.sort(one[unequal], axis=-1), np.sort(other[unequal], axis=-1)))
