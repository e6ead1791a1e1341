"""One trainer process: holds its part of the model and turns batches into optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from torch import Tensor

from async_rl.batch.micro_batch import select_sequences
from async_rl.batch.packing import plan_micro_batches
from async_rl.batch.routed_experts import RoutingError, check_routed_experts
from async_rl.model_info import read_model_info
from async_rl.train.checkpoint import load_rank_state, save_rank_state
from async_rl.train.convert import load_weights
from async_rl.train.distributed import ProcessGroups, tensor_group
from async_rl.train.gpt import BuiltModel, build_model
from async_rl.train.losses import LossConfig, token_weights
from async_rl.train.metrics import ROUTING_SUMS, TOKEN_SUMS, metrics_from_sums, routing_sums
from async_rl.train.model import TrainerConfig
from async_rl.train.optimizer import Optimizer, OptimizerConfig
from async_rl.train.reference import ReferenceWeights
from async_rl.train.step import MicroBatch, MicroBatchBuilder, Objective
from async_rl.weights.export import export_update
from async_rl.weights.transport import WeightUpdate


class TrainerRank:
    """A rank of the trainer. Every method is collective: all ranks call it with the same arguments.

    Args:
        checkpoint: Hugging Face folder that gives config and initial weights.
        rendezvous: host:port at which rank 0 listens and the others join.

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
        rendezvous: str,
    ) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._loss = loss
        self._rank = rank
        self._info = read_model_info(checkpoint)
        self._groups = ProcessGroups(config, rank=rank, world_size=world_size, rendezvous=rendezvous)
        self._model = build_model(checkpoint, config=config, device=self._groups.device)
        load_weights(self._model.chunks, checkpoint, shape=self._model.shape)
        self._optimizer = Optimizer(self._model.wrapped, config=optimizer, trainer=config)
        self._reference = ReferenceWeights(self._model.chunks) if loss.kl_coefficient > 0 else None

    @property
    def model(self) -> BuiltModel:
        """This rank's part of the model; its gradients stay in `main_grad` until the next update."""
        return self._model

    # ---- training

    def train(self, batch: TensorDict) -> dict[str, float]:
        """Optimizer updates on one RL batch (keys: async_rl.batch.collate); metrics of the batch.

        Trajectories of groups without spread are left out, unless a KL or entropy term trains them too. With a KL term
        the batch may bring reference_logprobs float32 [S, T]; else they are those of the reference: the weights at
        the start or at the last `reset_optimizer`, routed by its own routers.

        Raises:
            RoutingError: replay is on and the routing rows do not fit the model or the batch.
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        self._check_routing(batch)
        if not self._loss.needs_every_token:
            batch = select_sequences(batch, batch["informative"])
        if len(batch) == 0:
            return self._nothing_to_train()
        parts = split_groups(batch, self._config.updates_per_batch)
        planned = [(part, self._micro_batches(part)) for part in parts]
        if self._reference is not None and "reference_logprobs" not in set(batch.keys()):
            for _, micro_batches in planned:
                self._reference_pass(micro_batches, self._reference)
        if self._config.updates_per_batch > 1 or self._config.router_replay == "R2":
            for _, micro_batches in planned:
                self._proximal_pass(micro_batches)
        steps = [self._update(part, mbs, "policy", self._config.aux_loss_coefficient) for part, mbs in planned]
        return self._metrics([mb for _, mbs in planned for mb in mbs], steps)

    def train_supervised(self, batch: TensorDict) -> dict[str, float]:
        """One update on the cross entropy of the tokens under `loss_mask`, divided by their number in the batch.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are unchanged.
        """
        micro_batches = self._micro_batches(batch, supervised=True)
        grad_norm, lr = self._update(batch, micro_batches, "supervised", self._config.supervised_aux_loss_coefficient)
        sums = self._groups.sum_over_ranks(torch.tensor(self._token_sums(micro_batches, ("loss", "tokens"))))
        return {"loss": sums[0].item(), "tokens": sums[1].item(), "grad_norm": grad_norm, "lr": lr}

    def logprobs(self, batch: TensorDict) -> Tensor:
        """float32 [S, T] logprob of each token under the current weights; 0 where loss_mask is False.

        Routing is replayed as in `train`.
        """
        self._check_routing(batch)
        micro_batches = self._micro_batches(batch)
        with torch.no_grad():
            found = self._run(micro_batches, self._objective("logprobs"), forward_only=True)
        out = torch.zeros(batch["token_ids"].numel(), dtype=torch.float64)
        if self._counts_tokens:
            for micro_batch, result in zip(micro_batches, found, strict=True):
                out[micro_batch.flat] = result["logprobs"].to("cpu", torch.float64)
        return self._groups.sum_over_ranks(out).view(batch["token_ids"].shape).to(torch.float32)

    # ---- weights and state

    def export(self, directory: Path, *, version: int) -> WeightUpdate | None:
        """Write the current weights as `version` under Hugging Face names; None on every rank but 0."""
        return export_update(self._model, directory, version=version)

    def save(self, directory: Path) -> None:
        """Write model, optimizer and random state into folder `directory`, whole or not at all."""
        state = {
            "model": [chunk.state_dict() for chunk in self._model.chunks],
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "reference": self._reference.state_dict() if self._reference is not None else None,
        }
        save_rank_state(directory, state, rank=self._rank, layout=self._layout(), barrier=self._groups.barrier)

    def restore(self, directory: Path) -> None:
        """Continue from `save`, exactly.

        Raises:
            TrainerCheckpointError: not such a folder, or written by another layout.
        """
        state = load_rank_state(directory, rank=self._rank, layout=self._layout())
        for chunk, held in zip(self._model.chunks, state["model"], strict=True):
            chunk.load_state_dict(held)
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if self._reference is not None and state["reference"] is not None:
            self._reference.load_state_dict(state["reference"])
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

    def _check_routing(self, batch: TensorDict) -> None:
        if self._config.router_replay != "R3" or self._info.routing is None:
            return
        if "routed_experts" not in set(batch.keys()):
            raise RoutingError(
                "trainer.router_replay is R3, but the batch has no routed_experts; "
                "let the engine capture routing, or use trainer.router_replay=R2 or none"
            )
        check_routed_experts(batch["routed_experts"], batch["lengths"], routing=self._info.routing)

    def _micro_batches(self, batch: TensorDict, *, supervised: bool = False) -> list[MicroBatch]:
        """This rank's micro-batches; every rank has as many."""
        config = self._config
        plan = plan_micro_batches(
            batch["lengths"].tolist(),
            max_tokens=config.micro_batch_tokens * config.parallel.context,
            num_ranks=self._groups.data_size,
            padded=not config.packing,
        )
        weights = token_weights(
            batch["loss_mask"].sum(1), aggregation="token_mean" if supervised else self._loss.aggregation
        )
        builder = MicroBatchBuilder(
            batch,
            at=self._groups.coordinates,
            device=self._groups.device,
            packing=config.packing,
            token_weights=weights,
            replay="none" if supervised else config.router_replay,
            routing=self._info.routing,
            layers=self._model.replay.layers if self._model.replay else (),
            rotary=self._model.rotary,
        )
        return [builder.build(indices) for indices in plan[self._groups.data_rank]]

    def _proximal_pass(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Logprobs (and routing, for R2) of the weights before the first update of the batch."""
        with torch.no_grad():
            found = self._run(micro_batches, self._objective("logprobs"), forward_only=True)
        for micro_batch, result in zip(micro_batches, found or [{}] * len(micro_batches), strict=True):
            micro_batch.columns["proximal_logprobs"] = result.get("logprobs", torch.empty(0))
            if micro_batch.context.routing is not None:
                micro_batch.context.routing.mode = "replay"

    def _reference_pass(self, micro_batches: Sequence[MicroBatch], reference: ReferenceWeights) -> None:
        """Logprobs of the reference. It routes by itself: rows replayed are those of the policy."""
        routing = [mb.context.routing for mb in micro_batches]
        for micro_batch in micro_batches:
            micro_batch.context.routing = None
        with torch.no_grad(), reference.loaded():
            found = self._run(micro_batches, self._objective("logprobs"), forward_only=True)
        for micro_batch, result, held in zip(micro_batches, found or [{}] * len(micro_batches), routing, strict=True):
            micro_batch.columns["reference_logprobs"] = result.get("logprobs", torch.empty(0))
            micro_batch.context.routing = held

    def _update(
        self, batch: TensorDict, micro_batches: Sequence[MicroBatch], kind: Any, aux_loss_coefficient: float
    ) -> tuple[float, float]:
        """Forward, backward and optimizer update; (gradient norm, learning rate)."""
        self._set_aux_loss(aux_loss_coefficient, rows=int(batch["lengths"].sum()))
        self._optimizer.zero_grad()
        found = self._run(micro_batches, self._objective(kind), forward_only=False)
        for micro_batch, sums in zip(micro_batches, found or [{}] * len(micro_batches), strict=True):
            micro_batch.sums = {name: float(value) for name, value in sums.items()}
        return self._optimizer.step()

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

    def _objective(self, kind: Any) -> Objective:
        return Objective(
            kind=kind,
            loss=self._loss,
            tensor_group=tensor_group(),
            vocab_columns=self._vocab_columns(),
        )

    def _vocab_columns(self) -> int:
        """Columns of this rank's logits that are ids of the vocabulary; the rest is padding."""
        at, size = self._groups.coordinates, self._info.vocab_size
        width = -(-size // at.tensor)
        return max(0, min(width, size - at.tensor_rank * width))

    def _set_aux_loss(self, coefficient: float, *, rows: int) -> None:
        """Megatron weighs a micro-batch's balance loss by its tokens; here the weights sum to 1 over the batch."""
        self._model.config.moe_aux_loss_coeff = coefficient / max(1, rows)

    @property
    def _counts_tokens(self) -> bool:
        """Whether this rank's token sums count: tensor ranks of the last stage hold the same tokens."""
        return self._groups.is_last_stage and self._groups.coordinates.tensor_rank == 0

    def _token_sums(self, micro_batches: Sequence[MicroBatch], names: Sequence[str]) -> list[float]:
        if not self._counts_tokens:
            return [0.0] * len(names)
        return [sum(mb.sums[name] for mb in micro_batches) for name in names]

    def _metrics(self, micro_batches: Sequence[MicroBatch], steps: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Metrics of the updates `steps` (gradient norm, learning rate), summed over all ranks."""
        sums = [*self._token_sums(micro_batches, TOKEN_SUMS), *routing_sums([m.context.routing for m in micro_batches])]
        sums = self._groups.sum_over_ranks(torch.tensor(sums, dtype=torch.float64)).tolist()
        abs_max = max((mb.sums.get("abs_max", 0.0) for mb in micro_batches), default=0.0)
        largest = self._groups.sum_over_ranks(
            torch.tensor([abs_max], dtype=torch.float64), op=torch.distributed.ReduceOp.MAX
        )
        named: dict[str, float] = dict(zip((*TOKEN_SUMS, *ROUTING_SUMS), sums, strict=True))
        named["loss"] /= len(steps)
        grad_norms, lrs = zip(*steps, strict=True)
        return metrics_from_sums(named, abs_max=largest.item()) | {"grad_norm": max(grad_norms), "lr": lrs[-1]}

    def _nothing_to_train(self) -> dict[str, float]:
        empty: dict[str, float] = dict.fromkeys((*TOKEN_SUMS, *ROUTING_SUMS), 0.0)
        lr = [self._optimizer.skip() for _ in range(self._config.updates_per_batch)][-1]
        return metrics_from_sums(empty, abs_max=0.0) | {"grad_norm": 0.0, "lr": lr}

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
            "distributed_optimizer": int(self._config.distributed_optimizer),
        }


def scheduled_loss(
    logits: Tensor, *, micro_batch: MicroBatch, objective: Objective
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The objective in the form megatron's schedules take: (loss, token count, results).

    With a token count the schedules leave the loss as it is; the count itself is not used.
    """
    loss, results = objective(logits, micro_batch)
    return loss, torch.zeros((), dtype=torch.int, device=logits.device), results


def split_groups(batch: TensorDict, parts: int) -> list[TensorDict]:
    """The batch in at most `parts` batches of whole prompt groups, about as many groups each."""
    if parts == 1:
        return [batch]
    groups = batch["group"].unique(sorted=True)
    chunks = torch.tensor_split(groups, min(parts, len(groups)))
    return [batch[torch.isin(batch["group"], chunk)] for chunk in chunks]
