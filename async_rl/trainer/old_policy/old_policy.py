"""Old logprobs: those of the trainer with the weights of the version that sampled each token.

    versions    the weights of earlier versions, as lossless changes
    scoring     under each version, from the newest to the oldest, the sequences with tokens of that version are scored
                over their routing rows, up to the last of these tokens; then the weights return bit by bit
    served      the weights that the tokens of a replica fit, if they do not fit their version

Every exact token (see `batch.training_batch`) verifies the engine: its old and its behaviour logprob differ by rounding
only, at any staleness.

A sequence is forwarded once for each version that it has tokens of. Fresh tokens, those of the weights at the start of
the batch in its first update, need no such pass: their logprobs in the update are the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject

from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.forward_backward import ForwardBackward
from async_rl.trainer.loss.reference import changed_tensors
from async_rl.trainer.mismatch import MismatchError
from async_rl.trainer.old_policy.scoring import VersionScorer, Walked
from async_rl.trainer.old_policy.served import ServedWeights, layer_sets
from async_rl.trainer.old_policy.versions import VersionStore
from async_rl.trainer.planning import BatchPlan, UpdatePlan
from async_rl.trainer.step import MicroBatches
from message_queue.tokens import RoutingSpec

FIRST_BATCHES = 5
"""Batches whose k3 is the noise of the run."""
LEAST_TOKENS = 64
"""Tokens of a replica and version that are verified together in half precision, where k3 varies by token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldPolicyConfig:
    """How old logprobs are computed and verified."""

    max_staleness: int
    """Optimizer updates for which versions are stored."""
    bound: Callable[[Sequence[float]], float] = lambda _noise: math.inf
    """Largest accepted k3 between a replica and a version, from the k3 of the first batches; see
    `MismatchConfig.bound`."""


class OldPolicy(VersionScorer):
    """Computes the old logprobs of batches, and verifies what replicas have served. All methods are collective.

    Args:
        config: how.
        passes: forward passes of this rank.
        micro_batches: builds the micro-batches of a pass over a batch.
        routing: layers and shape of the routing rows in the batch; None for a dense model.
    """

    def __init__(
        self,
        config: OldPolicyConfig,
        *,
        passes: ForwardBackward,
        micro_batches: Callable[[TrainingBatch, UpdatePlan], MicroBatches],
        routing: RoutingSpec | None,
    ) -> None:
        trainer, model = passes.config, passes.model
        tensors = changed_tensors(model.chunks)
        replays = trainer.router_replay == "R3" and not trainer.replay_threshold
        super().__init__(
            VersionStore(tensors, keep=config.max_staleness),
            passes=passes,
            micro_batches=micro_batches,
            routing=routing if replays else None,
        )
        self._bound = config.bound
        self._least_tokens = 1 if trainer.dtype == "float32" else LEAST_TOKENS
        self._verifies = replays or routing is None  # else engine and trainer may use other experts
        self._sets = layer_sets(model.chunks, tensors, shape=model.shape) if self._verifies else {}
        self._noise: list[float] = []

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
        if self._verifies:
            every = dict(walked)
            if micro_batches is not None and update is not None and now in self.store:
                counted = micro_batches.results if self._passes.counts_tokens else []
                current = [results.token_results["current"] for results in counted]
                current = self._passes.of_update(micro_batches, current)
                every[now] = self.fresh(plan.batch, update, current)
            largest = self._largest_k3(every)
        of_one_pass = sum(update.runs[:, 1].sum() for update in plan.updates if update is not None)
        return {
            "old/k3_largest": largest,
            "old/passes": float(sum(of.plan.runs[:, 1].sum() for of in walked.values()) / of_one_pass),
            "old/versions": float(len(walked)),
            "old/stored_share": self.store.share,
        }

    def _largest_k3(self, found: Walked) -> float:
        """Largest k3 of a replica and version in nat; NaN without exact tokens.

        Raises:
            MismatchError: it exceeds the bound.
        """
        every = self.k3(found.values())
        k3 = {served: value for served, (value, tokens) in every.items() if tokens >= self._least_tokens}
        if not k3:
            return math.nan
        worst = max(k3, key=lambda served: math.inf if math.isnan(k3[served]) else k3[served])
        bound = self._bound(self._noise)
        if not k3[worst] <= bound:
            of_version = next(each for each in found.values() if worst in self.k3([each]))
            instead = ServedWeights(self, self._sets, served=worst, of_version=of_version, bound=bound).name()
            raise MismatchError(
                f"{worst.replica} has served other weights than version {worst.version}: the k3 of its tokens under "
                f"that version is {k3[worst]:.3g}, more than {bound:.3g} (mismatch.max_k3); {instead}"
            )
        if len(self._noise) < FIRST_BATCHES:
            self._noise.append(k3[worst])
        return k3[worst]

    def state(self) -> dict[str, Any]:
        """The older versions of this rank as an entry of a checkpoint, for `VersionStore.restore`."""
        return {"versions": ShardedObject("versions", self.store.state(), (self.groups.size,), (self.groups.rank,))}
