"""Forward and backward passes of the model over micro-batches."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from async_rl.trainer.critic.value_head import ValueTerm
from async_rl.trainer.distributed import ProcessGroups, context_group
from async_rl.trainer.loss.distillation import DistillationConfig
from async_rl.trainer.loss.losses import LossConfig, Surrogate
from async_rl.trainer.loss.reference import ReferenceWeights
from async_rl.trainer.model.gpt import BuiltModel
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.step import (
    TOKEN_RESULTS,
    MicroBatch,
    MicroBatches,
    MicroBatchResults,
    Objective,
    ObjectiveKind,
    scheduled_loss,
)


class ForwardBackward:
    """Runs micro-batches through this rank's part of the model. All methods are collective.

    Args:
        config: settings of the trainer.
        loss: the policy loss.
        groups: process groups of this rank.
        model: this rank's part of the model.
        teaches: the term of the teachers; None without any.

    Attributes:
        config, loss, groups, model: as the arguments.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        loss: LossConfig,
        groups: ProcessGroups,
        model: BuiltModel,
        teaches: DistillationConfig | None = None,
    ) -> None:
        self.config, self.loss, self.groups, self.model = config, loss, groups, model
        self._teaches = teaches

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's token sums count: only tensor rank 0 of the last stage, since its peers have the same."""
        return self.groups.is_last_stage and self.groups.coordinates.tensor_rank == 0

    @property
    def needs_proximal(self) -> bool:
        """Whether the proximal policy needs a pass; otherwise it is the current policy, as a batch has one update."""
        several = self.config.updates_per_batch > 1 or self.config.router_replay == "R2"
        return several or self.loss.needs_proximal_pass or self.loss.penalises_rewards

    def logprobs(
        self, micro_batches: MicroBatches, *, replay: bool = True, counts_routing: bool = False
    ) -> list[Tensor]:
        """Logprobs float32 [n] of each micro-batch under the current weights, without gradient.

        Before the last pipeline stage they are empty.

        Args:
            micro_batches: of this rank.
            replay: if False, the live router chooses.
            counts_routing: set the `routing_sums` of the results, which only a pass with gradients counts.
        """
        with torch.set_grad_enabled(counts_routing):
            found = self._run(micro_batches, self.objective("logprobs"), forward_only=True, replay=replay)
        return [result["logprobs"] for result in found] or [torch.empty(0)] * len(micro_batches)

    def values(self, micro_batches: MicroBatches, term: ValueTerm) -> list[dict[str, Tensor]]:
        """`ValueTerm.at_start` of each micro-batch; before the last pipeline stage there are none.

        Args:
            micro_batches: of this rank.
            term: its head computes the values.
        """
        with torch.no_grad():
            return self._run(micro_batches, self.objective("values", value=term), forward_only=True)

    def proximal(self, micro_batches: MicroBatches) -> None:
        """Add the proximal logprobs (and the routing for R2) to the results; call it before the first update."""
        for results, found in zip(micro_batches.results, self.logprobs(micro_batches), strict=True):
            results.columns["proximal_logprobs"] = found

    def reference(self, micro_batches: MicroBatches, reference: ReferenceWeights) -> None:
        """Add the reference logprobs to the results. The reference uses its own routing, without replay."""
        with reference.loaded():
            logprobs = self.logprobs(micro_batches, replay=False)
        for results, found in zip(micro_batches.results, logprobs, strict=True):
            results.columns["reference_logprobs"] = found

    def train(self, micro_batches: MicroBatches, objective: Objective) -> None:
        """Run forward and backward; sets `sums` and `token_results` of the results."""
        found = self._run(micro_batches, objective, forward_only=False)
        self.model.release_graph()
        for results, sums in zip(micro_batches.results, found or [{}] * len(micro_batches), strict=True):
            results.token_results = {name: sums.pop(name) for name in TOKEN_RESULTS if name in sums}
            results.sums = sums

    def of_update(self, micro_batches: MicroBatches, columns: Sequence[Tensor]) -> Tensor:
        """Gather a value per token in the loss of an update, float64 [N] over all ranks, in the order of the batch.

        Args:
            micro_batches: those of the update on this rank, after a pass.
            columns: [n] for each micro-batch.
        """
        out = torch.zeros(micro_batches.update.num_loss_tokens, dtype=torch.float64)
        if self.counts_tokens:
            for results, column in zip(micro_batches.results, columns, strict=True):
                out[results.numbers] = column.to("cpu", torch.float64)
        return self.groups.sum_over_ranks(out)

    def objective(
        self, kind: ObjectiveKind, *, surrogate: Surrogate | None = None, value: ValueTerm | None = None
    ) -> Objective:
        """The objective `kind` with this rank's groups and output layer."""
        return Objective(
            kind=kind,
            loss=self.loss,
            layer=self.model.output_layer(float32=self.config.fp32_lm_head),
            context_group=context_group(),
            surrogate=surrogate,
            value=value,
            teaches=self._teaches,
        )

    def policy_objective(self, micro_batches: MicroBatches) -> Objective:
        """The policy objective of an update, whose equation may depend on its tokens on all ranks."""
        if not self.loss.needs_proximal_pass:
            return self.objective("policy")
        counted = micro_batches.results if self.counts_tokens else []
        log_ratios = [self._log_movement(results) for results in counted]
        surrogate = self.loss.equation(self.of_update(micro_batches, log_ratios))
        return self.objective("policy", surrogate=surrogate)

    def _log_movement(self, results: MicroBatchResults) -> Tensor:
        """log(proximal / behaviour) [n], or log(proximal / old) with `ratio=separated`."""
        columns, proximal = results.columns, results.columns["proximal_logprobs"]
        if self.loss.ratio == "combined" or "old_logprobs" not in columns:
            return proximal - results.behaviour_logprobs
        return torch.where(columns["old_fresh"], 0.0, proximal - columns["old_logprobs"])

    def _run(
        self, micro_batches: MicroBatches, objective: Objective, *, forward_only: bool, replay: bool = True
    ) -> list[dict[str, Tensor]]:
        """Results of the objective for each micro-batch; empty before the last pipeline stage."""

        offload = self.config.offload_activations and not forward_only

        def forward_step(source: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro_batch = next(source)
            if not replay:
                micro_batch.context.routing = None
            with activations_on_host() if offload else contextlib.nullcontext():
                hidden = micro_batch.forward(model, at=self.groups.coordinates)
            return hidden, partial(scheduled_loss, micro_batch=micro_batch, objective=objective)

        sources = _for_each_chunk(iter(micro_batches), chunks=len(self.model.wrapped))
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=sources if len(sources) > 1 else sources[0],
            model=self.model.for_schedule,
            num_microbatches=len(micro_batches),
            seq_length=self.config.micro_batch_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )


def activations_on_host() -> contextlib.AbstractContextManager[Any]:
    """The backward pass of computations inside takes all tensors but parameters from copies in host memory.

    The copies of a GPU are pinned, and queued among its kernels.
    """

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _for_each_chunk(micro_batches: Iterator[MicroBatch], *, chunks: int) -> list[Iterator[MicroBatch]]:
    """An iterator of the same micro-batches for each model chunk; one that all chunks have taken is not kept.

    `itertools.tee` would keep up to 57.
    """
    waiting: list[deque[MicroBatch]] = [deque() for _ in range(chunks)]

    def take(own: deque[MicroBatch]) -> Iterator[MicroBatch]:
        while True:
            if not own:
                if (built := next(micro_batches, None)) is None:
                    return
                for other in waiting:
                    other.append(built)
                del built
            yield own.popleft()

    return [take(own) for own in waiting]
