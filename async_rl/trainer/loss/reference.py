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
        self._pairs = [(live, live.detach().clone()) for live in changed_tensors(chunks).values()]
        self._frozen = {id(live): saved for live, saved in self._pairs}

    @contextmanager
    def loaded(self) -> Generator[None]:
        """Inside the block the modules compute with the frozen weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def frozen(self, live: torch.Tensor) -> torch.Tensor:
        """The frozen value of a parameter or buffer, for reading and writing checkpoints; not inside `loaded`.

        Raises:
            KeyError: the tensor is not in the modules.
        """
        return self._frozen[id(live)]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the values, one tensor at a time to save memory."""
        for live, saved in self._pairs:
            value = saved.clone()
            saved.copy_(live)
            live.copy_(value)


def changed_tensors(chunks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Name -> parameter that is trained, or buffer, of the model chunks of this rank."""
    return {
        f"{number}.{name}": tensor
        for number, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }
