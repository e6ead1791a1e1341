"""Scores the tokens of a batch with the weights of the versions that sampled them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.trainer.batch.training_batch import Int64Array, TrainingBatch
from async_rl.trainer.forward_backward import ForwardBackward
from async_rl.trainer.metrics import routing_sums
from async_rl.trainer.mismatch import k3_of
from async_rl.trainer.old_policy.versions import VersionStore
from async_rl.trainer.planning import BatchPlan, UpdatePlan
from async_rl.trainer.step import MicroBatches, OldLogprobs
from message_queue.tokens import RoutingSpec
from message_queue.training_sequence import SampledRun


class Served(NamedTuple):
    """Tokens that a replica sampled with a version."""

    replica: str
    """Name of the replica."""
    version: int
    """`param_version`."""


def served_by(run: SampledRun) -> Served:
    """Who sampled a run."""
    return Served(run.replica, run.version)


@dataclass(frozen=True, slots=True, eq=False)
class VersionLogprobs:
    """Logprobs under a version of its tokens in `batch`."""

    batch: TrainingBatch
    """`TrainingBatch.of_update` of the version."""
    plan: UpdatePlan
    """The pass."""
    logprobs: Tensor
    """float64 [num_loss_tokens of the pass], of all ranks."""

    def places(self, numbers: Sequence[int]) -> Int64Array:
        """Places in `logprobs` of the tokens of these sequences, one after the other."""
        first, counts = self.plan.first_loss_token, self.batch.num_loss_tokens
        places = [np.arange(first[number], first[number] + counts[number]) for number in numbers]
        return np.concatenate([np.zeros(0, np.int64), *places])

    def of_sequences(self, numbers: Sequence[int]) -> Tensor:
        """Logprobs of the tokens of these sequences, one after the other."""
        return self.logprobs[self.places(numbers)]


Walked = Mapping[int, VersionLogprobs]
"""Optimizer updates of a version -> logprobs of its tokens."""


class VersionScorer:
    """Scores the tokens of batches under the versions that sampled them. All methods are collective.

    Args:
        store: versions of this rank.
        passes: forward passes of this rank.
        micro_batches: builds the micro-batches of a pass over a batch.
        routing: layers of the routing rows; None if none are replayed.

    Attributes:
        store: the versions of this rank.
        groups: process groups of this rank.
        data_rank: rank in the data-parallel group.
    """

    def __init__(
        self,
        store: VersionStore,
        *,
        passes: ForwardBackward,
        micro_batches: Callable[[TrainingBatch, UpdatePlan], MicroBatches],
        routing: RoutingSpec | None,
    ) -> None:
        self.store = store
        self.groups = passes.groups
        self.data_rank = passes.groups.data_rank
        self._routing = routing
        self._passes = passes
        self._micro_batches = micro_batches

    def walk(self, plan: BatchPlan, planned: Sequence[MicroBatches]) -> Walked:
        """Store the current weights, score the tokens of each stored version, and give the micro-batches their old
        logprobs.

        Args:
            plan: the batch.
            planned: the micro-batches of its updates on this rank.
        """
        self.store.add(plan.batch.current_update)
        found: dict[int, VersionLogprobs] = {}
        with self.store.walk() as walk:
            for update, of_version in plan.walk.items():
                if update in self.store:
                    walk.load(update)
                    found[update] = self.score(plan.batch.of_update(update), of_version)
        for micro_batches in planned:
            micro_batches.old = self._of_update(plan.batch, micro_batches.update, found)
        return found

    def score(self, batch: TrainingBatch, of_version: UpdatePlan) -> VersionLogprobs:
        """Logprobs under the weights that the model has now."""
        micro_batches = self._micro_batches(batch, of_version)
        logprobs = self._passes.of_update(micro_batches, self._passes.logprobs(micro_batches))
        return VersionLogprobs(batch, of_version, logprobs)

    def _of_update(self, batch: TrainingBatch, update: UpdatePlan, found: Walked) -> OldLogprobs:
        """Old logprobs of the tokens of this rank in an optimizer step.

        Args:
            batch: with the content of the sequences of this rank.
            update: the optimizer step.
            found: result of `walk`.
        """
        tokens = update.num_loss_tokens
        out = OldLogprobs(torch.full((tokens,), torch.nan), torch.zeros(tokens, dtype=torch.bool))
        numbers, places, lag = self._tokens(batch, update)
        sampled = batch.current_update + batch.mini_batch[numbers[0]] - lag if numbers else lag
        for version, logprobs in found.items():
            if (own := (sampled == version) & (lag > 0)).any():  # the tokens of an update are all fresh, or none
                out.logprobs[places[own]] = logprobs.of_sequences(numbers).float()
        if batch.current_update in self.store:
            out.is_fresh[places[lag == 0]] = True
        return out

    def fresh(self, batch: TrainingBatch, update: UpdatePlan, current: Tensor) -> VersionLogprobs:
        """Logprobs of the fresh tokens of the first update, as a pass would have found them.

        Args:
            batch: with the content of the sequences of this rank.
            update: the first update.
            current: float64 [num_loss_tokens of `update`], logprobs in the update.
        """
        part, first = batch.of_update(batch.current_update), np.zeros(len(batch), np.int64)
        counts = part.num_loss_tokens[update.sequences]
        first[update.sequences] = counts.cumsum() - counts
        plan = replace(update, first_loss_token=first, num_loss_tokens=int(counts.sum()))
        numbers, places, lag = self._tokens(batch, update)
        found = VersionLogprobs(part, plan, torch.full((plan.num_loss_tokens,), torch.nan, dtype=torch.float64))
        found.logprobs[found.places(numbers)] = current[places[lag == 0]]
        return found

    def _tokens(self, batch: TrainingBatch, update: UpdatePlan) -> tuple[list[int], Int64Array, Int64Array]:
        """Sequences of this rank; place in the update, and lag, of each of their tokens in the loss."""
        numbers = self._own(update)
        if not numbers:
            return [], np.zeros(0, np.int64), np.zeros(0, np.int64)
        tokens, counts = batch.loss_tokens_of(numbers)
        first = update.first_loss_token[numbers] - (counts.cumsum() - counts)
        return numbers, np.arange(counts.sum()) + first.repeat(counts), tokens.lag

    def routing(self, batch: TrainingBatch, of_version: UpdatePlan) -> dict[int, list[float]]:
        """Layer -> ROUTING_SUMS of a pass under the weights that the model has now, over all ranks."""
        micro_batches = self._micro_batches(batch, of_version)
        self._passes.logprobs(micro_batches, counts_routing=True)
        layers = () if self._routing is None else self._routing.layers
        sums = routing_sums([results.routing_sums for results in micro_batches.results], layers=layers)
        return dict(zip(layers, self.groups.sum_over_ranks(sums).tolist(), strict=True))

    def k3(self, found: Iterable[VersionLogprobs]) -> dict[Served, tuple[float, int]]:
        """Replica and version -> k3 of their exact tokens in nat, and number of these tokens; equal on all ranks."""
        here: dict[Served, list[float]] = {}
        for logprobs in found if self._counts else ():
            for served, exact, k3 in self._by_run(logprobs):
                sums = here.setdefault(served, [0.0, 0.0])
                sums[0] += float(k3[exact].sum())
                sums[1] += int(exact.sum())
        whole: dict[Served, list[float]] = {}
        for of_rank in self.groups.gather(here):
            for served, (k3, tokens) in of_rank.items():
                sums = whole.setdefault(served, [0.0, 0.0])
                sums[0] += k3
                sums[1] += tokens
        return {served: (k3 / tokens, int(tokens)) for served, (k3, tokens) in sorted(whole.items()) if tokens}

    def _by_run(self, logprobs: VersionLogprobs) -> Iterator[tuple[Served, Tensor, Tensor]]:
        """Of each sampled run of this rank: who sampled it, which of its tokens are exact, and their k3."""
        batch, numbers = logprobs.batch, self._own(logprobs.plan)
        if not numbers:
            return
        tokens, _ = batch.loss_tokens_of(numbers)
        k3 = k3_of(logprobs.of_sequences(numbers).float(), torch.from_numpy(tokens.logprobs))
        exact, at = torch.from_numpy(tokens.exact), 0
        for number in numbers:
            for run in batch.sequence(number).runs:
                if batch.version_updates[run.version] == batch.only_update:
                    own = slice(at, at + run.tokens)
                    yield served_by(run), exact[own], k3[own]
                    at += run.tokens

    def _own(self, update: UpdatePlan) -> list[int]:
        """Numbers of the sequences of this rank."""
        return [number for numbers in update.micro_batches[self.data_rank] for number in numbers]

    @property
    def _counts(self) -> bool:
        """Whether the tokens of this rank count: of the ranks with the same sequences one does."""
        at = self.groups.coordinates
        return self.groups.is_last_stage and at.tensor_rank == 0 and at.context_rank == 0
