"""Replays that are broken on purpose. A parity check must see them; each changes the next replay of a rank.

Layers are global, from 0; the tiny models have experts in the layers 1, 2 and 3.
"""

from collections.abc import Callable

import torch
from megatron.core import parallel_state


def _drop_layer(routing):
    """Layer 2 is left to the live router."""
    if 2 in routing.tables:
        routing.tables[2] = torch.full_like(routing.tables[2], -1)


def _drop_stage(routing):
    """The last pipeline stage is left to the live router."""
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        routing.tables = {layer: torch.full_like(table, -1) for layer, table in routing.tables.items()}


def _shift_layer(routing):
    """Each layer of a rank gets the rows of the next one."""
    layers = sorted(routing.tables)
    moved = layers[1:] + layers[:1]
    routing.tables = {layer: routing.tables[other] for layer, other in zip(layers, moved, strict=True)}


def _shift_token(routing):
    """Each token gets the row of the one before."""
    routing.tables = {layer: table.roll(1, dims=0) for layer, table in routing.tables.items()}


def _each(change):
    """The fault that applies `change` to the routing of each micro-batch."""

    def apply(_model, micro_batches):
        build = micro_batches._build

        def broken(*given):
            micro_batch = build(*given)
            change(micro_batch.context.routing)
            return micro_batch

        micro_batches._build = broken

    return apply


def _live_recomputation(model, _micro_batches):
    """Recomputed layers are routed by the live router: the replay of the forward pass has ended."""
    for chunk in model.chunks:
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                router.router_replay = _ForwardOnly(router.router_replay)


class _ForwardOnly:
    """Replays if no gradient is taken, as in the first forward pass of a layer that is recomputed."""

    def __init__(self, replay) -> None:
        self._replay = replay

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        if torch.is_grad_enabled():
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self._replay.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)


def _rounded_weights(model, _micro_batches):
    """No fault: every weight moves by a unit in the last place. This says how well conditioned gradients are."""
    noise = torch.Generator().manual_seed(5)
    for chunk in model.chunks:
        for weight in chunk.parameters():
            up = torch.rand(weight.shape, generator=noise).to(weight) < 0.5
            weight.data = torch.nextafter(weight.data, torch.where(up, torch.inf, -torch.inf).to(weight))


ROUNDED = "rounded-weights"
FAULTS: dict[str, Callable] = {
    ROUNDED: _rounded_weights,
    "drop-layer": _each(_drop_layer),
    "drop-stage": _each(_drop_stage),
    "shift-layer": _each(_shift_layer),
    "shift-token": _each(_shift_token),
    "live-recomputation": _live_recomputation,
}
