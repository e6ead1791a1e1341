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


ROUTING_SUMS: tuple[str, ...] = ("agreeing", "replayed", "refused", "mass", "fallback", "rows")
"""What is counted of a layer over the real tokens of a micro-batch, float64 [6] in this order.

agreeing: recorded experts that the live router would choose too. replayed: recorded experts. refused: of these, those
that `replay_threshold` left out. mass: probability that the live router gives to the recorded experts of a row, summed
over the rows that have them. fallback: rows that were left to the live router. rows: all rows.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatchRouting:
    """Routing of one micro-batch on one rank.

    mode: `record` fills `tables` with what the live router chooses, `replay` forces what they hold.
    tables: global layer number -> integer [rows, K], -1 in all K places for the live router.
    real: bool [rows], False for padding.
    sums: of each layer replayed, ROUTING_SUMS of the pass that took a gradient.
    """

    mode: Literal["record", "replay"]
    tables: dict[int, Tensor]
    real: Tensor
    sums: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


def layer_tables(rows: Tensor, live: Tensor, *, layers: Sequence[int], to: torch.device) -> dict[int, Tensor]:
    """Global layer number -> int16 [rows, K] on a device, -1 in rows that are left to the live router.

    Args:
        rows: uint8 or uint16 [rows, layers, K]. live: bool [rows].
    """
    tables = rows.to(to).to(torch.int16).masked_fill_(live.to(to)[:, None, None], -1)
    return dict(zip(layers, tables.unbind(1), strict=True))


class LayerReplay:
    """Stands in megatron's hook `TopKRouter.router_replay` of one layer.

    Args:
        router: megatron's, whose scores the hook is given.
        layer: global number, from 0. threshold: see `keep_likely`; 0 replays every expert.
    """

    def __init__(self, router: Any, *, layer: int, threshold: float = 0.0) -> None:
        self.layer = layer
        self.routing: MicroBatchRouting | None = None
        self._router = router
        self._threshold = threshold

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
        recorded = self._table(routing, rows=len(scores), topk=topk)
        absent = recorded[:, :1] < 0
        experts = torch.where(absent, live, recorded)
        refused = None
        counted = torch.is_grad_enabled()  # once: the first pass over a layer that will be recomputed takes none
        if counted or self._threshold:
            with torch.no_grad():
                probabilities = self._probabilities(scores)
                if self._threshold:
                    experts, refused = keep_likely(experts, live, probabilities, threshold=self._threshold)
                if counted:
                    routing.sums[self.layer] = _sums(recorded, live, refused, probabilities, routing.real)
        return scores.gather(1, experts), experts

    def _probabilities(self, scores: Tensor) -> Tensor:
        """[rows, experts] what the router gives each expert, 1 over all; without the bias that steers choices alone."""
        router = self._router
        if router.score_function == "sigmoid":
            own = scores if router.expert_bias is None else scores - router.expert_bias
            return own / own.sum(-1, keepdim=True).clamp(min=1e-20)
        if router.config.moe_router_pre_softmax:
            return scores
        if scores.shape[1] < 16:  # torch is five times slower over a last dimension that fills no vector register
            return scores.float().t().contiguous().softmax(0).t()
        return scores.float().softmax(-1)

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
        return table.to(torch.int64)


def keep_likely(recorded: Tensor, live: Tensor, probabilities: Tensor, *, threshold: float) -> tuple[Tensor, Tensor]:
    """(experts int64 [rows, K], refused bool [rows, K]): recorded experts less those the router has turned away from.

    An expert is refused if its probability is below `threshold` times that of the weakest of the router's own top-k.
    The best of the own top-k that are not kept already take the places, so that a row has K experts, all different.

    Args:
        recorded: int64 [rows, K]. live: int64 [rows, K], the router's own, best first.
        probabilities: [rows, experts]. threshold: 0..1.
    """
    weakest = probabilities.gather(1, live).amin(1, keepdim=True)
    refused = probabilities.gather(1, recorded) < threshold * weakest
    kept_already = ((live.unsqueeze(2) == recorded.unsqueeze(1)) & ~refused.unsqueeze(1)).any(2)
    candidates = torch.cat((recorded, live), dim=1)
    out_of_question = torch.cat((refused, kept_already), dim=1)
    order = out_of_question.to(torch.int8).argsort(dim=1, stable=True)[:, : recorded.shape[1]]
    return candidates.gather(1, order), refused


class RouterReplay:
    """The replay hooks of one model: one per router, found by global layer number.

    Args:
        chunks: GPTModel chunks of this rank. threshold: see `keep_likely`.

    Raises:
        ValueError: a router whose settings would bypass replay.
    """

    def __init__(self, chunks: Sequence[Any], *, threshold: float = 0.0) -> None:
        self.layers: list[int] = []
        for chunk in chunks:
            check_replayable(chunk.config)
            for layer in chunk.decoder.layers:
                router = getattr(layer.mlp, "router", None)
                if router is None:
                    continue
                replay = LayerReplay(router, layer=layer.layer_number - 1, threshold=threshold)
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


def _sums(recorded: Tensor, live: Tensor, refused: Tensor | None, probabilities: Tensor, real: Tensor) -> Tensor:
    """float64 [6], ROUTING_SUMS; recorded: int64 [rows, K], -1 for the live router; refused: None for none.

    Sums are over whole tensors: torch is slow over a last dimension of a few experts, and so is comparing K with K.
    """
    replayed = (real & (recorded[:, 0] >= 0)).unsqueeze(1)
    rows, given = real.count_nonzero(), replayed.count_nonzero()
    experts = recorded.clamp(min=0)
    in_live = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, live, value=True)
    counts = (
        (in_live.gather(1, experts) & replayed).count_nonzero(),
        given * recorded.shape[1],
        given.new_zeros(()) if refused is None else (refused & replayed).count_nonzero(),
        (probabilities.gather(1, experts) * replayed).sum(dtype=torch.float64),
        rows - given,
        rows,
    )
    return torch.stack([count.double() for count in counts])
