"""Interfaces and settings of the controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from async_rl.trainer.batch.advantage import AdvantageConfig
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.weights.transport import WeightUpdate
from message_queue.contract import Admission, Batch, QueueSnapshot
from message_queue.errors import AsyncRLError
from message_queue.heads import GroupHead
from message_queue.ledger import Drop, LedgerRecord, LedgerTotal
from message_queue.recovery import JournalPlace, Restored

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

    async def train(self, batch: TrainingBatch) -> dict[str, float]: ...
    async def export(self, directory: Path | str, *, version: int, keep_version: int) -> WeightUpdate: ...
    async def snapshot_weights(self) -> None: ...
    async def score(self, batch: TrainingBatch) -> Sequence[Tensor]: ...
    async def save(self, directory: Path) -> None:
        """Copy the state, and start to write it as folder `directory`; `saved` is called before the next save."""
        ...

    async def saved(self) -> None:
        """Wait until the folder of the last `save` is written; may run beside `train`."""
        ...

    async def restore(self, directory: Path) -> None: ...
    async def save_pretrained(self, folder: Path, *, like: Path) -> None: ...


class GroupQueue(Protocol):
    """The trajectory queue of a run, its journal and its process; see `async_rl.cluster.queue_client` for each call."""

    async def open(self, place: JournalPlace, *, timeout_s: float) -> Restored: ...
    async def admit(self, prompt: int) -> Admission: ...
    async def put(self, head: GroupHead) -> Drop | None: ...
    async def drop(self, group: int, *, reason: Drop, segments: int = 0, tokens: int = 0) -> bool: ...
    async def wait_expired(self, *, known: Collection[int] = ()) -> list[int]: ...
    async def take(self) -> Batch: ...
    async def trained(self, groups: Sequence[int], *, train_step: int, tokens: Sequence[int] = ()) -> None: ...
    async def publish(self, version: int, *, update: int) -> None: ...
    async def loaded(self, version: int) -> None: ...
    async def snapshot(self) -> QueueSnapshot: ...
    async def sync(self) -> None: ...
    async def checkpointed(self, train_step: int) -> None: ...
    async def drain_records(self) -> list[LedgerRecord]: ...
    async def closing_records(self) -> list[LedgerRecord | LedgerTotal]: ...
    async def close_journal(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Settings of the controller; see the run config for the meaning of each value."""

    total_train_steps: int
    publish_every: int
    validate_every: int
    max_failed_groups: int
    drop_without_spread: int = 0
    advantage: AdvantageConfig
    weights_directory: Path | str
    replica_timeout_s: float
    retained_kv: bool = False
    updates_per_batch: int = 1
    seed: int = 0
    recorded_trajectories: int = 0
    validation_samples: int = 1
