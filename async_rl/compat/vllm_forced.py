"""Forced routing in a vLLM worker: recorded experts at some positions of a request, the router's choice elsewhere.

Rows arrive with a request (`compat.FORCED_EXPERTS`), or with a load that keeps the K/V of requests in flight.
When the engine forwards one of their positions (in a prefill, in a chunk of a prefill, or after a preemption),
each MoE layer uses the experts of the row. The gate weights are those that the layer's router gives to these experts,
as in the trainer's router replay. The capture records the experts that were used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from async_rl.compat import FORCED_EXPERTS


@dataclass(slots=True, eq=False)
class RowBlock:
    """Routing rows of consecutive positions of one request."""

    first: int
    """Position of the first row."""
    rows: torch.Tensor
    """int64 [capacity, moe_layers, top_k]; only the first `count` rows are valid."""
    count: int
    """Number of valid rows."""

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> RowBlock:
        """The rows that `inference.vllm.segment.encode_rows` encoded."""
        rows = np.frombuffer(fields["rows"], dtype=fields["dtype"]).reshape(fields["shape"])
        return cls(fields["start"], torch.from_numpy(rows.astype(np.int64)), len(rows))

    def extend(self, start: int, rows: torch.Tensor) -> None:
        """Append the rows of new positions.

        Args:
            start: position of the first row in `rows`.
            rows: integer [n, moe_layers, top_k]; rows of positions that this block already has are ignored.
        """
        fresh = rows[max(0, self.first + self.count - start) :]
        end = self.count + len(fresh)
        if end > len(self.rows):
            spare = self.rows.new_empty((end, *self.rows.shape[1:]))
            self.rows = torch.cat([self.rows[: self.count], fresh.to(self.rows.dtype), spare])
        else:
            self.rows[self.count : end] = fresh
        self.count = end


class ForcedRouting:
    """The forced rows of the requests in one worker, and the hooks in its routers.

    The routers are hooked when the first forced rows arrive. Without forced rows the worker runs unmodified vLLM code.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._given: dict[str, list[RowBlock]] = {}
        self._pinned: dict[str, RowBlock] = {}
        self._step: tuple[torch.Tensor, torch.Tensor] | None = None
        self._chosen: list[torch.Tensor] | None = None
        self._hooked = False

    def update(self, scheduler_output: Any) -> None:
        """Add the forced rows of new requests and remove those of finished requests."""
        for request_id in scheduler_output.finished_req_ids:
            self._given.pop(request_id, None)
            self._pinned.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            extra = request.sampling_params.extra_args if request.sampling_params is not None else None
            if extra and FORCED_EXPERTS in extra:
                self._hook_routers()
                self._given[request.req_id] = [RowBlock.decode(fields) for fields in extra[FORCED_EXPERTS]]

    def pin(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Use the recorded experts of these requests from now on; later steps record further rows.

        Args:
            rows: `inference.vllm.segment.encode_rows` of all rows recorded so far, by the request's id in the engine.
        """
        self._hook_routers()
        for request_id, fields in rows.items():
            self._pinned[request_id] = RowBlock.decode(fields)

    def end_at(self, ends: Mapping[str, int]) -> None:
        """Forget the recorded rows from a position on: they are of drafts that the engine rejected.

        Args:
            ends: first position without a valid row, by the request's id in the engine.
        """
        for request_id, block in self._pinned.items():
            if request_id in ends:
                block.count = min(block.count, ends[request_id] - block.first)

    @contextmanager
    def step(self, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]) -> Generator[None]:
        """Apply the forced rows to the forward pass inside the block.

        Args:
            request_ids: ids of the requests in the batch, in order.
            starts: first position that the step forwards, for each request.
            counts: number of positions that the step forwards, for each request.
        """
        if not self._given and not self._pinned:
            yield
            return
        self._step = self._plan(request_ids, starts, counts)
        self._chosen = [] if self._pinned else None
        try:
            yield
            if self._chosen:
                self._record(torch.stack(self._chosen, dim=1), request_ids, starts, counts)
        finally:
            self._step = self._chosen = None

    def _plan(
        self, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Indices int64 [m] of the forced tokens in the batch, and their experts int64 [m, moe_layers, top_k]."""
        rows: list[torch.Tensor] = []
        experts: list[torch.Tensor] = []
        offset = 0
        for request_id, start, count in zip(request_ids, starts, counts, strict=True):
            blocks = self._given.get(request_id, [])
            if request_id in self._pinned:
                blocks = [*blocks, self._pinned[request_id]]
            for block in blocks:
                low, high = max(start, block.first), min(start + count, block.first + block.count)
                if low < high:
                    rows.append(torch.arange(offset + low - start, offset + high - start))
                    experts.append(block.rows[low - block.first : high - block.first])
            offset += count
        return (torch.cat(rows), torch.cat(experts)) if rows else None

    def _record(
        self, chosen: torch.Tensor, request_ids: Sequence[str], starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Add the routing of this step to the pinned requests; chosen: int [tokens, moe_layers, top_k]."""
        offset = 0
        for request_id, start, count in zip(request_ids, starts, counts, strict=True):
            if request_id in self._pinned:
                self._pinned[request_id].extend(start, chosen[offset : offset + count])
            offset += count

    def _hook_routers(self) -> None:
        if self._hooked:
            return
        runners = [module for module in self._model.modules() if isinstance(module, MoERunner)]
        for index, runner in enumerate(sorted(runners, key=lambda runner: runner.layer_id)):
            router: Any = runner.router
            router._compute_routing = self._hooked_routing(router, index)
        self._hooked = True

    def _hooked_routing(self, router: CPURouter, index: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        require_forcible(router)
        route = router._compute_routing  # pyright: ignore[reportPrivateUsage]

        def compute_routing(
            hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights, chosen = route(hidden_states, router_logits, *args, **kwargs)
            if self._step is not None:
                rows, experts = self._step[0], self._step[1][:, index]
                weights[rows] = gate_weights(router, router_logits[rows], experts)
                chosen[rows] = experts.to(chosen.dtype)
            if self._chosen is not None:
                self._chosen.append(chosen)
            return weights, chosen

        return compute_routing


def gate_weights(router: CPURouter, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The weights float32 [m, top_k] that `router` gives to `experts`, computed in the same way as in vLLM.

    Args:
        logits: [m, num_experts].
        experts: int64 [m, top_k].
    """
    if not router.use_grouped_topk:
        taken = logits.gather(1, experts)
        if router.renormalize:
            return taken.softmax(-1).float()
        return (taken - logits.logsumexp(-1, keepdim=True)).exp().float()
    logits = logits.float()
    scores = logits.softmax(-1) if router.scoring_func == "softmax" else logits.sigmoid()
    weights = scores.gather(1, experts)  # a correction bias only affects the choice
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.routed_scaling_factor


def require_forcible(router: Any) -> None:
    """Raise TypeError if `gate_weights` cannot compute the gate weights of `router`."""
    known = isinstance(router, CPURouter) and (
        router.scoring_func in ("softmax", "sigmoid")
        if router.use_grouped_topk
        else router.scoring_func == "softmax" and router.custom_routing_function is None
    )
    if not known:
        raise TypeError(f"forced routing does not support {type(router).__name__}: its gate weights are unknown")
