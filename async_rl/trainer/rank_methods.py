"""The methods of `TrainerRank` for callers that do not import megatron: `trainer.call(TrainerRank.score, batch)`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.trainer.rank import TrainerRank
else:

    class _Methods:
        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(__name__=name)

    TrainerRank = _Methods()

__all__ = ["TrainerRank"]
