"""The difference between the logprobs of an engine and of the trainer under the same weights."""

from __future__ import annotations

import torch
from torch import Tensor

from message_queue.errors import AsyncRLError


class MismatchError(AsyncRLError):
    """Engine and trainer disagree at equal weights; the message names replica and version."""


def k3_of(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(d) - 1 - d of d = logprobs - other, float64 [n]. d = 0.1 gives 0.00517."""
    d = (logprobs.detach() - other).double()
    return torch.expm1(d) - d  # expm1 keeps the digits of a small d
