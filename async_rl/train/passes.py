"""Passes of the model over micro-batches: what each objective makes of the logits, on this rank and over all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from async_rl.train.distributed import ProcessGroups, context_group, tensor_group
from async_rl.train.gpt import BuiltModel
from async_rl.train.losses import LossConfig
from async_rl.train.model import TrainerConfig
from async_rl.train.planning import UpdatePlan
from async_rl.train.ratios import second_moment_bound
from async_rl.train.reference import ReferenceWeights
from async_rl.train.step import MicroBatch, Objective, ObjectiveKind, scheduled_loss


class Passes:
    """Runs micro-batches through this rank's part of the model. Every method is collective.

    Args:
        vocab_size: ids of the vocabulary, without the padding of the output layer.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        loss: LossConfig,
        groups: ProcessGroups,
        model: BuiltModel,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._loss = loss
        self._groups = groups
        self._model = model
        self._vocab_size = vocab_size

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's token sums count: tensor ranks of the last stage hold the same tokens."""
        return self._groups.is_last_stage and self._groups.coordinates.tensor_rank == 0

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """float32 [n] of each micro-batch under the current weights, without gradient; [0] before the last stage."""
        with torch.no_grad():
            found = self._run(micro_batches, self.objective("logprobs"), forward_only=True)
        return [result["logprobs"] for result in found] or [torch.empty(0)] * len(micro_batches)

    def proximal(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Give the micro-batches the logprobs (and routing, for R2) of the weights before the first update."""
        for micro_batch, found in zip(micro_batches, self.logprobs(micro_batches), strict=True):
            micro_batch.columns["proximal_logprobs"] = found
            if micro_batch.context.routing is not None:
                micro_batch.context.routing.mode = "replay"

    def reference(self, micro_batches: Sequence[MicroBatch], reference: ReferenceWeights) -> None:
        """Give them the logprobs of the reference. It routes by itself: rows replayed are those of the policy."""
        routing = [mb.context.routing for mb in micro_batches]
        for micro_batch in micro_batches:
            micro_batch.context.routing = None
        with reference.loaded():
            logprobs = self.logprobs(micro_batches)
        for micro_batch, found, held in zip(micro_batches, logprobs, routing, strict=True):
            micro_batch.columns["reference_logprobs"] = found
            micro_batch.context.routing = held

    def train(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> None:
        """Forward and backward; what the objective returned is in `sums` of each micro-batch."""
        found = self._run(micro_batches, objective, forward_only=False)
        self._model.release_graph()
        for micro_batch, sums in zip(micro_batches, found or [{}] * len(micro_batches), strict=True):
            micro_batch.sums = sums

    def of_update(self, update: UpdatePlan, micro_batches: Sequence[MicroBatch], columns: Sequence[Tensor]) -> Tensor:
        """float64 [N], of all tokens in the loss of an update, on every rank, from a column [n] of each micro-batch."""
        out = torch.zeros(update.num_loss_tokens, dtype=torch.float64)
        if self.counts_tokens:
            for micro_batch, column in zip(micro_batches, columns, strict=True):
                out[micro_batch.numbers] = column.to("cpu", torch.float64)
        return self._groups.sum_over_ranks(out)

    def objective(self, kind: ObjectiveKind, *, log_ratio_bound: float = math.inf) -> Objective:
        """What is done with the logits of each micro-batch."""
        return Objective(
            kind=kind,
            loss=self._loss,
            tensor_group=tensor_group(),
            vocab_columns=self._vocab_columns(),
            context_group=context_group(),
            log_ratio_bound=log_ratio_bound,
        )

    def policy_objective(self, update: UpdatePlan, micro_batches: Sequence[MicroBatch]) -> Objective:
        """The policy loss of one update; m2po bounds the ratio by all tokens of it, over all ranks."""
        if self._loss.name != "m2po":
            return self.objective("policy")
        columns = [mb.columns for mb in micro_batches] if self.counts_tokens else []
        log_ratios = self.of_update(
            update, micro_batches, [c["proximal_logprobs"] - c["behaviour_logprobs"] for c in columns]
        )
        bound = second_moment_bound(log_ratios, limit=self._loss.max_second_moment)
        return self.objective("policy", log_ratio_bound=bound)

    def _run(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """What the objective returned for each micro-batch; empty before the last pipeline stage."""

        def forward_step(source: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro_batch = next(source)
            logits = micro_batch.forward(model, at=self._groups.coordinates)
            return logits, partial(scheduled_loss, micro_batch=micro_batch, objective=objective)

        chunks = len(self._model.wrapped)
        sources = [iter(micro_batches) for _ in range(chunks)]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=sources if chunks > 1 else sources[0],
            model=self._model.for_schedule,
            num_microbatches=len(micro_batches),
            seq_length=self._config.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _vocab_columns(self) -> int:
        """Columns of this rank's logits that are ids of the vocabulary; the rest is padding."""
        at, size = self._groups.coordinates, self._vocab_size
        width = -(-size // at.tensor)
        return max(0, min(width, size - at.tensor_rank * width))
