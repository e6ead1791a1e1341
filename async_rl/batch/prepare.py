"""A batch of the queue -> what the trainer is given, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from async_rl.batch.advantage import AdvantageConfig, Advantages, compute_advantages
from async_rl.batch.collate import collate
from async_rl.observe.lengths import gradient_lengths
from async_rl.observe.metrics import batch_metrics, masking_metrics, staleness_histogram
from async_rl.rollout.schedule import scheduled_groups
from message_queue.contract import Batch
from message_queue.tokens import StopReason
from message_queue.trajectory import PromptGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedBatch:
    """tensors: see `collate`. gradient_tokens: of each group, as the tensors have them. lengths: of each trajectory.

    staleness_tokens: tokens with gradient by staleness. metrics: that the trajectories determine.
    schedule: see `async_rl.rollout.schedule`.
    """

    tensors: TensorDict
    gradient_tokens: Sequence[int]
    lengths: Sequence[int]
    staleness_tokens: Mapping[int, int]
    metrics: Mapping[str, float]
    schedule: Sequence[Mapping[str, Any]]


def prepare(
    batch: Batch[PromptGroup],
    *,
    advantage: AdvantageConfig,
    version_updates: Mapping[int, int],
    kept_kv: bool,
    updates_per_batch: int = 1,
    seed: int = 0,
) -> PreparedBatch:
    """Leave out rollouts that failed, mask what is too old, split into mini-batches, and collate the rest.

    Advantages are those of all rollouts that did not fail, masked or not: a baseline has no age.

    Args:
        version_updates: param_version -> optimizer updates those weights hold.
        kept_kv: see `collate`. updates_per_batch, seed: see `mini_batches_of`.
    """
    groups = [_without_failed(group) for group in batch.groups]
    mini_batches = mini_batches_of(
        [group.group for group in groups], count=updates_per_batch, seed=seed, update=batch.update
    )
    advantages = compute_advantages(groups, advantage)
    tensors = collate(
        groups,
        advantages=advantages,
        current_update=batch.update,
        version_updates=version_updates,
        min_update=batch.min_update,
        kept_kv=kept_kv,
        mini_batches=mini_batches,
    )
    young = frozenset(version for version, update in version_updates.items() if update >= batch.min_update)
    lengths = gradient_lengths(groups, versions=young)
    return PreparedBatch(
        tensors=tensors,
        gradient_tokens=_tokens_of_groups(tensors, [g.group for g in groups]),
        lengths=lengths,
        staleness_tokens=staleness_histogram(
            groups,
            update=batch.update,
            version_updates=version_updates,
            min_update=batch.min_update,
            mini_batches=mini_batches,
        ),
        metrics={
            **batch_metrics(
                groups,
                update=batch.update,
                version_updates=version_updates,
                min_update=batch.min_update,
                mini_batches=mini_batches,
            ),
            **_masking(groups, advantages, lengths),
            "length/trained_mean": sum(lengths) / len(lengths),
        },
        schedule=scheduled_groups(batch.groups, version_updates=version_updates),
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


def _without_failed(group: PromptGroup) -> PromptGroup:
    """The group without trajectories that ended with an error."""
    sound = [t for t in group.trajectories if t.stop_reason is not StopReason.ERROR]
    return group if len(sound) == len(group.trajectories) else replace(group, trajectories=sound)


def _tokens_of_groups(tensors: TensorDict, groups: Sequence[int]) -> list[int]:
    """Tokens with gradient of each group; a sequence is of one group."""
    place = {group: i for i, group in enumerate(groups)}
    of = torch.tensor([place[group] for group in tensors["group"].tolist()])
    counted = torch.zeros(len(groups), dtype=torch.int64).index_add(0, of, tensors["loss_mask"].sum(1))
    return [int(count) for count in counted.tolist()]


def _masking(groups: Sequence[PromptGroup], advantages: Advantages, lengths: Sequence[int]) -> dict[str, float]:
    sampled = [t.num_sampled for g in groups for t in g.trajectories]
    return masking_metrics(sampled, lengths, advantages.values)
