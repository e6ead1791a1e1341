"""The critic of a trainer rank: a value model, its passes, and its updates.

    gae         advantages and returns of the tokens, from values and rewards
    value_head  a scalar linear layer on the last hidden states, and its loss
    config      the settings

Before the updates of a batch the critic values every token in the loss; advantages and returns of the whole batch
follow from these values. Then, for each optimizer step of the policy on a mini-batch, the critic makes
`critic.updates` steps on the same mini-batch, with the returns as targets.

An own trunk replays the routing rows of the batch (R3). With R2 and without replay its live router chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from numpy.typing import NDArray
from torch import Tensor

from async_rl.trainer.batch.training_batch import BatchError, TrainingBatch
from async_rl.trainer.critic.config import CriticConfig
from async_rl.trainer.critic.gae import GAE, Float64Array, batch_advantages, explained_variance
from async_rl.trainer.critic.value_head import ValueHead, ValueTerm
from async_rl.trainer.forward_backward import ForwardBackward
from async_rl.trainer.kl_reward import kl_metrics, token_kl
from async_rl.trainer.model.convert import load_weights
from async_rl.trainer.model.flops import train_operations
from async_rl.trainer.model.gpt import BuiltModel, build_model
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.planning import BatchPlan, UpdatePlan
from async_rl.trainer.state.adam import Optimizer
from async_rl.trainer.state.checkpoint import CriticState, fields_of
from async_rl.trainer.state.shards import Shard, copy_into, live_tensors, model_shards
from async_rl.trainer.step import MicroBatches, Objective


class Critic:
    """Values tokens and trains the value model. All methods are collective.

    Args:
        config: trunk, optimizer and steps.
        passes: forward and backward passes of the policy on this rank; a KL in the reward of their loss is a penalty of
            each token.
        micro_batches: builds the micro-batches of an update of a batch for an own `trunk`.
        start: Hugging Face folder of the policy's initial weights.

    Attributes:
        fields: properties that the critic of a checkpoint must have too.

    Raises:
        CheckpointError: the checkpoint of the critic cannot be used.
        ValueError: the checkpoint has other token ids or, with R3, other experts than the policy.
    """

    def __init__(
        self,
        config: CriticConfig,
        *,
        passes: ForwardBackward,
        micro_batches: Callable[..., MicroBatches],
        start: Path,
    ) -> None:
        trainer, policy, groups = passes.config, passes.model, passes.groups
        self._config, self._trainer, self._groups = config, trainer, groups
        self._passes, self._policy_passes, self._micro_batches = passes, passes, micro_batches
        initial = config.checkpoint or start
        self._trunk: BuiltModel | None = None
        if config.trunk == "own":
            self._trunk = build_model(initial, config=trainer, device=groups.device, output_layer=False)
            if problem := _problem(self._trunk, policy, trainer=trainer):
                raise ValueError(f"critic.checkpoint is {config.checkpoint}, {problem}")
            load_weights(self._trunk.chunks, initial, shape=self._trunk.shape)
            self._passes = ForwardBackward(config=trainer, loss=passes.loss, groups=groups, model=self._trunk)
        of_trunk = {} if self._trunk is None else fields_of(self._trunk.shape, config=trainer, start=initial)
        self.fields = {"critic.trunk": config.trunk, **of_trunk}
        self._head = _wrapped_head(self._trunk or policy, overlaps=self._trunk is not None, device=groups.device)
        self._optimizer = self._new_optimizer()
        self._planned: dict[UpdatePlan, MicroBatches] = {}
        self._losses: list[Tensor] = []
        self._steps: list[tuple[float, float]] = []
        self._found: dict[str, float] = {}

    @property
    def warms_up(self) -> bool:
        """Whether the next optimizer step is of the critic alone."""
        return self._optimizer.updates < self._config.warmup_steps * self._config.updates

    # ---- values

    def value(self, plan: BatchPlan, planned: Sequence[MicroBatches]) -> tuple[BatchPlan, dict[str, float]]:
        """The plan with the advantages of the critic, which the micro-batches get too; and metrics of a KL in the
        reward.

        Args:
            plan: batch and updates; the updates have all sequences with tokens in the loss.
            planned: the micro-batches of the updates of the policy on this rank; with a KL in the reward they have
                reference and proximal logprobs.

        Raises:
            BatchError: the batch has no rewards, or those of another advantage.
        """
        batch = plan.batch
        if batch.rewards is None or not isinstance(gae := batch.rewards.config, GAE):
            raise BatchError("the trainer has a critic, but the batch has no `rewards` of advantage.name=gae; add them")
        self._losses, self._steps = [], []
        trunk = self._trunk
        self._planned = {
            each.update: each if trunk is None else self._micro_batches(batch, each.update, trunk=trunk)
            for each in planned
        }
        values, ends = self._values(batch)
        penalties, metrics = self._penalties(batch, planned)
        advantages, returns = batch_advantages(
            gae,
            values,
            tokens=batch.num_loss_tokens,
            trajectory=batch.trajectory,
            rewards=batch.rewards.values,
            ends=ends,
            truncated=batch.truncated,
            penalties=penalties,
        )
        for micro_batches in planned:
            place, ours = micro_batches.update.loss_tokens_in_batch(batch), self._planned[micro_batches.update]
            for name, of_batch in (("advantages", advantages), ("values", values), ("returns", returns)):
                ours.add_column(name, of_batch[place])
            for theirs, results in zip(micro_batches.results, ours.results, strict=True):
                theirs.columns["advantages"] = results.columns["advantages"]
        self._found = {
            "critic/explained_variance": explained_variance(values, returns),
            "critic/value_mean": float(values.mean()) if len(values) else math.nan,
            "critic/staleness": self._config.updates * _mean_age(batch),
        }
        numbers, first = np.unique(np.repeat(batch.trajectory, batch.num_loss_tokens), return_index=True)
        of_trajectory = np.zeros(batch.num_trajectories, np.float32)
        of_trajectory[numbers] = advantages[first]  # as records show it
        return replace(plan, batch=replace(batch, advantages=of_trajectory[batch.trajectory])), metrics

    def _penalties(
        self, batch: TrainingBatch, planned: Sequence[MicroBatches]
    ) -> tuple[Float64Array | None, dict[str, float]]:
        """Penalty of each token in the loss float64 [N] with a KL in the reward, and its metrics."""
        loss = self._policy_passes.loss
        if not loss.penalises_rewards:
            return None, {}
        kl, coefficient = token_kl(batch, planned, passes=self._policy_passes), loss.kl_coefficient
        return coefficient * kl, kl_metrics(kl, coefficient=coefficient, trajectories=batch.num_trajectories)

    def _values(self, batch: TrainingBatch) -> tuple[Float64Array, Float64Array]:
        """Value before each token in the loss float64 [N], and after the last token of each of the S sequences."""
        values, ends = np.zeros(int(batch.num_loss_tokens.sum())), torch.zeros(len(batch), dtype=torch.float64)
        for update, micro_batches in self._planned.items():
            found = self._passes.values(micro_batches, self._term(update))
            counted = found if self._passes.counts_tokens else []
            own = self._passes.of_update(micro_batches, [each["values"] for each in counted])
            values[update.loss_tokens_in_batch(batch)] = own.numpy()
            for sequences, each in zip(micro_batches.sequences, counted, strict=False):
                ends[list(sequences)] = each["ends"].to("cpu", torch.float64)
        return values, self._groups.sum_over_ranks(ends).numpy()

    # ---- updates

    def objective(self, update: UpdatePlan, objective: Objective) -> Objective:
        """The objective of the policy's step on a mini-batch; with a shared trunk it includes the value loss."""
        if self._trunk is not None:
            return objective
        self._optimizer.zero_grad()
        return replace(objective, value=self._term(update))

    def update(self, update: UpdatePlan) -> None:
        """Make the steps on a mini-batch, after the backward pass of the policy's objective on the mini-batch."""
        micro_batches = self._planned[update]
        for _ in range(self._config.updates):
            if self._trunk is not None:
                self._optimizer.zero_grad()
                with self._head.no_sync():  # megatron's schedules know the trunk alone
                    self._passes.train(micro_batches, self._passes.objective("value_loss", value=self._term(update)))
            self._head.finish_grad_sync()
            if self._passes.counts_tokens:
                losses = [each.sums.pop("value_loss") for each in micro_batches.results]
                self._losses += [loss.to("cpu", torch.float64) for loss in losses]
            self._steps.append(self._optimizer.step())

    def operations(self, runs: NDArray[np.int64]) -> int:
        """Operations of the steps of an own trunk on a batch, over all ranks; a shared one has those of the policy.

        Args:
            runs: int64 [runs, 2], as for `train_operations`.
        """
        if self._trunk is None:
            return 0
        once = train_operations(self._trunk.shape, runs, num_loss_tokens=0, lora=self._trainer.lora)
        return self._config.updates * once

    def skip(self) -> None:
        """Count the steps on a mini-batch without gradients."""
        for _ in range(self._config.updates):
            self._steps.append((0.0, self._optimizer.skip()))

    def metrics(self) -> dict[str, float]:
        """Metrics of the batch, once its updates are made; its micro-batches are dropped."""
        self._planned = {}
        sums = torch.stack([*self._losses, torch.zeros((), dtype=torch.float64)]).sum().reshape(1)
        grad_norms, lrs = zip(*self._steps, strict=True)
        return {
            **self._found,
            "critic/loss": self._groups.sum_over_ranks(sums).item() / len(self._steps),
            "critic/grad_norm": max(grad_norms),
            "critic/lr": lrs[-1],
            "critic/updates": float(self._optimizer.updates),
        }

    def _term(self, update: UpdatePlan) -> ValueTerm:
        factor = self._config.coefficient if self._trunk is None else 1.0
        return ValueTerm(
            head=self._head.module,
            trunk_factor=factor / self._groups.coordinates.tensor,
            clip=self._config.value_clip,
            weight=1.0 / max(1, update.num_loss_tokens),
        )

    # ---- state

    def reset(self) -> None:
        """Start over: zero head and moments, schedule at update 0, and the policy's weights unless the critic has a
        checkpoint."""
        with torch.no_grad():
            for parameter in self._head.parameters():
                parameter.zero_()
            if self._trunk is not None and self._config.checkpoint is None:
                for own, policy in zip(self._trunk.chunks, self._policy_passes.model.chunks, strict=True):
                    theirs = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
                    for name, tensor in (*own.named_parameters(), *own.named_buffers()):
                        tensor.copy_(theirs[name])
        self._optimizer = self._new_optimizer()

    def saved(self) -> CriticState:
        """Entry of the manifest of a checkpoint."""
        return CriticState(model=self.fields, updates=self._optimizer.updates, steps=self._optimizer.steps)

    def state(self, *, loading: bool) -> dict[str, Any]:
        """Weights and optimizer state as nested shards."""
        weights = self._shards()
        optimizer = self._optimizer.shards(weights, loading=loading)
        return {"model": weights, **({"optimizer": optimizer} if optimizer else {})}

    def restore(self, loaded: Mapping[str, Any], saved: CriticState | None) -> None:
        """Restore the loaded `state`; `reset` without one. Call it when the policy is restored."""
        if saved is None:
            self.reset()
            return
        copy_into(live_tensors(self._shards()), loaded["model"])
        self._optimizer.load(loaded.get("optimizer", {}), updates=saved.updates, steps=saved.steps)

    def _shards(self) -> dict[str, Shard]:
        shards: dict[str, Shard] = {}
        if self._trunk is not None:
            shards = model_shards(self._trunk.chunks, lora=self._trainer.lora.rank > 0)
        later = parallel_state.get_pipeline_model_parallel_world_size() - 1
        copy = (
            later - parallel_state.get_pipeline_model_parallel_rank(),  # the last stage trains its copy
            self._groups.coordinates.tensor_rank,
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        for name, tensor in self._head.module.named_parameters():
            shards[f"head.{name}"] = ShardedTensor.from_rank_offsets(f"value_head.{name}", tensor, replica_id=copy)
        for shard in shards.values():
            shard.key = f"critic.{shard.key}"
        return shards

    def _new_optimizer(self) -> Optimizer:
        trunk = [] if self._trunk is None else self._trunk.wrapped
        return Optimizer([*trunk, self._head], config=self._config.optimizer, trainer=self._trainer)


def _wrapped_head(trunk: BuiltModel, *, overlaps: bool, device: torch.device) -> Any:
    """A value head for a trunk, with data parallelism.

    Args:
        trunk: model of the hidden states.
        overlaps: whether the settings are those of the trunk, as an optimizer of both requires; else its gradients are
            not summed during a backward pass of the trunk.
        device: device of this rank.
    """
    head = ValueHead(trunk.config.hidden_size, device=device)
    for parameter in head.parameters():
        marked: Any = parameter
        marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = False, -1, 1
    settings = trunk.wrapped[0].ddp_config
    settings = settings if overlaps else replace(settings, overlap_grad_reduce=False)
    return DistributedDataParallel(trunk.config, settings, head)


def _problem(trunk: BuiltModel, policy: BuiltModel, *, trainer: TrainerConfig) -> str:
    """Why a trunk cannot value the tokens of the policy; empty if it can."""
    ours, theirs = trunk.shape, policy.shape
    if ours.vocab_size != theirs.vocab_size:
        return f"a model of {ours.vocab_size} token ids, but the policy has {theirs.vocab_size}; use one of the same"
    experts = [
        [shape.megatron.get(name) for name in ("num_layers", "num_moe_experts", "moe_router_topk", "moe_layer_freq")]
        for shape in (ours, theirs)
    ]
    if trainer.router_replay == "R3" and experts[0] != experts[1]:
        return (
            f"a model with (layers, experts, top-k, layers with experts) {experts[0]}, but trainer.router_replay=R3 "
            f"replays rows of {experts[1]}; use a checkpoint with the same experts, or trainer.router_replay=none"
        )
    return ""


def _mean_age(batch: TrainingBatch) -> float:
    """Optimizer steps of the policy between the weights that sampled a token and the start of the batch, mean over the
    tokens in the loss; NaN if they are not known."""
    spans = [
        (batch.current_update - batch.version_updates[version], tokens)
        for head in batch.heads
        for version, tokens in head.spans
        if batch.version_updates[version] >= batch.min_update
    ]
    total = sum(tokens for _, tokens in spans)
    return sum(age * tokens for age, tokens in spans) / total if total else math.nan
