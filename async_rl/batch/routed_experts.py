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
    first, others = routed_experts[..., 0] == NOT_ROUTED, routed_experts[..., 1:].unbind(-1)
    in_part = torch.zeros_like(first)
    for other in others:
        in_part |= (other == NOT_ROUTED) != first
    checks = {
        f"an expert id outside 0..{routing.num_experts - 1}": _outside(routed_experts, routing.num_experts),
        "some experts but not all": in_part,
        "a duplicate expert": _has_duplicate(routed_experts) & ~first,
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


def _outside(rows: Tensor, num_experts: int) -> Tensor:
    """bool [...]: whether an entry of the last dimension is neither an expert nor -1."""
    low, high = rows.aminmax() if rows.numel() else (0, 0)
    if low >= NOT_ROUTED and high < num_experts:
        return torch.zeros(rows.shape[:-1], dtype=torch.bool)
    return ((rows >= num_experts) | (rows < NOT_ROUTED)).any(-1)


def _has_duplicate(rows: Tensor) -> Tensor:
    """bool [...]: whether two entries of the last dimension are equal. Pairs take far less than sorting short rows."""
    found = torch.zeros(rows.shape[:-1], dtype=torch.bool)
    for i in range(1, rows.shape[-1]):
        for j in range(i):
            found |= rows[..., i] == rows[..., j]
    return found
