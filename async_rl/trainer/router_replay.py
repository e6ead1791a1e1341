"""Router replay: training routes each token to the experts that the rollout (R3) or an earlier pass (R2) chose.

`replayed_tables` puts the recorded rows in the order in which the routers of a rank see the tokens.

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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from async_rl.trainer.batch.training_batch import BatchError
from message_queue.tokens import ExpertArray, RoutingSpec
from message_queue.training_sequence import BoolArray, TrainingSequence

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


def replayed_tables(
    sequences: Mapping[int, TrainingSequence],
    of: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    routing: RoutingSpec,
    layers: Sequence[int],
    to: torch.device,
) -> dict[int, Tensor]:
    """Collect the routing rows of `layers` for the r tokens that a rank forwards, as `MicroBatchRouting.tables`.

    Two sequences of 3 and 2 tokens have recorded rows for all but their last token. The rank forwards the tokens
    (0, 0), (0, 1), (0, 2), (1, 0) and a padding token, so `of` is (0, 0, 0, 1, 2) and `positions` (0, 1, 2, 0, 0).
    The third and the last row of each table are -1: token (0, 2) and the padding use the live router.

    Args:
        sequences: number in the batch -> sequence; errors name the number.
        of: int64 [r], ascending, the sequence of each token as an index into `sequences`.
        positions: int64 [r], position in that sequence; a position past its end is padding.
        routing: layers, expert count and top-k K of the recorded rows.
        layers: global numbers (0-based) of the MoE layers of the rank.
        to: device of the tables.

    Returns:
        Layer -> expert ids int16 [r, K], -1 if the live router chooses the experts.

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
    out, live = np.zeros((len(of), len(layers), routing.top_k), routing.dtype), np.ones(len(of), np.bool_)
    out[at], live[at] = rows[source], False
    if fault := _fault(out, live, num_experts=routing.num_experts):
        what, row, layer = fault
        raise BatchError(
            f"routed_experts has {what}: {out[row, layer].tolist()} at sequence {[*sequences][of[row]]}, "
            f"position {positions[row]}, layer {layers[layer]}"
        )
    tables = torch.from_numpy(out).to(to).to(torch.int16)  # in this order, a GPU gets fewer bytes
    tables = tables.masked_fill_(torch.from_numpy(live).to(to)[:, None, None], -1)
    return dict(zip(layers, tables.unbind(1), strict=True))


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
