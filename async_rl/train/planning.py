"""A batch cut into the updates, and the micro-batches of this rank, that it is trained in."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from async_rl.batch.packing import plan_micro_batches
from async_rl.train.distributed import ProcessGroups
from async_rl.train.gpt import BuiltModel
from async_rl.train.losses import LossConfig, token_weights
from async_rl.train.model import TrainerConfig
from async_rl.train.step import MicroBatch, MicroBatchBuilder
from message_queue.tokens import RoutingSpec


def split_groups(batch: TensorDict, parts: int) -> list[TensorDict]:
    """The batch in at most `parts` batches of whole prompt groups, about as many groups each."""
    if parts == 1:
        return [batch]
    groups = batch["group"].unique(sorted=True)
    chunks = torch.tensor_split(groups, min(parts, len(groups)))
    return [batch[torch.isin(batch["group"], chunk)] for chunk in chunks]


class Planner:
    """Cuts batches into the micro-batches of one rank.

    Args:
        routing: what routing rows mean; None for a dense model.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        loss: LossConfig,
        groups: ProcessGroups,
        model: BuiltModel,
        routing: RoutingSpec | None,
    ) -> None:
        self._config = config
        self._loss = loss
        self._groups = groups
        self._model = model
        self._routing = routing

    def policy(self, batch: TensorDict) -> list[MicroBatch]:
        """This rank's micro-batches of an RL batch, which is one update; every rank has as many.

        Where the loss weighs whole trajectories, all sequences of one are in one micro-batch, which may then hold more
        than trainer.micro_batch_tokens where a trajectory does (resume_routing=split).
        """
        weights = token_weights(
            batch["loss_mask"].sum(1),
            aggregation=self._loss.aggregation,
            trajectory=batch.get("trajectory", None),
            group=batch.get("group", None),
            fixed_length=self._loss.fixed_length,
        )
        whole = self._loss.needs_whole_trajectories and "trajectory" in set(batch.keys())
        units = _trajectories(batch) if whole else [[i] for i in range(len(batch))]
        return self._build(batch, units, weights, supervised=False)

    def supervised(self, batch: TensorDict) -> list[MicroBatch]:
        """This rank's micro-batches of a supervised batch; every rank has as many."""
        weights = token_weights(batch["loss_mask"].sum(1), aggregation="token_mean")
        return self._build(batch, [[i] for i in range(len(batch))], weights, supervised=True)

    def _build(
        self, batch: TensorDict, units: list[list[int]], weights: torch.Tensor, *, supervised: bool
    ) -> list[MicroBatch]:
        """Micro-batches of whole units, each a list of sequences."""
        config = self._config
        lengths: list[int] = batch["lengths"].tolist()
        plan = plan_micro_batches(
            [sum(lengths[i] for i in unit) for unit in units],
            max_tokens=config.micro_batch_tokens * config.parallel.context,
            num_ranks=self._groups.data_size,
            padded=not config.packing,
            # Megatron's interleaved schedule takes micro-batches in groups of as many as there are stages.
            multiple=config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1,
        )
        builder = MicroBatchBuilder(
            batch,
            at=self._groups.coordinates,
            device=self._groups.device,
            packing=config.packing,
            token_weights=weights,
            replay="none" if supervised else config.router_replay,
            routing=self._routing,
            layers=self._model.replay.layers if self._model.replay else (),
            rotary=self._model.rotary,
        )
        return [builder.build([i for unit in chosen for i in units[unit]]) for chosen in plan[self._groups.data_rank]]


def _trajectories(batch: TensorDict) -> list[list[int]]:
    """The sequences of each trajectory."""
    of: list[int] = batch["trajectory"].unique(return_inverse=True)[1].tolist()
    units: list[list[int]] = [[] for _ in range(max(of, default=-1) + 1)]
    for sequence, trajectory in enumerate(of):
        units[trajectory].append(sequence)
    return units
