"""One trainer process: holds its part of the model and turns batches into optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.batch.training_batch import TrainingBatch
from async_rl.model_info import read_model_info
from async_rl.train.checkpoint import Manifest, fields_of, load_state, read_manifest, save_state
from async_rl.train.convert import load_weights
from async_rl.train.distributed import ProcessGroups
from async_rl.train.gpt import BuiltModel, build_model
from async_rl.train.lm_head import compute_head_in_float32
from async_rl.train.losses import LossConfig
from async_rl.train.metrics import TokenSums, routing_metrics, routing_sums
from async_rl.train.model import RouterReplayMode, TrainerConfig
from async_rl.train.optimizer import Optimizer, OptimizerConfig
from async_rl.train.passes import Passes
from async_rl.train.planning import BatchPlan, Planner, UpdatePlan
from async_rl.train.reference import ReferenceWeights
from async_rl.train.shards import copy_into, live_tensors, model_shards, object_of_rank, shard_like
from async_rl.train.step import MicroBatch, MicroBatchBuilder, Objective
from async_rl.weights.export import export_pretrained, export_update
from async_rl.weights.transport import WeightUpdate, remove_directory


class TrainerRank:
    """A rank of the trainer. Every method is collective: all ranks call it with the same arguments.

    Args:
        checkpoint: Hugging Face folder that gives config and initial weights.
        rendezvous: host:port of the store at which the ranks meet; None for a rank that is alone.

    Raises:
        CheckpointError: a checkpoint that cannot be used. ValueError: a layout the model does not divide into.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        checkpoint: Path,
        rank: int,
        world_size: int,
        rendezvous: str | None = None,
    ) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._loss = loss
        self._info = read_model_info(checkpoint)
        self._groups = ProcessGroups(config, rank=rank, world_size=world_size, rendezvous=rendezvous)
        self._model = build_model(checkpoint, config=config, device=self._groups.device)
        if config.fp32_lm_head:
            compute_head_in_float32(self._model.chunks)
        load_weights(self._model.chunks, checkpoint, shape=self._model.shape)
        self._optimizer = Optimizer(self._model.wrapped, config=optimizer, trainer=config)
        self._reference = ReferenceWeights(self._model.chunks) if loss.kl_coefficient > 0 else None
        self._held: ReferenceWeights | None = None  # what `score` uses
        self._planner = Planner(config=config, loss=loss)
        self._passes = Passes(
            config=config, loss=loss, groups=self._groups, model=self._model, vocab_size=self._info.vocab_size
        )

    @property
    def model(self) -> BuiltModel:
        """This rank's part of the model; its gradients stay in `main_grad` until the next update."""
        return self._model

    @property
    def data_rank(self) -> int:
        """Which sequences of a batch this rank trains."""
        return self._groups.data_rank

    # ---- training

    def train(self, batch: TrainingBatch | BatchPlan) -> dict[str, float]:
        """Optimizer updates on one RL batch, one for each mini-batch; metrics of the batch.

        The proximal logprobs, and the routing that R2 replays, are of the weights before the first update. A mini-batch
        without anything to train counts as an update all the same. The reference of a KL term is the weights at the
        start or at the last `reset_optimizer`, routed by its own routers.

        Args:
            batch: with the content of all groups, or a plan with the content of those that this rank needs.

        Raises:
            RoutingError: replay is on and the routing rows do not fit the model or the batch.
            FloatingPointError: the gradient is not finite; the weights are those of the updates before this one.
        """
        plan = self._planner.policy(batch) if isinstance(batch, TrainingBatch) else batch
        planned = [(update, self._micro_batches(plan, update)) for update in plan.updates if update is not None]
        if self._reference is not None:
            for _, micro_batches in planned:
                self._passes.reference(micro_batches, self._reference)
        if self._needs_proximal_pass:
            for _, micro_batches in planned:
                self._passes.proximal(micro_batches)
        trained, steps = iter(planned), list[tuple[float, float]]()
        for update in plan.updates:
            steps.append((0.0, self._optimizer.skip()) if update is None else self._policy_update(*next(trained)))
        if not planned:
            return self._nothing_to_train(lr=steps[-1][1])
        return self._metrics([mb for _, mbs in planned for mb in mbs], steps, trajectories=plan.batch.num_trajectories)

    def train_supervised(self, batch: TrainingBatch | BatchPlan) -> dict[str, float]:
        """One update on the cross entropy of the tokens in the loss, divided by their number in the batch.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        plan = self._planner.supervised(batch) if isinstance(batch, TrainingBatch) else batch
        (update,) = plan.updates
        assert update is not None
        micro_batches = self._micro_batches(plan, update, replay="none")
        grad_norm, lr = self._update(
            update, micro_batches, self._passes.objective("supervised"), self._config.supervised_aux_loss_coefficient
        )
        counted = micro_batches if self._passes.counts_tokens else []
        here = [sum(float(mb.sums[name]) for mb in counted) for name in ("loss", "tokens")]
        sums = self._groups.sum_over_ranks(torch.tensor(here, dtype=torch.float64))
        return {"loss": sums[0].item(), "tokens": sums[1].item(), "grad_norm": grad_norm, "lr": lr}

    def logprobs(self, batch: TrainingBatch) -> list[Tensor]:
        """float32 [n] of each sequence: logprobs of its tokens in the loss under the current weights.

        Routing is replayed as in `train`.
        """
        plan = self._planner.whole(batch)
        (update,) = plan.updates
        assert update is not None
        micro_batches = self._micro_batches(plan, update)
        found = self._passes.of_update(update, micro_batches, self._passes.logprobs(micro_batches))
        return list(found.to(torch.float32).split(batch.num_loss_tokens.tolist()))

    def hold(self) -> None:
        """Keep a copy of the current weights, which `score` uses until the next `hold`."""
        if self._held is None:
            self._held = ReferenceWeights(self._model.chunks)
        else:
            self._held.renew()

    def score(self, batch: TrainingBatch) -> list[Tensor]:
        """As `logprobs`, under the weights of the last `hold`; without any, under the current ones."""
        if self._held is None:
            return self.logprobs(batch)
        with self._held.loaded():
            return self.logprobs(batch)

    # ---- weights and state

    def export(self, directory: Path, *, version: int, keep_version: int = 0) -> WeightUpdate | None:
        """Write the current weights as `version` under Hugging Face names; None on every rank but 0.

        Versions in `directory` before `keep_version` are removed first.
        """
        return export_update(self._model, directory, version=version, keep_version=keep_version)

    def remove_updates(self, directory: Path) -> None:
        """Remove `directory` with all versions in it, on the node of rank 0, which writes them."""
        if dist.get_rank() == 0:
            remove_directory(directory)

    def save_pretrained(self, folder: Path, *, like: Path) -> None:
        """Write the current weights as a Hugging Face checkpoint; see `async_rl.weights.pretrained.save_pretrained`."""
        export_pretrained(self._model, folder, like=like)

    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and random state into folder `directory`, whole or not at all.

        Raises:
            OSError: no room or no permission; a checkpoint that was there stays.
        """
        manifest = Manifest(
            model=self._model_fields(),
            layout=self._layout(),
            updates=self._optimizer.updates,
            steps=self._optimizer.steps,
            reference=self._reference is not None,
        )
        state = self._state(loading=False, reference=manifest.reference, random=True)
        save_state(directory, state, manifest=manifest, ranks=self._groups)

    def restore(self, directory: Path) -> None:
        """Continue from `save`: exactly where the layout is the same, and in any other.

        In another layout sums run in another order, and random numbers begin anew: from trainer.seed plus the number
        of updates.

        Raises:
            TrainerCheckpointError: no such folder, damaged, of another format or of another model.
        """
        manifest = read_manifest(directory, model=self._model_fields(), ranks=self._groups)
        same_layout = manifest.layout == self._layout()
        reference = manifest.reference and self._reference is not None
        weights = live_tensors(model_shards(self._model.chunks))
        state = load_state(directory, self._state(loading=True, reference=reference, random=same_layout))
        copy_into(weights, state["model"])
        self._optimizer.load(state.get("optimizer", {}), updates=manifest.updates, steps=manifest.steps)
        if self._reference is not None and reference:
            copy_into({name: self._reference.frozen(w) for name, w in weights.items()}, state["reference"])
        if same_layout:
            self._groups.set_random_state(state["random"])
        else:
            self._groups.reseed(self._config.seed + manifest.updates)
        self._groups.barrier()

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Begin anew from here: no moments, update 0 of the schedule, the reference is the current weights."""
        self._optimizer = Optimizer(self._model.wrapped, config=optimizer, trainer=self._config)
        if self._reference is not None:
            self._reference = ReferenceWeights(self._model.chunks)

    def close(self) -> None:
        """Leave the process groups."""
        self._groups.close()

    # ---- inside

    def _micro_batches(
        self, plan: BatchPlan, update: UpdatePlan, *, replay: RouterReplayMode | None = None
    ) -> list[MicroBatch]:
        """What this rank's forward passes take; `replay` None: as configured."""
        model = self._model
        builder = MicroBatchBuilder(
            plan.batch,
            update,
            at=self._groups.coordinates,
            device=self._groups.device,
            packing=self._config.packing,
            replay=(replay or self._config.router_replay) if model.replay is not None else "none",
            routing=self._info.routing,
            layers=model.replay.layers if model.replay is not None else (),
            rotary=model.rotary,
        )
        return [builder.build(numbers) for numbers in update.micro_batches[self.data_rank]]

    @property
    def _needs_proximal_pass(self) -> bool:
        """Else the proximal policy is the current one at the only update of a batch."""
        config = self._config
        return config.updates_per_batch > 1 or config.router_replay == "R2" or self._loss.needs_proximal_pass

    def _policy_update(self, update: UpdatePlan, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """An update on a mini-batch; (gradient norm, learning rate)."""
        objective = self._passes.policy_objective(update, micro_batches)
        return self._update(update, micro_batches, objective, self._config.aux_loss_coefficient)

    def _update(
        self,
        update: UpdatePlan,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        aux_loss_coefficient: float,
    ) -> tuple[float, float]:
        """Forward, backward and optimizer update; (gradient norm, learning rate)."""
        self._set_aux_loss(aux_loss_coefficient, rows=update.num_tokens)
        self._optimizer.zero_grad()
        self._passes.train(micro_batches, objective)
        return self._optimizer.step()

    def _set_aux_loss(self, coefficient: float, *, rows: int) -> None:
        """Megatron weighs a micro-batch's balance loss by its tokens; here the weights sum to 1 over the batch."""
        self._model.config.moe_aux_loss_coeff = coefficient / max(1, rows)

    def _metrics(
        self, micro_batches: Sequence[MicroBatch], steps: Sequence[tuple[float, float]], *, trajectories: int
    ) -> dict[str, float]:
        """Metrics of the updates `steps` (gradient norm, learning rate), summed over all ranks."""
        sums = TokenSums(self._extra_columns, trajectories=trajectories)
        for micro_batch in micro_batches if self._passes.counts_tokens else ():
            sums.add(micro_batch.sums, trajectories=micro_batch.trajectories)
        sums.reduce(
            self._groups.sum_over_ranks, partial(self._groups.sum_over_ranks, op=torch.distributed.ReduceOp.MAX)
        )
        routed = routing_sums([m.context.routing for m in micro_batches], layers=self._replayed_layers)
        routed = self._groups.sum_over_ranks(routed)
        grad_norms, lrs = zip(*steps, strict=True)
        return {
            **sums.metrics(updates=len(steps)),
            **routing_metrics(routed, layers=self._replayed_layers),
            "grad_norm": max(grad_norms),
            "lr": lrs[-1],
        }

    def _nothing_to_train(self, *, lr: float) -> dict[str, float]:
        empty = TokenSums(self._extra_columns, trajectories=0)
        return {
            **empty.metrics(updates=1),
            **routing_metrics(routing_sums([], layers=self._replayed_layers), layers=self._replayed_layers),
            "grad_norm": 0.0,
            "lr": lr,
        }

    @property
    def _replayed_layers(self) -> tuple[int, ...]:
        """Global numbers of the layers whose routing is replayed, on whichever rank they are."""
        routing = self._info.routing
        return () if routing is None or self._config.router_replay == "none" else routing.layers

    @property
    def _extra_columns(self) -> tuple[str, ...]:
        return (*self._loss.filters, *(("kl",) if self._loss.kl_coefficient > 0 else ()))

    def _state(self, *, loading: bool, reference: bool, random: bool) -> dict[str, Any]:
        """What a checkpoint holds, nested, as shards."""
        weights = model_shards(self._model.chunks)
        state: dict[str, Any] = {"model": weights}
        if optimizer := self._optimizer.shards(weights, loading=loading):
            state["optimizer"] = optimizer  # else another rank writes for this one
        if self._reference is not None and reference:
            state["reference"] = {
                name: shard_like(weights[name], self._reference.frozen(tensor), "reference")
                for name, tensor in live_tensors(weights).items()
            }
        if random:
            state["random"] = object_of_rank(
                "random", self._groups.random_state(), rank=self._groups.rank, ranks=self._groups.size
            )
        return state

    def _model_fields(self) -> dict[str, Any]:
        return fields_of(self._model.shape, dtype=self._config.dtype)

    def _layout(self) -> dict[str, int]:
        parallel = self._config.parallel
        return {
            "ranks": self._config.ranks,
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "virtual_pipeline": parallel.virtual_pipeline,
            "expert": parallel.expert,
            "expert_tensor": parallel.expert_tensor_size,
            "context": parallel.context,
        }
