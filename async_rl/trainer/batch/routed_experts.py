"""Arranges recorded routing rows in the order in which the routers of a rank see the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from async_rl.trainer.batch.training_batch import BatchError
from message_queue.tokens import ExpertArray, RoutingSpec
from message_queue.training_sequence import BoolArray, TrainingSequence


def replayed_rows(
    sequences: Mapping[int, TrainingSequence],
    of: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    routing: RoutingSpec,
    layers: Sequence[int],
) -> tuple[ExpertArray, BoolArray]:
    """Collect the routing rows of `layers` for the r tokens that a rank forwards.

    Two sequences of 3 and 2 tokens have recorded rows for all but their last token. The rank forwards the tokens
    (0, 0), (0, 1), (0, 2), (1, 0) and a padding token, so `of` is (0, 0, 0, 1, 2) and `positions` (0, 1, 2, 0, 0).
    The second result is (False, False, True, False, True): token (0, 2) and the padding use the live router.

    Args:
        sequences: number in the batch -> sequence; errors name the number.
        of: int64 [r], ascending, the sequence of each token as an index into `sequences`.
        positions: int64 [r], position in that sequence; a position past its end is padding.
        routing: layers, expert count and top-k K of the recorded rows.
        layers: global numbers (0-based) of the MoE layers of the rank.

    Returns:
        uint8 or uint16 [r, layers, K] expert ids, and bool [r], True if the live router chooses the experts.

    Raises:
        BatchError: a layer or a sequence has no rows, the layer or top-k count differs, or an expert id is out of
            range or a duplicate.
    """
    unknown = sorted(set(layers) - set(routing.layers))
    if unknown:
        raise BatchError(
            f"this rank routes layers {unknown}, but rows exist for layers {list(routing.layers)} only; "
            "rollout and trainer disagree about which layers have experts"
        )
    layer_slice = _slice([routing.layers.index(layer) for layer in layers])
    recorded = [_rows_of(number, sequence, routing)[:, layer_slice] for number, sequence in sequences.items()]
    # The padding is a sequence without rows; its row is never taken.
    rows = np.concatenate([*recorded, np.zeros((1, len(layers), routing.top_k), routing.dtype)])
    counts = np.array([*map(len, recorded), 0])
    runs = [run for sequence in sequences.values() for run in sequence.row_runs]
    given = np.array([run.version >= 0 for run in runs], np.bool_).repeat(
        np.array([run.rows for run in runs], np.int64)
    )
    sequence = np.minimum(of, len(recorded))
    at = np.flatnonzero(positions < counts[sequence])
    source = (counts.cumsum() - counts)[sequence[at]] + positions[at]
    at, source = at[given[source]], source[given[source]]
    out = np.zeros((len(of), len(layers), routing.top_k), routing.dtype)
    live = np.ones(len(of), np.bool_)
    out[at], live[at] = rows[source], False
    if fault := _fault(out, live, num_experts=routing.num_experts):
        what, row, layer = fault
        raise BatchError(
            f"routed_experts has {what}: {out[row, layer].tolist()} at sequence {[*sequences][of[row]]}, "
            f"position {positions[row]}, layer {layers[layer]}"
        )
    return out, live


def _rows_of(number: int, sequence: TrainingSequence, routing: RoutingSpec) -> ExpertArray:
    rows = sequence.rows
    if rows is None:
        raise BatchError(
            f"trainer.router_replay is R3, but sequence {number} has no routed_experts; let the engine capture "
            "routing, or use trainer.router_replay=R2 or none"
        )
    if rows.shape[1:] != routing.row_shape or rows.dtype != routing.dtype or len(rows) > len(sequence):
        raise BatchError(
            f"routed_experts of sequence {number} of {len(sequence)} tokens is {rows.dtype}{list(rows.shape)}; the "
            f"model's MoE layers {list(routing.layers)} with top-{routing.top_k} need "
            f"{routing.dtype}[rows, {len(routing.layers)}, {routing.top_k}], at most a row for each token"
        )
    if (described := sum(run.rows for run in sequence.row_runs)) != len(rows):
        raise BatchError(
            f"row_runs of sequence {number} describe {described} rows, but it has {len(rows)}; both must be of the "
            "same content"
        )
    return rows


def _slice(places: Sequence[int]) -> slice | list[int]:
    """A slice for consecutive layers, so that indexing does not copy all layers."""
    if places and list(places) == list(range(places[0], places[0] + len(places))):
        return slice(places[0], places[0] + len(places))
    return list(places)


def _fault(rows: ExpertArray, live: BoolArray, *, num_experts: int) -> tuple[str, int, int] | None:
    """First fault in `rows` [r, layers, K] outside of `live` [r], as (description, row, layer)."""
    columns = np.ascontiguousarray(rows.transpose(2, 0, 1))
    duplicate = np.zeros(rows.shape[:2], np.bool_)
    for i in range(1, len(columns)):
        for j in range(i):
            duplicate |= columns[i] == columns[j]
    outside = columns.max(0, initial=0) >= num_experts
    for fault, where in ((f"an expert id outside 0..{num_experts - 1}", outside), ("a duplicate expert", duplicate)):
        where[live] = False
        if where.any():
            row, layer = divmod(int(where.argmax()), rows.shape[1])
            return fault, row, layer
    return None
