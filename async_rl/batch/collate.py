"""Trajectories -> one right-padded TensorDict batch. Nothing is cut, sorted or re-tokenized.

A trajectory is one sequence of the batch, or several where its resumed segments were decoded over other rows
(`resume_routing=split`). Every sampled token is under the loss mask of exactly one, so counts of tokens under the mask
are right as they are; what is counted per trajectory goes by the key `trajectory`. A sampled token that is too old
(staleness.policy=mask) is under none: it is context, and no normalisation counts it.

Keys of an RL batch of S sequences, the longest of T tokens:
    token_ids            int64   [S, T]        0 after the end
    loss_mask            bool    [S, T]        True where the policy sampled the token over the rows of this sequence,
                                               with weights that are young enough
    behaviour_logprobs   float32 [S, T]        0 outside the loss mask
    advantages           float32 [S]           of the trajectory
    informative          bool    [S]           of the trajectory; False, also if all of the sequence is too old: without
                                               gradient, but for KL and entropy
    lag                  int32   [S, T]        staleness in optimizer steps, at the mini-batch that trains it; -1
                                               outside the loss mask
    pure_lag0            bool    [S, T]        sampled by the current weights over nothing but what they compute here
    routed_experts       int16   [S, T, L, K]  -1: live router; absent where the model does not route
    lengths              int64   [S]
    trajectory           int64   [S]           number of the trajectory in the batch
    group                int64   [S]           id of the prompt group
    mini_batch           int64   [S]           which optimizer step of the batch trains the sequence, from 0
    support              [S] SamplingSupport   tokens that the sampler kept at each position of the sequence; absent
                                               where no sampled token was cut
A supervised batch has token_ids, loss_mask and lengths.

A token is pure at lag 0 when trainer and engine must agree on it but for rounding: its own weights are the current
ones, no row before it is -1, and K/V of every position before it came from the current weights over those very rows.
    append, replace, split   K/V of a position is at least as new as its row: every row before the token is of lag 0.
    force                    a resumed request computes K/V anew over the rows that are held: their age does not matter.
    kept K/V                 a request may read any K/V that its group left in the prefix cache. The cache is salted by
                             group, so only where the group was admitted at lag 0 is all of it of lag 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict

from async_rl.batch.advantage import Advantages
from message_queue.support import SamplingSupport
from message_queue.tokens import Int32Array
from message_queue.trajectory import NOT_ROUTED, NOT_SAMPLED, BoolArray, PromptGroup, TrainingSequence, Trajectory


class BatchError(ValueError):
    """Trajectories that cannot be one batch; names what is wrong."""


@dataclass(frozen=True, slots=True)
class _Ages:
    """By what the age of a token is judged; see `collate`."""

    current_update: int
    version_updates: Mapping[int, int]
    _: KW_ONLY
    min_update: int
    kept_kv: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """A sequence of the batch. trajectory: its number. mask, lag and pure as the batch has them.

    is_left: False where a sequence with sampled tokens is too old as a whole.
    """

    sequence: TrainingSequence
    trajectory: int
    mask: BoolArray
    lag: Int32Array
    pure: BoolArray
    is_left: bool


def collate(
    groups: Sequence[PromptGroup],
    *,
    advantages: Advantages,
    current_update: int,
    version_updates: Mapping[int, int],
    min_update: int = 0,
    kept_kv: bool = False,
    mini_batches: Mapping[int, int] | None = None,
) -> TensorDict:
    """Build the batch that the trainer takes its gradient on.

    Args:
        advantages: of the trajectories of `groups` in order.
        current_update: optimizer updates held by the weights at the start of the batch.
        version_updates: param_version -> optimizer updates those weights hold.
        min_update: tokens of weights that hold fewer updates take no gradient.
        kept_kv: K/V outlives weight updates in the engines (rollout.on_update=keep with rollout.kv=keep).
        mini_batches: group id -> its mini-batch, from 0; None if the batch is one optimizer step.

    Raises:
        BatchError: no trajectories, advantages of another count, a version nobody published, or routed and unrouted
            trajectories together.
    """
    trajectories = [(g, t) for g in groups for t in g.trajectories]
    if not trajectories:
        raise BatchError("the batch has no trajectories")
    if len(trajectories) != len(advantages.values):
        raise BatchError(f"{len(trajectories)} trajectories, but {len(advantages.values)} advantages")
    mini_batches = mini_batches or dict.fromkeys((g.group for g in groups), 0)
    ages = {
        group: _Ages(current_update + mini_batch, version_updates, min_update=min_update, kept_kv=kept_kv)
        for group, mini_batch in mini_batches.items()
    }
    parts = [
        _part(sequence, number, group, trajectory, ages[group.group])
        for number, (group, trajectory) in enumerate(trajectories)
        for sequence in trajectory.sequences()
    ]
    of = [part.trajectory for part in parts]
    columns = {
        "token_ids": _stack([p.sequence.token_ids for p in parts], np.dtype(np.int64), 0),
        "loss_mask": _stack([p.mask for p in parts], np.dtype(np.bool_), False),
        "behaviour_logprobs": _stack(
            [np.where(p.mask, p.sequence.behaviour_logprobs, np.float32(0)) for p in parts], np.dtype(np.float32), 0.0
        ),
        "advantages": torch.from_numpy(advantages.values[of]),
        "informative": torch.from_numpy(advantages.informative[of] & np.array([p.is_left for p in parts])),
        "lag": _stack([p.lag for p in parts], np.dtype(np.int32), -1),
        "pure_lag0": _stack([p.pure for p in parts], np.dtype(np.bool_), False),
        "lengths": torch.tensor([len(p.sequence) for p in parts], dtype=torch.int64),
        "trajectory": torch.tensor(of, dtype=torch.int64),
        "group": torch.tensor([trajectories[number][0].group for number in of], dtype=torch.int64),
        "mini_batch": torch.tensor([mini_batches[trajectories[number][0].group] for number in of], dtype=torch.int64),
    }
    experts = _routed_experts([part.sequence for part in parts])
    if experts is not None:
        columns["routed_experts"] = _stack(experts, np.dtype(np.int16), NOT_ROUTED)
    batch = TensorDict(columns, batch_size=[len(parts)])
    if any(part.sequence.support is not None for part in parts):
        sequences = [part.sequence for part in parts]
        add_support(batch, [SamplingSupport.whole(len(s)) if s.support is None else s.support for s in sequences])
    return batch


def add_support(batch: TensorDict, support: Sequence[SamplingSupport]) -> None:
    """Give a batch the tokens that the sampler kept, one SamplingSupport per sequence, of its length."""
    batch.set("support", NonTensorStack(*(NonTensorData(each) for each in support)))


def _part(sequence: TrainingSequence, number: int, group: PromptGroup, trajectory: Trajectory, ages: _Ages) -> _Part:
    now, updates = ages.current_update, ages.version_updates
    lag, row_lag = (_lags(versions, now, updates) for versions in (sequence.param_versions, sequence.row_versions))
    fresh = _fresh(sequence, lag, row_lag, recomputed=trajectory.resume_routing == "force" and not ages.kept_kv)
    mask = sequence.loss_mask & (lag <= now - ages.min_update)
    old_kv = ages.kept_kv and group.admitted_update != now
    return _Part(
        sequence=sequence,
        trajectory=number,
        mask=mask,
        lag=np.where(mask, lag, np.int32(-1)),
        pure=mask & (False if old_kv else _pure_lag0(lag, fresh)),
        is_left=bool(mask.any() or not sequence.loss_mask.any()),
    )


def collate_supervised(examples: Sequence[tuple[Int32Array, BoolArray]]) -> TensorDict:
    """Build a supervised batch from (token ids, loss mask) of each example.

    Raises:
        BatchError: no examples, or a mask of another length than its tokens.
    """
    if not examples:
        raise BatchError("the supervised batch has no examples")
    for index, (ids, mask) in enumerate(examples):
        if len(ids) != len(mask) or not len(ids):
            raise BatchError(
                f"example {index} has {len(ids)} tokens and a loss mask of {len(mask)}; need as many, >= 1"
            )
    return TensorDict(
        {
            "token_ids": _stack([ids for ids, _ in examples], np.dtype(np.int64), 0),
            "loss_mask": _stack([mask for _, mask in examples], np.dtype(np.bool_), False),
            "lengths": torch.tensor([len(ids) for ids, _ in examples], dtype=torch.int64),
        },
        batch_size=[len(examples)],
    )


def _lags(versions: Int32Array, current_update: int, version_updates: Mapping[int, int]) -> Int32Array:
    """int32 [T]: updates between the weights of each entry and the current ones; -1 where there are none."""
    out = np.full(len(versions), -1, np.int32)
    for version in np.unique(versions).tolist():
        if version == NOT_SAMPLED:
            continue
        if version not in version_updates:
            raise BatchError(
                f"param_version {version} sampled tokens, but only {sorted(version_updates)} were published"
            )
        lag = current_update - version_updates[version]
        if lag < 0:
            raise BatchError(
                f"param_version {version} holds {version_updates[version]} updates, "
                f"more than current_update={current_update}"
            )
        out[versions == version] = lag
    return out


def _fresh(part: TrainingSequence, lag: Int32Array, row_lag: Int32Array, *, recomputed: bool) -> BoolArray:
    """bool [t]: K/V of the position is what the current weights give over the row that is replayed.

    Args:
        recomputed: K/V is computed anew, under the rows that are held, by whichever weights sample next.
    """
    if part.routed_experts is None:
        return lag <= 0  # without rows, sampled tokens tell when they were forwarded
    known = (part.routed_experts != NOT_ROUTED).all(axis=(1, 2))
    return known if recomputed else known & (row_lag == 0)


def _pure_lag0(lag: Int32Array, fresh: BoolArray) -> BoolArray:
    """bool [t]: sampled at lag 0 over fresh positions only."""
    before = np.concatenate([np.ones(1, np.bool_), np.logical_and.accumulate(fresh)[:-1]])
    return (lag == 0) & before


def _routed_experts(parts: Sequence[TrainingSequence]) -> list[NDArray[np.int16]] | None:
    given = [p.routed_experts for p in parts if p.routed_experts is not None]
    if not given:
        return None
    if len(given) != len(parts) or len({r.shape[1:] for r in given}) != 1:
        raise BatchError("some trajectories carry routing rows and others do not, or rows of another shape")
    return given


def _stack(parts: Sequence[NDArray[np.generic]], dtype: np.dtype[np.generic], fill: float) -> torch.Tensor:
    """[S, T, ...] with `fill` after the end of each part."""
    out = np.full((len(parts), max(len(p) for p in parts), *parts[0].shape[1:]), fill, dtype)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return torch.from_numpy(out)
