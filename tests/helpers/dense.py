"""Arrays over all positions of a trajectory or a training sequence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from message_queue.tokens import Float32Array, Int32Array
from message_queue.training_sequence import NOT_SAMPLED, BoolArray, TrainingSequence
from message_queue.trajectory import Trajectory


def param_versions(of: Trajectory | TrainingSequence) -> Int32Array:
    """int32 [T], version of the weights that sampled each token, -1 if it was not sampled or is not in the loss."""
    out = np.full(len(of), NOT_SAMPLED, np.int32)
    for start, logprobs, version in _sampled(of):
        out[start : start + len(logprobs)] = version
    return out


def loss_mask(of: Trajectory | TrainingSequence) -> BoolArray:
    """bool [T], True if the policy sampled the token, and it is in the loss."""
    return param_versions(of) != NOT_SAMPLED


def behaviour_logprobs(of: Trajectory | TrainingSequence) -> Float32Array:
    """float32 [T], 0 if the token was not sampled or is not in the loss."""
    out = np.zeros(len(of), np.float32)
    for start, logprobs, _ in _sampled(of):
        out[start : start + len(logprobs)] = logprobs
    return out


def row_versions(sequence: TrainingSequence) -> Int32Array:
    """int32 [t], version of the weights whose forward pass gave row p; -1 without a row."""
    given = [version for count, version in sequence.row_runs for _ in range(count)]
    return np.array([*given, *[NOT_SAMPLED] * (len(sequence) - len(given))], np.int32)


def _sampled(of: Trajectory | TrainingSequence) -> Iterator[tuple[int, Float32Array, int]]:
    """(position of the first token, behaviour logprobs, version) of consecutive sampled tokens."""
    at = 0
    if isinstance(of, TrainingSequence):
        for start, count, version, *_ in of.runs:
            yield start, of.logprobs[at : at + count], version
            at += count
        assert at == len(of.logprobs)
        return
    for turn in of.turns:
        at += len(turn.observation)
        for segment in turn.segments:
            yield at, segment.logprobs, segment.weights.version
            at += len(segment)
