"""Advantages with the KL to the reference in the reward (loss.kl_in=reward)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from async_rl.trainer.batch.training_batch import BatchError, TrainingBatch
from async_rl.trainer.forward_backward import ForwardBackward
from async_rl.trainer.metrics import share
from async_rl.trainer.planning import BatchPlan
from async_rl.trainer.step import MicroBatches


def penalise_rewards(
    plan: BatchPlan, planned: Sequence[MicroBatches], *, passes: ForwardBackward
) -> tuple[BatchPlan, dict[str, float]]:
    """Replace the advantages of a batch and of its micro-batches by those with a KL penalty. Collective.

    The ranks gather the KL of all tokens in the loss, so that each computes the same advantages, in every
    parallel layout.

    Args:
        plan: batch and updates; the updates have all sequences of the batch.
        planned: the micro-batches of the updates on this rank, with reference and proximal logprobs.
        passes: forward and backward passes of this rank, with the factor of the KL in their loss.

    Returns:
        The plan with the new advantages, and the metrics `kl/proximal` and `kl/penalty`.

    Raises:
        BatchError: the batch has no rewards.
    """
    batch = plan.batch
    if batch.rewards is None:
        raise BatchError("loss.kl_in is reward, but the batch has no `rewards`; add them, or set loss.kl_in=loss")
    coefficient = passes.loss.kl_coefficient
    kl = token_kl(batch, planned, passes=passes)
    trajectory = np.repeat(batch.trajectory, batch.num_loss_tokens)
    found = batch.rewards.with_kl(kl, trajectory=trajectory, coefficient=coefficient)
    for micro_batches in planned:
        micro_batches.add_column("advantages", found.tokens[micro_batches.update.loss_tokens_in_batch(batch)])
    plan = replace(plan, batch=replace(batch, advantages=found.trajectories[batch.trajectory]))
    return plan, kl_metrics(kl, coefficient=coefficient, trajectories=batch.num_trajectories)


def token_kl(batch: TrainingBatch, planned: Sequence[MicroBatches], *, passes: ForwardBackward) -> NDArray[np.float64]:
    """log(proximal / reference) float64 [N] of the tokens in the loss of a batch, of all ranks. Collective."""
    kl = np.zeros(int(batch.num_loss_tokens.sum()))
    for micro_batches in planned:
        counted = [results.columns for results in micro_batches.results] if passes.counts_tokens else []
        log_ratios = [c["proximal_logprobs"].double() - c["reference_logprobs"].double() for c in counted]
        kl[micro_batches.update.loss_tokens_in_batch(batch)] = passes.of_update(micro_batches, log_ratios).numpy()
    return kl


def kl_metrics(kl: NDArray[np.float64], *, coefficient: float, trajectories: int) -> dict[str, float]:
    """`kl/proximal` and `kl/penalty` from the KL [N] of the tokens of a number of trajectories."""
    return {"kl/proximal": share(kl.sum(), len(kl)), "kl/penalty": float(coefficient * kl.sum() / trajectories)}
