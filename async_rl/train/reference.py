"""Frozen weights beside the trained ones, in the same modules: the reference of the KL term, a published version."""

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
        self._frozen = {id(live): held for live, held in zip(self._live, self._held, strict=True)}

    @contextmanager
    def loaded(self) -> Generator[None]:
        """The modules compute with the frozen weights inside the block, and with the trained ones after it."""
        _exchange(self._held, self._live)
        try:
            yield
        finally:
            _exchange(self._held, self._live)

    def renew(self) -> None:
        """Replace the frozen weights with the current ones."""
        with torch.no_grad():
            for live, held in zip(self._live, self._held, strict=True):
                held.copy_(live)

    def frozen(self, live: torch.Tensor) -> torch.Tensor:
        """The frozen value of a parameter or buffer, for a checkpoint to read and to set; not inside `loaded`.

        Raises:
            KeyError: no tensor of the modules.
        """
        return self._frozen[id(live)]


@torch.no_grad()
def _exchange(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Exchange the values of both, with room for one tensor."""
    for one, other in zip(first, second, strict=True):
        value = one.clone()
        one.copy_(other)
        other.copy_(value)
