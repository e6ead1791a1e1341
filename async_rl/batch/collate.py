"""Trajectories -> one right-padded TensorDict batch. Nothing is cut, sorted or re-tokenized.

Keys of an RL batch of S trajectories, the longest of T tokens:
    token_ids            int64   [S, T]        0 after the end
    loss_mask            bool    [S, T]        True where the policy sampled the token
    behaviour_logprobs   float32 [S, T]        0 where not sampled
    advantages           float32 [S]
    informative          bool    [S]           False: left out of the forward pass
    lag                  int32   [S, T]        staleness in optimizer updates; -1 where not sampled
    pure_lag0            bool    [S, T]        sampled at lag 0 over rows that were all computed at lag 0
    routed_experts       int16   [S, T, L, K]  -1: live router; absent where the model does not route
    lengths              int64   [S]
    group                int64   [S]           id of the prompt group
A supervised batch has token_ids, loss_mask and lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from async_rl.batch.advantage import Advantages
from message_queue.tokens import Int32Array
from message_queue.trajectory import NOT_ROUTED, NOT_SAMPLED, BoolArray, PromptGroup, Trajectory


class BatchError(ValueError):
    """Trajectories that cannot be one batch; names what is wrong."""


def collate(
    groups: Sequence[PromptGroup],
    *,
    advantages: Advantages,
    current_update: int,
    version_updates: Mapping[int, int],
) -> TensorDict:
    """Build the batch that the trainer takes its gradient on.

    Args:
        advantages: of the trajectories of `groups` in order.
        current_update: optimizer updates held by the weights whose gradient is taken.
        version_updates: param_version -> optimizer updates those weights hold.

    Raises:
        BatchError: no trajectories, advantages of another count, a version nobody published, or routed and unrouted
            trajectories together.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        raise BatchError("the batch has no trajectories")
    if len(trajectories) != len(advantages.values):
        raise BatchError(f"{len(trajectories)} trajectories, but {len(advantages.values)} advantages")
    ids = [t.token_ids() for t in trajectories]
    versions = [t.param_versions() for t in trajectories]
    lags = [_lags(v, current_update, version_updates) for v in versions]
    experts = _routed_experts(trajectories)
    columns = {
        "token_ids": _stack(ids, np.dtype(np.int64), 0),
        "loss_mask": _stack([v != NOT_SAMPLED for v in versions], np.dtype(np.bool_), False),
        "behaviour_logprobs": _stack([t.behaviour_logprobs() for t in trajectories], np.dtype(np.float32), 0.0),
        "advantages": torch.from_numpy(advantages.values.copy()),
        "informative": torch.from_numpy(advantages.informative.copy()),
        "lag": _stack(lags, np.dtype(np.int32), -1),
        "pure_lag0": _stack(
            [
                _pure_lag0(lag, _lags(t.row_versions(), current_update, version_updates), rows)
                for t, lag, rows in zip(trajectories, lags, experts or [None] * len(lags), strict=True)
            ],
            np.dtype(np.bool_),
            False,
        ),
        "lengths": torch.tensor([len(i) for i in ids], dtype=torch.int64),
        "group": torch.tensor([g.group for g in groups for _ in g.trajectories], dtype=torch.int64),
    }
    if experts is not None:
        columns["routed_experts"] = _stack(experts, np.dtype(np.int16), NOT_ROUTED)
    return TensorDict(columns, batch_size=[len(trajectories)])


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


def _pure_lag0(lag: Int32Array, row_lag: Int32Array, rows: NDArray[np.int16] | None) -> BoolArray:
    """bool [T]: sampled at lag 0, and so was everything its distribution was computed from."""
    fresh = row_lag == 0 if rows is not None else lag <= 0  # without rows, sampled tokens tell when they were forwarded
    if rows is not None:
        fresh &= (rows != NOT_ROUTED).all(axis=(1, 2))
    before = np.concatenate([np.ones(1, np.bool_), np.logical_and.accumulate(fresh)[:-1]])
    return (lag == 0) & before


def _routed_experts(trajectories: Sequence[Trajectory]) -> list[NDArray[np.int16]] | None:
    rows = [t.routed_experts() for t in trajectories]
    given = [r for r in rows if r is not None]
    if not given:
        return None
    if len(given) != len(rows) or len({r.shape[1:] for r in given}) != 1:
        raise BatchError("some trajectories carry routing rows and others do not, or rows of another shape")
    return given


def _stack(parts: Sequence[NDArray[np.generic]], dtype: np.dtype[np.generic], fill: float) -> torch.Tensor:
    """[S, T, ...] with `fill` after the end of each part."""
    out = np.full((len(parts), max(len(p) for p in parts), *parts[0].shape[1:]), fill, dtype)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return torch.from_numpy(out)
