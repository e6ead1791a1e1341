"""The frozen model of the KL term: the initial weights, kept beside the trained ones in the same modules."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class ReferenceWeights:
    """A copy of every parameter and buffer as it is now.

    Args:
        chunks: model chunks of this rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._live = [t for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers())]
        self._held = [t.detach().clone() for t in self._live]

    @contextmanager
    def loaded(self) -> Generator[None]:
        """The modules compute with the frozen weights inside the block, and with the trained ones after it."""
        trained = [t.detach().clone() for t in self._live]
        _copy(self._held, self._live)
        try:
            yield
        finally:
            _copy(trained, self._live)

    def state_dict(self) -> list[torch.Tensor]:
        """The frozen weights, for a checkpoint."""
        return self._held

    def load_state_dict(self, state: Sequence[torch.Tensor]) -> None:
        """Continue with the frozen weights of `state_dict`."""
        _copy(state, self._held)


@torch.no_grad()
def _copy(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for given, taken in zip(source, target, strict=True):
        taken.copy_(given)
