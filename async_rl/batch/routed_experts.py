"""Routing rows of a batch: checks, and the rows each rank replays in the order its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from message_queue.tokens import RoutingSpec
from message_queue.trajectory import NOT_ROUTED


class RoutingError(ValueError):
    """Routing rows that cannot be replayed; names the layer, the row and the value."""


def check_routed_experts(routed_experts: Tensor, lengths: Tensor, *, routing: RoutingSpec) -> None:
    """Refuse rows of a batch that would train something else than what was rolled out.

    Args:
        routed_experts: integer [S, T, L, K]; -1 in all K places routes the token with the live router.
        lengths: int64 [S]; rows after the end are not looked at.

    Raises:
        RoutingError: wrong layer or top-k count, rows missing, an id out of range, a duplicate, or a row partly -1.
    """
    layers = routing.layers
    if routed_experts.dim() != 4 or tuple(routed_experts.shape[2:]) != (len(layers), routing.top_k):
        raise RoutingError(
            f"routed_experts has shape {list(routed_experts.shape)}; the model's MoE layers {list(layers)} "
            f"with top-{routing.top_k} need [S, T, {len(layers)}, {routing.top_k}]"
        )
    if len(routed_experts) != len(lengths) or routed_experts.shape[1] < int(lengths.max()):
        raise RoutingError(
            f"routed_experts has {routed_experts.shape[1]} rows for {len(routed_experts)} sequences; "
            f"{len(lengths)} sequences of up to {int(lengths.max())} tokens need a row each"
        )
    held = torch.arange(routed_experts.shape[1]) < lengths.unsqueeze(1)
    checks = {
        f"an expert id outside 0..{routing.num_experts - 1}": (
            (routed_experts >= routing.num_experts) | (routed_experts < NOT_ROUTED)
        ).any(-1),
        "some experts but not all": (routed_experts == NOT_ROUTED).any(-1) & (routed_experts != NOT_ROUTED).any(-1),
        "a duplicate expert": _has_duplicate(routed_experts) & (routed_experts != NOT_ROUTED).all(-1),
    }
    for fault, where in checks.items():
        where = where & held.unsqueeze(-1)
        if bool(where.any()):
            sequence, position, layer = (int(i) for i in where.nonzero()[0])
            raise RoutingError(
                f"routed_experts has {fault}: {routed_experts[sequence, position, layer].tolist()} at sequence "
                f"{sequence}, position {position}, layer {layers[layer]}"
            )


def rows_at(routed_experts: Tensor, index: Tensor, *, given: Sequence[int], layers: Sequence[int]) -> Tensor:
    """[rows, layers, K]: the rows of `layers` alone, in the order in which the routers of a rank see their tokens.

    Args:
        routed_experts: integer [S, T, L, K]. given: global numbers (0-based) of the L layers.
        index: int64 [rows], the tokens this rank's routers see, in their order, as s * T + t; -1 for padding, which
            gets a row of -1.
        layers: global numbers (0-based) of the MoE layers this rank holds.

    Raises:
        RoutingError: a layer that the batch has no rows for.
    """
    unknown = sorted(set(layers) - set(given))
    if unknown:
        raise RoutingError(
            f"this rank routes layers {unknown}, but rows exist for layers {list(given)} only; "
            "rollout and trainer disagree about which layers have experts"
        )
    places = torch.tensor([given.index(layer) for layer in layers], dtype=torch.int64)
    rows = routed_experts.flatten(0, 1)[index.clamp(min=0).unsqueeze(1), places]
    rows[index < 0] = NOT_ROUTED
    return rows


def _has_duplicate(rows: Tensor) -> Tensor:
    ordered = rows.sort(dim=-1).values
    return (ordered[..., 1:] == ordered[..., :-1]).any(-1)
