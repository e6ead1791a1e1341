"""Answers of a fake engine: tokens by a script, and logprobs and rows that name their version."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from message_queue.tokens import Int32Array, RoutingSpec, WeightVersion
from message_queue.trajectory import Trajectory
from tests.helpers.dense import loss_mask, param_versions

SPEC = RoutingSpec(layers=(1, 2, 4), num_experts=8, top_k=2)

Script = Callable[[Int32Array], int]
"""Next token, given all tokens so far. Pure, so that an interrupted decode continues unchanged."""


def fake_weights(version: int) -> WeightVersion:
    """A version with its own digest."""
    return WeightVersion(version, f"digest-{version}")


def fake_logprob(token: int, position: int, version: int) -> float:
    """Logprob of the token sampled at `position` by `version`."""
    return -(1 + zlib.crc32(f"{token}/{position}/{version}".encode()) % 1000) / 1000


def fake_row(token: int, position: int, version: int, spec: RoutingSpec) -> np.ndarray:
    """Row of `token` at `position` under `version`, [moe_layers, top_k]; a test can tell which forward gave it."""
    row = np.empty(spec.row_shape, np.uint8)
    for at, layer in enumerate(spec.layers):
        first = zlib.crc32(f"{token}/{position}/{version}/{layer}".encode()) % spec.num_experts
        row[at] = (first + np.arange(spec.top_k)) % spec.num_experts
    return row


def fake_kept(token: int, position: int) -> list[int]:
    """The kept tokens of `position`, where `token` was sampled; others by the position alone."""
    return sorted({token, *(position * 31 % 97 + 200 * i for i in range(position % 4))})


def true_support(trajectory: Trajectory) -> list[list[int]]:
    """Kept sets that `trajectory` must hold at each position, from its tokens; empty where none was sampled."""
    tokens, sampled = trajectory.token_ids().tolist(), loss_mask(trajectory).tolist()
    return [fake_kept(token, at) if sampled[at] else [] for at, token in enumerate(tokens)]


def true_rows(trajectory: Trajectory) -> np.ndarray:
    """Rows of the training sequence, int16 [T, moe_layers, top_k], from the tokens and who sampled them.

    The slow, obvious statement of the rule: row p belongs to the first decode that sampled a token after p, and the
    sequence ends with the last sampled token.
    """
    spec = trajectory.routing
    assert spec is not None
    tokens, versions = trajectory.token_ids(), param_versions(trajectory)
    end = np.flatnonzero(versions >= 0)[-1] + 1
    rows = np.full((end, *spec.row_shape), -1, np.int16)
    for position in range(end - 1):
        owners = versions[position + 1 :][versions[position + 1 :] >= 0]
        rows[position] = fake_row(int(tokens[position]), position, int(owners[0]), spec)
    return rows


class SeededScript:
    """A random walk over `vocab_size` ids; `stop_token` comes up with probability about 1 / mean_length."""

    def __init__(self, seed: int, *, vocab_size: int, stop_token: int, mean_length: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._stop_token = stop_token
        self._mean_length = mean_length

    def __call__(self, token_ids: Int32Array) -> int:
        draw = zlib.crc32(token_ids.tobytes(), self._seed)
        if draw % self._mean_length == 0:
            return self._stop_token
        return (draw // self._mean_length) % self._vocab_size


class TurnScript:
    """Writes given turns: turn k after the k-th occurrence of `opening` (the tokens that open an assistant turn)."""

    def __init__(self, turns: Sequence[Sequence[int]], *, opening: Sequence[int]) -> None:
        self._turns = [list(turn) for turn in turns]
        self._opening = list(opening)

    def __call__(self, token_ids: Int32Array) -> int:
        ids, width = token_ids.tolist(), len(self._opening)
        ends = [i + width for i in range(len(ids) - width + 1) if ids[i : i + width] == self._opening]
        return self._turns[len(ends) - 1][len(ids) - ends[-1]]
