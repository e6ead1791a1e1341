"""Routing rows of a batch -> the table each router of this rank replays, in the order its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from message_queue.tokens import RoutingSpec
from message_queue.trajectory import NOT_ROUTED


class RoutingError(ValueError):
    """Routing rows that cannot be replayed; names the layer, the row and the value."""


def keep_layers(batch: TensorDict, layers: Sequence[int], *, routing: RoutingSpec) -> TensorDict:
    """The batch with the rows of `layers` alone, and these in the key routed_layers int64 [S, layers].

    A rank replays the layers it holds; rows are most of a batch, so it is sent no others.

    Args:
        layers: global numbers; with none of them the rows are empty, not absent.
    """
    if "routed_experts" not in set(batch.keys()) or tuple(layers) == layers_of(batch, routing=routing):
        return batch
    places = [layers_of(batch, routing=routing).index(layer) for layer in layers]
    return batch.copy().update(
        {
            "routed_experts": batch["routed_experts"][:, :, places],
            "routed_layers": torch.tensor(layers, dtype=torch.int64).expand(len(batch), -1),
        }
    )


def layers_of(batch: TensorDict, *, routing: RoutingSpec) -> tuple[int, ...]:
    """Global numbers of the layers that the rows of a batch are of: all, unless `keep_layers` says otherwise."""
    if "routed_layers" not in set(batch.keys()):
        return routing.layers
    return tuple(batch["routed_layers"][0].tolist())


def check_routed_experts(
    routed_experts: Tensor, lengths: Tensor, *, routing: RoutingSpec, layers: Sequence[int]
) -> None:
    """Refuse rows of a batch that would train something else than what was rolled out.

    Args:
        routed_experts: integer [S, T, L, K]; -1 in all K places routes the token with the live router.
        lengths: int64 [S]; rows after the end are not looked at.
        layers: global numbers of the L layers.

    Raises:
        RoutingError: wrong layer or top-k count, rows missing, an id out of range, a duplicate, or a row partly -1.
    """
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


def local_tables(
    routed_experts: Tensor, index: Tensor, *, given: Sequence[int], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Global layer number -> int64 [rows, K] for the layers this rank holds.

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
    rows = routed_experts.flatten(0, 1)[index.clamp(min=0)][:, places].to(torch.int64)
    rows[index < 0] = NOT_ROUTED
    return {layer: rows[:, i].contiguous() for i, layer in enumerate(layers)}


def _has_duplicate(rows: Tensor) -> Tensor:
    ordered = rows.sort(dim=-1).values
    return (ordered[..., 1:] == ordered[..., :-1]).any(-1)
