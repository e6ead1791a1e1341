"""Forward and backward passes of the model over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from async_rl.trainer.distributed import ProcessGroups, context_group, tensor_group
from async_rl.trainer.loss.losses import LossConfig, Surrogate
from async_rl.trainer.loss.reference import ReferenceWeights
from async_rl.trainer.model.gpt import BuiltModel
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.planning import UpdatePlan
from async_rl.trainer.step import TOKEN_RESULTS, MicroBatch, Objective, ObjectiveKind, scheduled_loss


class ForwardBackward:
    """Runs micro-batches through this rank's part of the model. All methods are collective.

    Args:
        config: settings of the trainer.
        loss: the policy loss.
        groups: process groups of this rank.
        model: this rank's part of the model.
        vocab_size: number of token ids, without the padding of the output layer.
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
        """Whether this rank's token sums count: only tensor rank 0 of the last stage, since its peers have the same."""
        return self._groups.is_last_stage and self._groups.coordinates.tensor_rank == 0

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Logprobs float32 [n] of each micro-batch under the current weights, without gradient.

        Before the last pipeline stage they are empty.
        """
        with torch.no_grad():
            found = self._run(micro_batches, self.objective("logprobs"), forward_only=True)
        return [result["logprobs"] for result in found] or [torch.empty(0)] * len(micro_batches)

    def proximal(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the proximal logprobs (and the routing for R2) to the micro-batches; call it before the first update."""
        for micro_batch, found in zip(micro_batches, self.logprobs(micro_batches), strict=True):
            micro_batch.columns["proximal_logprobs"] = found
            if micro_batch.context.routing is not None:
                micro_batch.context.routing.mode = "replay"

    def reference(self, micro_batches: Sequence[MicroBatch], reference: ReferenceWeights) -> None:
        """Add the reference logprobs to the micro-batches. The reference uses its own routing, without replay."""
        routing = [mb.context.routing for mb in micro_batches]
        for micro_batch in micro_batches:
            micro_batch.context.routing = None
        with reference.loaded():
            logprobs = self.logprobs(micro_batches)
        for micro_batch, found, rows in zip(micro_batches, logprobs, routing, strict=True):
            micro_batch.columns["reference_logprobs"] = found
            micro_batch.context.routing = rows

    def train(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> None:
        """Run forward and backward; sets `sums` and `token_results` of each micro-batch."""
        found = self._run(micro_batches, objective, forward_only=False)
        self._model.release_graph()
        for micro_batch, sums in zip(micro_batches, found or [{}] * len(micro_batches), strict=True):
            micro_batch.token_results = {name: sums.pop(name) for name in TOKEN_RESULTS if name in sums}
            micro_batch.sums = sums

    def of_update(self, update: UpdatePlan, micro_batches: Sequence[MicroBatch], columns: Sequence[Tensor]) -> Tensor:
        """Gather a value per token in the loss, float64 [N] over all ranks, in the order of the batch.

        Args:
            update: the update with N tokens in the loss.
            micro_batches: of this rank.
            columns: [n] for each micro-batch.
        """
        out = torch.zeros(update.num_loss_tokens, dtype=torch.float64)
        if self.counts_tokens:
            for micro_batch, column in zip(micro_batches, columns, strict=True):
                out[micro_batch.numbers] = column.to("cpu", torch.float64)
        return self._groups.sum_over_ranks(out)

    def objective(self, kind: ObjectiveKind, *, surrogate: Surrogate | None = None) -> Objective:
        """The objective `kind` with this rank's groups and vocabulary."""
        return Objective(
            kind=kind,
            loss=self._loss,
            tensor_group=tensor_group(),
            vocab_columns=self._vocab_columns(),
            context_group=context_group(),
            surrogate=surrogate,
        )

    def policy_objective(self, update: UpdatePlan, micro_batches: Sequence[MicroBatch]) -> Objective:
        """The policy objective of an update, whose equation may depend on its tokens on all ranks."""
        if not self._loss.needs_proximal_pass:
            return self.objective("policy")
        columns = [mb.columns for mb in micro_batches] if self.counts_tokens else []
        log_ratios = self.of_update(
            update, micro_batches, [c["proximal_logprobs"] - c["behaviour_logprobs"] for c in columns]
        )
        return self.objective("policy", surrogate=self._loss.surrogate_of_update(log_ratios))

    def _run(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """Results of the objective for each micro-batch; empty before the last pipeline stage."""

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
        """Number of this rank's logit columns that are token ids, without padding.

        A vocabulary of 9 on 2 tensor-parallel ranks has 5 columns per rank: 5 ids on rank 0, 4 ids on rank 1.
        """
        at, size = self._groups.coordinates, self._vocab_size
        width = -(-size // at.tensor)
        return max(0, min(width, size - at.tensor_rank * width))
