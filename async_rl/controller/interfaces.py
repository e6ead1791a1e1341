"""Interfaces of the controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.rank_methods import TrainerRank
from message_queue.errors import AsyncRLError

P = ParamSpec("P")
R = TypeVar("R")
WATCH_EVERY_S = 10.0  # between two signs of life of a replica


class StageError(AsyncRLError):
    """A stage failed; the cause is chained."""


async def run_stage(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a stage.

    Raises:
        StageError: `work` failed.
    """
    try:
        await work()
    except Exception as error:
        raise StageError(f"stage {name} failed") from error


class Trainer(Protocol):
    """All trainer ranks as one."""

    async def call(self, method: Callable[Concatenate[TrainerRank, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call every rank; the answer of rank 0."""
        ...

    async def train(self, batch: TrainingBatch) -> dict[str, float]: ...
    async def save(self, directory: Path) -> None:
        """Copy the state, and start to write it as folder `directory`; `saved` is called before the next save."""
        ...

    async def saved(self) -> None:
        """Wait until the folder of the last `save` is written; `train` may run meanwhile."""
        ...
