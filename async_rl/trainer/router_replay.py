"""Router replay: training routes each token to the experts that the rollout (R3) or an earlier pass (R2) chose.

Each micro-batch has its own routing. A transformer layer binds it to its router when the layer is entered, both in the
forward pass and in recomputation. Therefore a router always sees the rows of its micro-batch, in any pipeline schedule.
There is no global state, so two models in a process are independent.

The router remains differentiable: the gate weights are computed from its own logits at the replayed experts. The
auxiliary losses are not replayed, because they depend on the current routing: the load-balance loss uses the router's
own top-k of the scores (without correction bias and expert groups), the z loss uses the logits. Correction biases are
constant (see gpt.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from async_rl.trainer.batch.training_batch import BatchError

TopK = Callable[..., tuple[Tensor, Tensor]]


ROUTING_SUMS: tuple[str, ...] = ("agreeing", "replayed", "refused", "mass", "fallback", "rows")
"""Sums over the real tokens of a micro-batch in one layer, float64 [6] in this order.

agreeing  recorded experts that the live router would also choose
replayed  recorded experts
refused   recorded experts that `replay_threshold` left out
mass      probability of the recorded experts in the live router, summed over replayed rows
fallback  rows routed by the live router
rows      all rows
"""


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatchRouting:
    """Routing of one micro-batch on one rank."""

    mode: Literal["record", "replay"]
    """`record` stores the choices of the live router in `tables`; `replay` forces the experts in `tables`."""
    tables: dict[int, Tensor]
    """Global layer number -> integer [rows, K], expert ids; a row of -1 is left to the live router."""
    uses: Tensor
    """int64 [rows], sequences that have the row; 0 for padding."""
    sums: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Global layer number -> ROUTING_SUMS float64 [6] of the pass with gradients."""


def layer_tables(rows: Tensor, live: Tensor, *, layers: Sequence[int], to: torch.device) -> dict[int, Tensor]:
    """Convert routing rows to `MicroBatchRouting.tables`.

    Rows [[[1], [2]], [[3], [0]]] with live (False, True) and layers (1, 3): {1: [[1], [-1]], 3: [[2], [-1]]}.

    Args:
        rows: uint8 or uint16 [rows, layers, K].
        live: bool [rows], rows for the live router.
        layers: global layer numbers.
        to: device of the tables.
    """
    tables = rows.to(to).to(torch.int16).masked_fill_(live.to(to)[:, None, None], -1)
    return dict(zip(layers, tables.unbind(1), strict=True))


class LayerReplay:
    """Implements megatron's hook `TopKRouter.router_replay` for one layer.

    Args:
        router: megatron's router; it calls the hook.
        layer: global number, from 0.
        threshold: see `keep_likely`; 0 replays all recorded experts.
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
        """Choose experts. Megatron's router calls this with `scores` [rows, experts].

        Returns:
            (scores [rows, K], experts int64 [rows, K]).

        Raises:
            BatchError: in replay, the table of this layer is missing or has another shape.
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
        counted = torch.is_grad_enabled()  # counts once: with recomputation the first pass has no gradients
        if counted or self._threshold:
            with torch.no_grad():
                probabilities = self._probabilities(scores)
                if self._threshold:
                    experts, refused = keep_likely(experts, live, probabilities, threshold=self._threshold)
                if counted:
                    routing.sums[self.layer] = _sums(recorded, live, refused, probabilities, routing.uses)
        return scores.gather(1, experts), experts

    def _probabilities(self, scores: Tensor) -> Tensor:
        """Router probabilities [rows, experts] with the sum 1 per row, without the correction bias."""
        router = self._router
        if router.score_function == "sigmoid":
            own = scores if router.expert_bias is None else scores - router.expert_bias
            return own / own.sum(-1, keepdim=True).clamp(min=1e-20)
        if router.config.moe_router_pre_softmax:
            return scores
        if scores.shape[1] < 16:  # softmax over a short last dimension is five times slower
            return scores.float().t().contiguous().softmax(0).t()
        return scores.float().softmax(-1)

    def _table(self, routing: MicroBatchRouting, *, rows: int, topk: int) -> Tensor:
        table = routing.tables.get(self.layer)
        if table is None:
            raise BatchError(
                f"layer {self.layer} has experts but no routing rows; rows exist for layers {sorted(routing.tables)}"
            )
        if tuple(table.shape) != (rows, topk):
            raise BatchError(
                f"layer {self.layer} routes {rows} tokens to {topk} experts each, but its routing rows have shape "
                f"{list(table.shape)}"
            )
        return table.to(torch.int64)


def keep_likely(recorded: Tensor, live: Tensor, probabilities: Tensor, *, threshold: float) -> tuple[Tensor, Tensor]:
    """Replace recorded experts that have become unlikely.

    An expert is refused if its probability is below `threshold` times the lowest probability in the router's own top-k.
    The best other experts of the own top-k replace refused ones, so that a row has K different experts.

    Probabilities (0.5, 0.3, 0.15, 0.05), own top-2 (0, 1), recorded (2, 3), threshold=0.5: expert 3 is below 0.15 and
    is refused; the result is (2, 0).

    Args:
        recorded: int64 [rows, K].
        live: int64 [rows, K], the router's own top-k, best first.
        probabilities: [rows, experts].
        threshold: 0..1.

    Returns:
        experts int64 [rows, K], refused bool [rows, K].
    """
    weakest = probabilities.gather(1, live).amin(1, keepdim=True)
    refused = probabilities.gather(1, recorded) < threshold * weakest
    kept_already = ((live.unsqueeze(2) == recorded.unsqueeze(1)) & ~refused.unsqueeze(1)).any(2)
    candidates = torch.cat((recorded, live), dim=1)
    out_of_question = torch.cat((refused, kept_already), dim=1)
    order = out_of_question.to(torch.int8).argsort(dim=1, stable=True)[:, : recorded.shape[1]]
    return candidates.gather(1, order), refused


class RouterReplay:
    """Installs replay hooks on all routers of a model.

    Args:
        chunks: GPTModel chunks of this rank.
        threshold: see `keep_likely`.

    Attributes:
        layers: global numbers of the layers with routers on this rank, from 0.

    Raises:
        ValueError: a setting of the routers would bypass replay.
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
    """Refuse settings of megatron's router that ignore or change replayed experts.

    Raises:
        ValueError: there is such a setting; the message names the setting and its value.
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


def _sums(recorded: Tensor, live: Tensor, refused: Tensor | None, probabilities: Tensor, uses: Tensor) -> Tensor:
    """ROUTING_SUMS float64 [6].

    Sums over complete tensors and a scatter are used because reductions over a short last dimension and a comparison of
    all pairs of experts are slow.

    Args:
        recorded: int64 [rows, K], -1 for the live router.
        live: int64 [rows, K].
        refused: bool [rows, K]; None if no expert is refused.
        probabilities: [rows, experts].
        uses: int64 [rows], sequences that have the row; it counts once for each.
    """
    replayed = (uses * (recorded[:, 0] >= 0)).unsqueeze(1)
    rows, given = uses.sum(), replayed.sum()
    experts = recorded.clamp(min=0)
    in_live = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, live, value=True)
    counts = (
        (in_live.gather(1, experts) * replayed).sum(),
        given * recorded.shape[1],
        given.new_zeros(()) if refused is None else (refused * replayed).sum(),
        (probabilities.gather(1, experts) * replayed).sum(dtype=torch.float64),
        rows - given,
        rows,
    )
    return torch.stack([count.double() for count in counts])
