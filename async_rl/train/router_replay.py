"""Router replay: training routes each token to the experts that rollout (R3) or an earlier pass (R2) chose.

A micro-batch carries its own routing. Each transformer layer binds it to its router when the layer is entered, in the
forward pass as in a recomputation, so that whatever order a pipeline schedule runs micro-batches in, a router sees the
rows of the micro-batch whose tokens it gets. Nothing is global: two models in a process do not know of each other.

The router stays differentiable: its gate weights are computed from its own logits at the replayed experts. What else
is made of its scores is not replayed, because it says how the router of now routes: the load-balance loss takes the
router's own top-k of the scores (without correction bias and expert groups), the z loss the logits. Correction biases
are no parameters and stay as the checkpoint has them (see gpt.py): no tokens are counted towards moving them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from async_rl.batch.routed_experts import RoutingError

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerAgreement:
    """Counts of one layer over the real tokens of one micro-batch.

    agreeing: replayed experts that the live router would choose too. replayed: experts replayed.
    fallback: rows that were left to the live router. rows: all rows.
    """

    agreeing: Tensor
    replayed: Tensor
    fallback: Tensor
    rows: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatchRouting:
    """Routing of one micro-batch on one rank.

    mode: `record` fills `tables` with what the live router chooses, `replay` forces what they hold.
    tables: global layer number -> int64 [rows, K], -1 in all K places for the live router.
    real: bool [rows], False for padding.
    agreement: of each layer replayed; a recomputation writes the same again.
    """

    mode: Literal["record", "replay"]
    tables: dict[int, Tensor]
    real: Tensor
    agreement: dict[int, LayerAgreement] = field(default_factory=dict[int, LayerAgreement])


class LayerReplay:
    """Stands in megatron's hook `TopKRouter.router_replay` of one layer.

    Args:
        layer: global number, from 0.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.routing: MicroBatchRouting | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores [rows, K], experts int64 [rows, K]); called by megatron's router with scores [rows, experts].

        Raises:
            RoutingError: replay without a table for this layer, or a table of another shape.
        """
        assert default_compute_topk is not None
        live_scores, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routing = self.routing
        if routing is None:
            return live_scores, live
        if routing.mode == "record":
            routing.tables[self.layer] = live.detach()
            return live_scores, live
        experts = self._table(routing, rows=len(scores), topk=topk)
        absent = experts[:, :1] < 0
        routing.agreement[self.layer] = _agreement(experts, live, absent.squeeze(1), routing.real)
        experts = torch.where(absent, live, experts)
        return scores.gather(1, experts), experts

    def _table(self, routing: MicroBatchRouting, *, rows: int, topk: int) -> Tensor:
        table = routing.tables.get(self.layer)
        if table is None:
            raise RoutingError(
                f"layer {self.layer} has experts but no routing rows; rows exist for layers {sorted(routing.tables)}"
            )
        if tuple(table.shape) != (rows, topk):
            raise RoutingError(
                f"layer {self.layer} routes {rows} tokens to {topk} experts each, but its routing rows have shape "
                f"{list(table.shape)}"
            )
        return table


class RouterReplay:
    """The replay hooks of one model: one per router, found by global layer number.

    Args:
        chunks: GPTModel chunks of this rank.

    Raises:
        ValueError: a router whose settings would bypass replay.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.layers: list[int] = []
        for chunk in chunks:
            check_replayable(chunk.config)
            for layer in chunk.decoder.layers:
                router = getattr(layer.mlp, "router", None)
                if router is None:
                    continue
                replay = LayerReplay(layer.layer_number - 1)
                router.router_replay = replay
                layer.register_forward_pre_hook(_bind(replay), with_kwargs=True)
                self.layers.append(replay.layer)


def check_replayable(config: Any) -> None:
    """Refuse router settings of megatron that ignore or change replayed experts.

    Raises:
        ValueError: naming the setting and its value.
    """
    refused: Mapping[str, Callable[[Any], bool]] = {
        "moe_router_fusion": bool,
        "moe_enable_routing_replay": bool,
        "moe_router_force_load_balancing": bool,
        "moe_expert_capacity_factor": lambda value: value is not None,
        "moe_router_load_balancing_type": lambda value: "sinkhorn" in value,
        "moe_layer_recompute": bool,
    }
    for name, bad in refused.items():
        value = getattr(config, name, None)
        if value is not None and bad(value):
            raise ValueError(f"megatron's {name} is {value}, which bypasses router replay; leave it at its default")


def _bind(replay: LayerReplay) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    def bind(_layer: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        replay.routing = getattr(kwargs.get("packed_seq_params"), "routing", None)

    return bind


def _agreement(experts: Tensor, live: Tensor, absent: Tensor, real: Tensor) -> LayerAgreement:
    with torch.no_grad():
        same = (experts.unsqueeze(-1) == live.unsqueeze(-2)).any(-1).sum(-1)
        replayed = real & ~absent
        return LayerAgreement(
            agreeing=(same * replayed).sum(),
            replayed=replayed.sum() * experts.shape[1],
            fallback=(real & absent).sum(),
            rows=real.sum(),
        )
