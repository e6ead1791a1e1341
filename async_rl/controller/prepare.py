"""Queue batch -> training batch and metrics. Reads the heads of groups only, not their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.metrics.registry import batch_metrics, masking_metrics, staleness_histogram
from async_rl.rollout.schedule import scheduled_groups
from async_rl.trainer.batch.advantage import batch_rewards
from async_rl.trainer.batch.training_batch import Int64Array, RecordedGroups, TrainingBatch, training_batch
from message_queue.heads import GroupHead
from message_queue.queue import Batch
from message_queue.training_sequence import Content

if TYPE_CHECKING:
    from async_rl.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedBatch:
    """Input of the trainer and of the records for one batch of the queue."""

    batch: TrainingBatch
    """Input of the trainer."""
    gradient_tokens: Sequence[int]
    """[G], tokens in the loss of each group."""
    lengths: Sequence[int]
    """[trajectories that did not fail], tokens in the loss of each."""
    staleness_tokens: Mapping[int, int]
    """Staleness in optimizer steps -> tokens in the loss."""
    metrics: Mapping[str, float]
    """Metrics that the heads determine; keys as in `async_rl.metrics.registry.METRICS`."""
    schedule: Sequence[Mapping[str, Any]]
    """A record per group for schedule.jsonl; see `async_rl.rollout.schedule`."""


def prepare(
    batch: Batch,
    contents: Sequence[Content],
    config: RunConfig,
    *,
    version_updates: Mapping[int, int],
    expected: Sequence[Mapping[str, float]] | None = None,
) -> PreparedBatch:
    """Leave out failed rollouts, mask tokens that are too old, and split the groups into mini-batches.

    Advantages are computed over all rollouts that did not fail, including masked ones. They are 0 if rewards do not
    count (distillation.rewards).

    Args:
        batch: G groups.
        contents: [G], GroupContent of each group or a reference to it.
        version_updates: `param_version` -> optimizer updates.
        expected: [G], see `PromptValues.expected`; None if the advantage tracks no prompts.

    Raises:
        BatchError: all rollouts failed, or a token was sampled by a version that was not published.
    """
    heads, rollout, parts = batch.groups, config.rollout, config.trainer.updates_per_batch
    sound = [replace(head, trajectories=tuple(t for t in head.trajectories if not t.failed)) for head in heads]
    split = mini_batches_of([head.group for head in heads], count=parts, seed=config.seed, update=batch.update)
    rewards = batch_rewards(sound, config.advantage, expected=expected)
    advantages = rewards.advantages()
    if config.teaches is not None and not config.teaches.rewards:
        advantages = replace(advantages, values=np.zeros_like(advantages.values))
    ages: Any = {"version_updates": version_updates, "min_update": batch.min_update, "mini_batches": split}
    made = training_batch(
        heads,
        contents,
        advantages=advantages,
        current_update=batch.update,
        retained_kv=rollout.kv == "keep",
        temperature=rollout.sampling.temperature,
        rewards=rewards,
        **ages,
    )
    of_rollout = np.unique(made.index[:, :2], axis=0, return_inverse=True)[1].reshape(-1)
    lengths = _sums(made.num_loss_tokens, of_rollout, int(of_rollout.max()) + 1)
    in_loss = _sums(made.num_loss_tokens, made.trajectory, len(advantages.values))
    staleness_tokens = staleness_histogram(sound, update=batch.update, **ages)
    return PreparedBatch(
        batch=made,
        gradient_tokens=_sums(made.num_loss_tokens, made.index[:, 0], len(heads)),
        lengths=lengths,
        staleness_tokens=staleness_tokens,
        metrics={
            **batch_metrics(sound, staleness_tokens=staleness_tokens),
            **masking_metrics(rewards.sampled, in_loss, advantages.values),
            "length/trained_mean": sum(lengths) / len(lengths),
        },
        schedule=scheduled_groups(heads, version_updates=version_updates),
    )


def mini_batches_of(groups: Sequence[int], *, count: int, seed: int, update: int) -> dict[int, int]:
    """Group id -> mini-batch, from 0: a random split of whole groups into `count` parts of equal size.

    The split depends on the ids, not on their order, so a batch that is replayed after a restart is split as before.
    Groups 7, 8, 9, 12 with count=2, seed=0, update=5: {12: 0, 7: 0, 8: 1, 9: 1}.

    Args:
        groups: ids of the groups of the batch.
        count: number of mini-batches.
        seed: the run's `seed`.
        update: optimizer updates of the weights at the start of the batch.
    """
    order = np.random.default_rng((abs(seed), update)).permutation(np.sort(np.array(groups, np.int64)))
    parts = np.array_split(order, count)
    return {int(group): number for number, part in enumerate(parts) for group in part}


def recorded_groups(heads: Sequence[GroupHead], *, trajectories: int, seed: int, train_step: int) -> RecordedGroups:
    """Whole groups, at random, with at most `trajectories` trajectories together, but at least one; none for 0.

    The choice depends on the ids of the groups, not on their order, as `mini_batches_of`.

    Args:
        heads: group heads, one per group of the batch.
        trajectories: bound on the trajectories.
        seed: the run's `seed`.
        train_step: step that the batch ends with.
    """
    if not trajectories:
        return RecordedGroups(train_step=train_step)
    order = sorted(range(len(heads)), key=lambda i: heads[i].group)
    shuffled = np.random.default_rng((abs(seed), train_step, 1)).permutation(order).tolist()
    counts = np.cumsum([len(heads[i].trajectories) for i in shuffled])
    chosen = shuffled[: max(1, int((counts <= trajectories).sum()))]
    return RecordedGroups(train_step=train_step, heads={i: heads[i] for i in sorted(chosen)})


def _sums(tokens: Int64Array, of: Int64Array, count: int) -> list[int]:
    """Sum `tokens` [S] by owner `of` int64 [S]. Tokens (3, 2, 4) of (0, 0, 2) with count=3: [5, 0, 4]."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, of, tokens)
    return sums.tolist()
