"""Queue batch -> training batch and metrics. Works on heads of groups alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from async_rl.batch.advantage import AdvantageConfig, compute_advantages
from async_rl.batch.training_batch import Int64Array, TrainingBatch, training_batch
from async_rl.observe.metrics import batch_metrics, masking_metrics, staleness_histogram
from async_rl.rollout.schedule import scheduled_groups
from message_queue.contract import Batch
from message_queue.heads import GroupHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedBatch:
    """What one batch of the queue gives to the trainer and to the records."""

    batch: TrainingBatch
    """For the trainer."""
    gradient_tokens: Sequence[int]
    """Tokens with gradient of each group."""
    lengths: Sequence[int]
    """Tokens with gradient of each trajectory that did not fail."""
    staleness_tokens: Mapping[int, int]
    """Tokens with gradient by staleness."""
    metrics: Mapping[str, float]
    """Those that the heads determine."""
    schedule: Sequence[Mapping[str, Any]]
    """See `async_rl.rollout.schedule`."""


def prepare(
    batch: Batch,
    contents: Sequence[Any],
    *,
    advantage: AdvantageConfig,
    version_updates: Mapping[int, int],
    kept_kv: bool,
    updates_per_batch: int = 1,
    seed: int = 0,
) -> PreparedBatch:
    """Leave out rollouts that failed, mask tokens that are too old, and split the rest into mini-batches.

    Advantages are computed over all rollouts that did not fail, masked or not.

    Args:
        contents: GroupContent of each group, or a reference to it.
        version_updates: param_version -> optimizer updates those weights hold.
        kept_kv: see TrainingBatch. updates_per_batch, seed: see `mini_batches_of`.
    """
    heads = batch.groups
    sound = [_without_failed(head) for head in heads]
    mini_batches = mini_batches_of(
        [head.group for head in heads], count=updates_per_batch, seed=seed, update=batch.update
    )
    advantages = compute_advantages(sound, advantage)
    made = training_batch(
        heads,
        contents,
        advantages=advantages,
        current_update=batch.update,
        version_updates=version_updates,
        min_update=batch.min_update,
        kept_kv=kept_kv,
        mini_batches=mini_batches,
    )
    lengths = _sums(made.num_loss_tokens, made.trajectory, len(advantages.values))
    staleness: dict[str, Any] = {
        "update": batch.update,
        "version_updates": version_updates,
        "min_update": batch.min_update,
        "mini_batches": mini_batches,
    }
    return PreparedBatch(
        batch=made,
        gradient_tokens=_sums(made.num_loss_tokens, made.index[:, 0], len(heads)),
        lengths=lengths,
        staleness_tokens=staleness_histogram(sound, **staleness),
        metrics={
            **batch_metrics(sound, **staleness),
            **masking_metrics([t.num_sampled for g in sound for t in g.trajectories], lengths, advantages.values),
            "length/trained_mean": sum(lengths) / len(lengths),
        },
        schedule=scheduled_groups(heads, version_updates=version_updates),
    )


def mini_batches_of(groups: Sequence[int], *, count: int, seed: int, update: int) -> dict[int, int]:
    """Group id -> its mini-batch, from 0: a random split of whole groups into `count` parts of equal size.

    It depends on the ids, not on their order, so a batch that is trained again after a restart is split as before.

    Args:
        seed: of the run. update: optimizer updates held by the weights at the start of the batch.
    """
    order = np.random.default_rng((abs(seed), update)).permutation(np.sort(np.array(groups, np.int64)))
    parts = np.array_split(order, count)
    return {int(group): number for number, part in enumerate(parts) for group in part}


def _without_failed(head: GroupHead) -> GroupHead:
    """The head without trajectories that ended with an error."""
    return msgspec.structs.replace(head, trajectories=tuple(t for t in head.trajectories if not t.failed))


def _sums(tokens: Int64Array, of: Int64Array, count: int) -> list[int]:
    """Sum of `tokens` [S] for each of `count` owners; of: int64 [S], the owner of each."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, of, tokens)
    return sums.tolist()
