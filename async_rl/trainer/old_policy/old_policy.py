"""Old logprobs: those of the trainer with the weights of the version that sampled each token.

    versions    the weights of earlier versions, as lossless changes
    scoring     under each version, from the newest to the oldest, the sequences with tokens of that version are scored
                over their routing rows, up to the last of these tokens; then the weights return bit by bit
    served      every exact token (see `batch.training_batch`) verifies the engine: its old and its behaviour logprob
                differ by rounding only, at any staleness

A sequence is forwarded once for each version that it has tokens of. Fresh tokens, those of the weights at the start of
the batch in its first update, need no such pass: their logprobs in the update are the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.distributed import ProcessGroups
from async_rl.trainer.forward_backward import ForwardBackward
from async_rl.trainer.model.gpt import BuiltModel
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.old_policy.scoring import VersionLogprobs, VersionScorer
from async_rl.trainer.old_policy.served import LEAST_TOKENS, Verifier, layer_sets
from async_rl.trainer.old_policy.versions import VersionStore, changed_tensors
from async_rl.trainer.planning import BatchPlan, UpdatePlan
from async_rl.trainer.step import MicroBatches
from message_queue.tokens import RoutingSpec

Walked = Mapping[int, VersionLogprobs]
"""Optimizer updates of a version -> logprobs of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPolicyConfig:
    """How old logprobs are computed and verified."""

    max_staleness: int
    """Optimizer updates for which versions are stored."""
    bound: Callable[[Sequence[float]], float] = lambda _noise: math.inf
    """Largest accepted k3 between a replica and a version, from the k3 of the first batches; see
    `MismatchConfig.bound`."""


class OldPolicy:
    """Computes and verifies the old logprobs of batches. All methods are collective.

    Args:
        config: how.
        trainer: settings of the trainer.
        model: this rank's part of the model.
        groups: process groups of this rank.
        passes: forward passes of this rank.
        micro_batches: builds the micro-batches of a pass over a batch.
        routing: layers and shape of the routing rows in the batch; None for a dense model.

    Attributes:
        store: the versions of this rank.
    """

    def __init__(
        self,
        config: OldPolicyConfig,
        *,
        trainer: TrainerConfig,
        model: BuiltModel,
        groups: ProcessGroups,
        passes: ForwardBackward,
        micro_batches: Callable[[TrainingBatch, UpdatePlan], MicroBatches],
        routing: RoutingSpec | None,
    ) -> None:
        tensors = changed_tensors(model.chunks)
        self.store = VersionStore(tensors, keep=config.max_staleness)
        self._groups = groups
        self._passes = passes
        replays = trainer.router_replay == "R3" and not trainer.replay_threshold
        self._scorer = VersionScorer(
            self.store,
            groups=groups,
            passes=passes,
            micro_batches=micro_batches,
            routing=routing if replays else None,
        )
        self._verifier = None
        if replays or routing is None:  # else engine and trainer may use other experts
            self._verifier = Verifier(
                self._scorer,
                bound=config.bound,
                least_tokens=1 if trainer.dtype == "float32" else LEAST_TOKENS,
                sets=layer_sets(model.chunks, tensors, shape=model.shape),
            )

    def walk(self, plan: BatchPlan, planned: Sequence[tuple[UpdatePlan, MicroBatches]]) -> Walked:
        """Score the tokens of each stored version, and give the micro-batches their old logprobs."""
        found = self._scorer.walk(plan)
        for update, micro_batches in planned:
            micro_batches.old = self._scorer.of_update(plan.batch, update, found)
        return found

    def verify(self, plan: BatchPlan, walked: Walked, micro_batches: MicroBatches | None) -> dict[str, float]:
        """Verify what replicas have served, before the first optimizer step; returns metrics.

        Args:
            plan: the batch.
            walked: result of `walk`.
            micro_batches: of the first update, after its backward pass; None if it has no gradient.

        Raises:
            MismatchError: a replica served other weights than it said.
        """
        largest, update, now = math.nan, plan.updates[0], plan.batch.current_update
        if self._verifier is not None:
            every = dict(walked)
            if micro_batches is not None and update is not None and now in self.store:
                counted = micro_batches.results if self._passes.counts_tokens else []
                current = [results.token_results["current"] for results in counted]
                current = self._passes.of_update(update, micro_batches, current)
                every[now] = self._scorer.fresh(plan.batch, update, current)
            largest = self._verifier.verify(every)
        of_one_pass = sum(update.runs[:, 1].sum() for update in plan.updates if update is not None)
        return {
            "old/k3_largest": largest,
            "old/passes": float(sum(of.plan.runs[:, 1].sum() for of in walked.values()) / of_one_pass),
            "old/versions": float(len(walked)),
            "old/stored_share": self.store.share,
        }

    def state(self) -> dict[str, Any]:
        """The older versions of this rank as an entry of a checkpoint, for `VersionStore.restore`."""
        return {"versions": ShardedObject("versions", self.store.state(), (self._groups.size,), (self._groups.rank,))}
