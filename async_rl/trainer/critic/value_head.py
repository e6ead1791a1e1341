"""The value head: a scalar linear layer on the last hidden states, and its loss.

Every rank has the whole head and computes the values of its tokens: on the tensor-parallel ranks these are the same
tokens, on context-parallel and data-parallel ranks they differ. The head is a module apart from the trunk, so that the
trunk may be that of the policy. Before the last pipeline stage it computes nothing and its gradients are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from async_rl.trainer.step import MicroBatch


class ValueHead(nn.Module):
    """A linear layer with one output, float32, with zero weights at the start.

    Args:
        hidden_size: number of inputs H.
        device: device of the weights.
    """

    def __init__(self, hidden_size: int, *, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, rows: Tensor) -> Tensor:
        """Values float32 [n] of hidden states [n, H]."""
        return F.linear(rows.float(), self.weight, self.bias).squeeze(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueTerm:
    """The value loss of an update."""

    head: ValueHead
    """The head."""
    trunk_factor: float = 1.0
    """Factor of the gradient of the hidden states. The tensor-parallel ranks sum their gradients of them, and each has
    the whole: the factor includes 1 / their number."""
    clip: float | None = None
    """`CriticConfig.value_clip`."""
    weight: float = 1.0
    """Of each token in the loss: 1 / tokens of the update on all ranks."""

    def values(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Values float32 [n] after the tokens of `rows` int64 [n] of hidden states [1, t, H]."""
        chosen = hidden[0, rows]
        if chosen.requires_grad:
            chosen.register_hook(lambda gradient: gradient * self.trunk_factor)
        return self.head(chosen)

    def at_start(self, hidden: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """`values` [n] before each token in the loss, and `ends` [sequences], the value after the last token of each
        sequence, 0 on the context ranks that do not have the token."""
        ends = micro_batch.end_rows
        return {
            "values": self.values(hidden, micro_batch.loss_rows),
            "ends": self.values(hidden, ends.clamp(min=0)).masked_fill(ends < 0, 0.0),
        }

    def loss(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Sum over the tokens of weight * max((V - R)^2, (V' - R)^2) / 2, V' is V within `clip` of the value at the
        start of the batch."""
        values, returns = self.values(hidden, micro_batch.loss_rows), micro_batch.columns["returns"]
        errors = (values - returns) ** 2
        if self.clip is not None:
            change = values - micro_batch.columns["values"]
            near = micro_batch.columns["values"] + change.clamp(-self.clip, self.clip)
            errors = torch.maximum(errors, (near - returns) ** 2)
        return 0.5 * self.weight * errors.sum()
