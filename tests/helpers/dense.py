"""Arrays over all positions of a trajectory, made from its turns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from message_queue.routing_rows import NOT_SAMPLED
from message_queue.tokens import Float32Array, Int32Array, TokenOutput
from message_queue.training_sequence import BoolArray
from message_queue.trajectory import Trajectory


def param_versions(trajectory: Trajectory) -> Int32Array:
    """int32 [T], version of the weights that sampled each token, -1 if it was not sampled."""
    out = np.full(len(trajectory), NOT_SAMPLED, np.int32)
    for start, segment in _placed(trajectory):
        out[start : start + len(segment)] = segment.weights.version
    return out


def loss_mask(trajectory: Trajectory) -> BoolArray:
    """bool [T], True if the policy sampled the token."""
    return param_versions(trajectory) != NOT_SAMPLED


def behaviour_logprobs(trajectory: Trajectory) -> Float32Array:
    """float32 [T], 0 if the token was not sampled."""
    out = np.zeros(len(trajectory), np.float32)
    for start, segment in _placed(trajectory):
        out[start : start + len(segment)] = segment.logprobs
    return out


def _placed(trajectory: Trajectory) -> Iterator[tuple[int, TokenOutput]]:
    at = 0
    for turn in trajectory.turns:
        at += len(turn.observation)
        for segment in turn.segments:
            yield at, segment
            at += len(segment)
