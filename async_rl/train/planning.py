"""Which rank trains which sequence of a batch, in which update and micro-batch, and what it weighs in the loss.

The plan is made once, from the numbers of the whole batch, and goes to all ranks unchanged, so that they agree on
weights, counts and micro-batches without seeing each other's tokens. Imports nothing of megatron: the driver plans.

Sequences 0 to 3 of 5, 9, 4 and 8 tokens on two data-parallel ranks, two micro-batches of at most 9 tokens each:

    rank 0    [[1], [2]]      13 tokens
    rank 1    [[3], [0]]      13 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from async_rl.batch.packing import Plan, plan_micro_batches
from async_rl.batch.training_batch import Int64Array, TrainingBatch
from async_rl.train.losses import LossConfig, token_weights
from async_rl.train.model import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdatePlan:
    """One optimizer update over all ranks, on some of the S sequences of a batch."""

    micro_batches: Plan
    """Of each data-parallel rank its micro-batches, each a list of numbers of sequences."""
    token_weights: NDArray[np.float32]
    """float32 [S], weight of each token of a sequence in the loss."""
    first_loss_token: Int64Array
    """int64 [S], number of the first token in the loss of a sequence among those of the update."""
    num_tokens: int
    """Over all ranks."""
    num_loss_tokens: int
    """Over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """A batch and its updates."""

    batch: TrainingBatch
    """Without content where the plan travels."""
    updates: Sequence[UpdatePlan | None]
    """In the order of the optimizer steps; None if a step has nothing to train."""

    def groups_of(self, data_rank: int) -> list[int]:
        """Numbers of the groups whose content a data-parallel rank needs."""
        micro_batches = [mb for update in self.updates if update is not None for mb in update.micro_batches[data_rank]]
        return sorted({int(self.batch.index[number, 0]) for numbers in micro_batches for number in numbers})


class Planner:
    """Makes plans."""

    def __init__(self, *, config: TrainerConfig, loss: LossConfig) -> None:
        self._config = config
        self._loss = loss

    def policy(self, batch: TrainingBatch) -> BatchPlan:
        """An update for each mini-batch of an RL batch.

        Trajectories of groups without spread are not forwarded, unless a KL or entropy term trains them too. With
        loss.count=all they count in the weights of the others all the same.

        Raises:
            ValueError: a mini-batch that trainer.updates_per_batch does not make.
        """
        count = self._config.updates_per_batch
        if int(batch.mini_batch.max()) >= count:
            raise ValueError(
                f"the batch has mini-batches up to {int(batch.mini_batch.max())} with "
                f"trainer.updates_per_batch={count}; number them 0 to {count - 1}, or change trainer.updates_per_batch"
            )
        forwarded = np.ones_like(batch.informative) if self._loss.needs_every_token else batch.informative
        counted = np.ones_like(batch.informative) if self._loss.count == "all" else batch.informative
        parts = [batch.mini_batch == number for number in range(count)]
        updates = [self._update(batch, part & forwarded, counted=part & counted, loss=self._loss) for part in parts]
        return BatchPlan(batch=batch, updates=updates)

    def whole(self, batch: TrainingBatch) -> BatchPlan:
        """One update of all sequences of an RL batch."""
        every = np.ones(len(batch), np.bool_)
        return BatchPlan(batch=batch, updates=[self._update(batch, every, counted=every, loss=self._loss)])

    def supervised(self, batch: TrainingBatch) -> BatchPlan:
        """One update of all sequences of a supervised batch."""
        every = np.ones(len(batch), np.bool_)
        mean_of_tokens = LossConfig()
        return BatchPlan(batch=batch, updates=[self._update(batch, every, counted=every, loss=mean_of_tokens)])

    def _update(
        self,
        batch: TrainingBatch,
        forwarded: NDArray[np.bool_],
        *,
        counted: NDArray[np.bool_],
        loss: LossConfig,
    ) -> UpdatePlan | None:
        """An update that forwards some sequences, and counts some in the weights; None if it forwards none.

        If the loss weighs whole trajectories, all sequences of one are in one micro-batch, which may then hold more
        than trainer.micro_batch_tokens (resume_routing=split).
        """
        if not forwarded.any():
            return None
        numbers = np.flatnonzero(forwarded)
        weights = np.zeros(len(batch), np.float32)
        weights[counted] = token_weights(
            torch.from_numpy(batch.num_loss_tokens[counted]),
            aggregation=loss.aggregation,
            trajectory=torch.from_numpy(batch.trajectory[counted]),
            group=torch.from_numpy(batch.index[counted, 0]),
            fixed_length=loss.fixed_length,
        ).numpy()
        first = np.zeros(len(batch), np.int64)
        first[numbers] = batch.num_loss_tokens[numbers].cumsum() - batch.num_loss_tokens[numbers]
        units: dict[int, list[int]] = {}
        for number in numbers.tolist():
            unit = int(batch.trajectory[number]) if loss.needs_whole_trajectories else number
            units.setdefault(unit, []).append(number)
        return UpdatePlan(
            micro_batches=self._micro_batches(batch, list(units.values())),
            token_weights=weights,
            first_loss_token=first,
            num_tokens=int(batch.lengths[numbers].sum()),
            num_loss_tokens=int(batch.num_loss_tokens[numbers].sum()),
        )

    def _micro_batches(self, batch: TrainingBatch, units: Sequence[list[int]]) -> Plan:
        """Micro-batches of whole units, each a list of sequences."""
        config = self._config
        plan = plan_micro_batches(
            [int(batch.lengths[unit].sum()) for unit in units],
            max_tokens=config.micro_batch_tokens * config.parallel.context,
            num_ranks=config.data_parallel,
            padded=not config.packing,
            # Megatron's interleaved schedule takes micro-batches in groups of as many as there are stages.
            multiple=config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1,
        )
        return [[[number for unit in chosen for number in units[unit]] for chosen in of_rank] for of_rank in plan]
