"""A frozen copy of the weights that can be exchanged with the trained weights in the same modules.

It serves as the reference of the KL term, and as the published version that is compared with the engines.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class ReferenceWeights:
    """A copy of the current values of all trained parameters and of buffers.

    With LoRA, only adapters are trained: their copy is small, and a copy from before the first update stands for the
    start checkpoint.

    Args:
        chunks: model chunks of this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._live = [t for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers()) if not _is_frozen(t)]
        self._saved = [t.detach().clone() for t in self._live]
        self._frozen = {id(live): saved for live, saved in zip(self._live, self._saved, strict=True)}

    @contextmanager
    def loaded(self) -> Generator[None]:
        """Inside the block the modules compute with the frozen weights."""
        _exchange(self._saved, self._live)
        try:
            yield
        finally:
            _exchange(self._saved, self._live)

    def frozen(self, live: torch.Tensor) -> torch.Tensor:
        """The frozen value of a parameter or buffer, for reading and writing checkpoints; not inside `loaded`.

        Raises:
            KeyError: the tensor is not in the modules.
        """
        return self._frozen[id(live)]


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


@torch.no_grad()
def _exchange(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Exchange the values of both, one tensor at a time to save memory."""
    for one, other in zip(first, second, strict=True):
        value = one.clone()
        one.copy_(other)
        other.copy_(value)
