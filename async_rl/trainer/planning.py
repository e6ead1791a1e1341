"""Plans the rank, update, micro-batch and loss weights of each sequence of a batch.

The driver plans once from the lengths in the whole batch and sends the plan to all ranks. The ranks then agree on
weights, counts and micro-batches without seeing each other's tokens. This module must not import megatron.

Sequences 0 to 3 of 5, 9, 4 and 8 tokens on two data-parallel ranks, micro-batches of at most 9 tokens:

    rank 0    [[1], [2]]      13 tokens
    rank 1    [[3], [0]]      13 tokens

With (2, 4, 1, 3) tokens in the loss, `first_loss_token` is (0, 2, 6, 7) and `num_loss_tokens` is 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from async_rl.trainer.batch.forest import Forest, forest_of_prefixes
from async_rl.trainer.batch.packing import Plan, plan_micro_batches
from async_rl.trainer.batch.training_batch import Int64Array, TrainingBatch
from async_rl.trainer.loss.losses import LossConfig, PPOClip, token_weights
from async_rl.trainer.model.model import TrainerConfig

_MEAN_OF_TOKENS = PPOClip(aggregation="token_mean")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdatePlan:
    """One optimizer update over all ranks, on a part of the S sequences of a batch."""

    micro_batches: Plan
    """micro_batches[data rank][i] is a list of sequence numbers."""
    token_weights: NDArray[np.float32]
    """float32 [S], loss weight of the tokens of each sequence."""
    first_loss_token: Int64Array
    """int64 [S], number of tokens in the loss of the update before this sequence."""
    runs: Int64Array
    """int64 [runs, 2], (first position, tokens) of the runs that the ranks compute; a run of several sequences in a
    micro-batch is there once."""
    num_tokens: int
    """Tokens of the sequences of the update on all ranks."""
    num_loss_tokens: int
    """Tokens in the loss of the update on all ranks."""

    @property
    def sequences(self) -> list[int]:
        """Numbers of the sequences of all ranks, ascending."""
        return sorted(number for of_rank in self.micro_batches for numbers in of_rank for number in numbers)

    def loss_tokens_in_batch(self, batch: TrainingBatch) -> Int64Array:
        """int64 [num_loss_tokens], number in the loss of the whole batch of each token in the loss of the update.

        Sequences of (2, 3, 1) tokens in the loss; the update has the first and the last: (0, 1, 5).
        """
        own = self.sequences
        first = batch.num_loss_tokens.cumsum() - batch.num_loss_tokens
        counts = batch.num_loss_tokens[own]
        return np.arange(counts.sum()) + np.repeat(first[own] - self.first_loss_token[own], counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """A batch and its updates."""

    batch: TrainingBatch
    """The batch. When the driver sends the plan to a rank, it contains only the content that the rank needs."""
    updates: Sequence[UpdatePlan | None]
    """In the order of the optimizer steps; None if a step has no gradient."""
    walk: Mapping[int, UpdatePlan] = field(default_factory=dict[int, UpdatePlan])
    """Optimizer updates of the weights of a version -> pass over its tokens in `batch.of_update`, newest first; empty
    if no old logprobs are computed. The first update computes those of fresh tokens itself, so that they have none."""

    def groups_of(self, data_rank: int) -> list[int]:
        """Indices in `batch.contents` of the groups that a data-parallel rank needs, ascending."""
        passes = [*(update for update in self.updates if update is not None), *self.walk.values()]
        micro_batches = [numbers for each in passes for numbers in each.micro_batches[data_rank]]
        return sorted({int(self.batch.index[number, 0]) for numbers in micro_batches for number in numbers})


class Planner:
    """Plans batches.

    Args:
        config: layout and sizes of the micro-batches.
        loss: determines the weights of the tokens.
        walks: whether old logprobs are computed.
        pair_cost: cost of a token and a token that it attends to, in tokens; see `flops.pair_cost`.
        teaches: whether teachers have a term at every token.
    """

    def __init__(
        self,
        *,
        config: TrainerConfig,
        loss: LossConfig,
        walks: bool = False,
        pair_cost: float = 0.0,
        teaches: bool = False,
    ) -> None:
        self._every_token = teaches or loss.needs_every_token
        self._config = config
        self._loss = loss
        self._walks = walks
        self._pair_cost = pair_cost

    def policy(self, batch: TrainingBatch) -> BatchPlan:
        """Plan one update per mini-batch of an RL batch.

        Trajectories that are not informative are not forwarded, unless a KL, entropy or teacher term trains them. With
        loss.count=all they still count in the weights of the other trajectories.

        Raises:
            ValueError: the batch has more mini-batches than trainer.updates_per_batch.
        """
        count = self._config.updates_per_batch
        if int(batch.mini_batch.max()) >= count:
            raise ValueError(
                f"the batch has mini-batches up to {int(batch.mini_batch.max())} with "
                f"trainer.updates_per_batch={count}; number them 0 to {count - 1}, or change trainer.updates_per_batch"
            )
        forwarded = np.ones_like(batch.informative) if self._every_token else batch.informative
        counted = np.ones_like(batch.informative) if self._loss.count == "all" else batch.informative
        parts = [batch.mini_batch == number for number in range(count)]
        updates = [self._update(batch, part & forwarded, counted=part & counted, loss=self._loss) for part in parts]
        return BatchPlan(batch=batch, updates=updates, walk=self._walk(batch, forwarded) if self._walks else {})

    def whole(self, batch: TrainingBatch) -> BatchPlan:
        """Plan one update on all sequences of an RL batch."""
        every = np.ones(len(batch), np.bool_)
        return BatchPlan(batch=batch, updates=[self._update(batch, every, counted=every, loss=self._loss)])

    def supervised(self, batch: TrainingBatch) -> BatchPlan:
        """Plan one update on all sequences of a supervised batch, with equal weights of all tokens."""
        every = np.ones(len(batch), np.bool_)
        return BatchPlan(
            batch=batch, updates=[self._update(batch, every, counted=every, loss=_MEAN_OF_TOKENS, shares=False)]
        )

    def _walk(self, batch: TrainingBatch, forwarded: NDArray[np.bool_]) -> dict[int, UpdatePlan]:
        """`BatchPlan.walk` over the sequences `forwarded` [S]."""
        found: dict[int, UpdatePlan] = {}
        for update in batch.sampled_at:
            part = batch.of_update(update)
            fresh = (batch.mini_batch == 0) & (update == batch.current_update)
            sampled = forwarded & (part.num_loss_tokens > 0) & ~fresh
            plan = self._update(part, sampled, counted=sampled, loss=_MEAN_OF_TOKENS)
            if plan is not None:
                found[update] = plan
        return found

    def _update(
        self,
        batch: TrainingBatch,
        forwarded: NDArray[np.bool_],
        *,
        counted: NDArray[np.bool_],
        loss: LossConfig,
        shares: bool = True,
    ) -> UpdatePlan | None:
        """Plan an update on the sequences `forwarded` [S]; None if there are none.

        If the loss weights whole trajectories, all sequences of a trajectory (resume_routing=split, forks) are in one
        micro-batch; it may then exceed trainer.micro_batch_tokens.

        Args:
            batch: S sequences.
            forwarded: bool [S], sequences with a forward pass.
            counted: bool [S], sequences that count in the loss weights.
            loss: aggregation of the loss.
            shares: whether common prefixes may be shared.
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
        unit_of = batch.trajectory if loss.needs_whole_trajectories else np.arange(len(batch))
        units: dict[int, list[int]] = {}
        for number in numbers.tolist():
            units.setdefault(int(unit_of[number]), []).append(number)
        micro_batches, runs = self._micro_batches(batch, list(units.values()), shares=shares)
        return UpdatePlan(
            micro_batches=micro_batches,
            runs=runs,
            token_weights=weights,
            first_loss_token=first,
            num_tokens=int(batch.lengths[numbers].sum()),
            num_loss_tokens=int(batch.num_loss_tokens[numbers].sum()),
        )

    def _micro_batches(
        self, batch: TrainingBatch, units: Sequence[list[int]], *, shares: bool
    ) -> tuple[Plan, Int64Array]:
        """Plan micro-batches of units: lists of sequences that stay together; and `UpdatePlan.runs`."""
        config, numbers = self._config, [number for unit in units for number in unit]
        if shares and config.shares_prefixes:
            forest = forest_of_prefixes(batch.lengths.tolist(), batch.prefixes, numbers)
        else:
            forest = Forest.separate(batch.lengths[numbers].tolist())
        at = {number: i for i, number in enumerate(numbers)}
        plan = plan_micro_batches(
            forest,
            units=[[at[number] for number in unit] for unit in units],
            max_tokens=config.micro_batch_tokens * config.parallel.context,
            num_ranks=config.data_parallel,
            padded=not config.packing,
            # Megatron's interleaved schedule requires a multiple of the number of stages.
            multiple=config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1,
            pair_cost=self._pair_cost,
        )
        nodes = [sorted({n for i in chosen for n in forest.path(i)}) for of_rank in plan for chosen in of_rank]
        runs = np.stack([forest.start, forest.length], axis=1)[[n for of_one in nodes for n in of_one]]
        return [[[numbers[i] for i in chosen] for chosen in of_rank] for of_rank in plan], runs
