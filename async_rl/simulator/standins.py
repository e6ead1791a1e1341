"""Stand-ins for the parts of a run that simulator, planner and flow tests share: queue, replica and trainer.

They have the life cycle and the contract of the real parts. Subclasses say what is sampled, trained and broken.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.inference.gate import KVPolicy, ReplicaStats, RequestGate, until_finished
from async_rl.inference.stub import InProcess
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.weights.transport import Seat, Source, WeightUpdate
from message_queue.errors import EngineError
from message_queue.ledger import LedgerRecord, LedgerTotal
from message_queue.queue import TrajectoryQueue
from message_queue.tokens import WeightVersion

if TYPE_CHECKING:
    from torch import Tensor


class LocalQueue(InProcess, TrajectoryQueue):
    """A queue of the process itself; see `async_rl.cluster.queue.QueueClient`."""

    _drained = 0

    async def drain_records(self) -> list[LedgerRecord]:
        records = await self.records_after(self._drained)
        self._drained += len(records)
        return records

    async def closing_records(self, received: int | None = None) -> list[LedgerRecord | LedgerTotal]:
        return await super().closing_records(self._drained if received is None else received)


class ScriptedReplica(InProcess):
    """Gate and life cycle of a replica; see `async_rl.inference.replica.EngineReplica`. A subclass has `generate`.

    Attributes:
        weights: version that it serves.
        load_s: seconds of a load, or of staging a version for one.
        transfer_s: seconds until a version is here.
    """

    load_s = transfer_s = 0.0

    def __init__(self, name: str, *, weights: WeightVersion) -> None:
        self.name = self.node = name
        self.weights = weights
        self._staged: WeightVersion | None = None

    @cached_property
    def _gate(self) -> RequestGate:
        return RequestGate(self.name)  # of the event loop that runs at the first call

    async def pause(self) -> None:
        self._gate.pause()

    async def abort(self) -> int:
        requests = self._gate.request_abort()
        self._on_abort()
        await until_finished(requests)
        return len(requests)

    async def drain(self) -> None:
        await self._gate.drain()

    async def freeze(self) -> int:
        frozen = self._gate.freeze()
        self._on_freeze()
        return frozen

    async def resume(self) -> None:
        self._gate.resume()
        self._on_resume()

    async def fetch(self, update: WeightUpdate, seat: Seat | None = None) -> None:
        self._gate.check_alive()
        if self.transfer_s:
            await asyncio.sleep(self.transfer_s)

    async def offer(self, update: WeightUpdate) -> Source:
        raise EngineError(f"{self.name} serves no versions")

    async def stage(self, update: WeightUpdate) -> None:
        self._gate.check_alive()
        await asyncio.sleep(self.load_s)
        self._gate.check_alive()
        self._staged = update.weights

    async def load(self, update: WeightUpdate, *, kv: KVPolicy = "recompute") -> WeightVersion:
        self._gate.require_quiet("load")
        self._gate.weights_unverified = f"version {update.weights.version} was not loaded whole"
        staged, self._staged = self._staged == update.weights, None
        claimed = await self._on_load(update.weights, kv, seconds=0.0 if staged else self.load_s)
        if claimed is not None:
            return claimed
        self._gate.require_quiet("load")
        self.weights = update.weights
        self._gate.weights_unverified = None
        return self.weights

    async def checksum(self) -> str:
        return self.weights.digest

    async def stats(self) -> ReplicaStats:
        self._gate.check_alive()
        return self._gate.stats()

    # ---- for subclasses

    def _on_abort(self) -> None:
        """The requests in flight are to end with the tokens that they have."""

    def _on_freeze(self) -> None:
        """The requests in flight stand still until `_on_resume`."""

    def _on_resume(self) -> None:
        """The gate is open."""

    async def _on_load(self, weights: WeightVersion, kv: KVPolicy, *, seconds: float) -> WeightVersion | None:
        """Take `seconds` for a load; returns a version that is claimed without being loaded, if there is one."""
        await asyncio.sleep(seconds)
        return None


class ScriptedTrainer(InProcess):
    """A trainer whose work takes time and does nothing else; see `async_rl.controller.parts.Trainer`.

    Attributes:
        train_s: seconds of a batch.
        export_s: seconds of an export.
        save_s: seconds until a save has a copy of the state.
        saved_s: seconds until the copy is written.
    """

    train_s = export_s = save_s = saved_s = 0.0
    saving = Path()

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        await self._work("train", self.train_s)
        return {"loss": 0.0, "grad_norm": 1.0, "entropy": 1.0}

    async def export(self, directory: Path | str, *, version: int, keep_version: int) -> WeightUpdate:
        await self._work("export", self.export_s)
        return WeightUpdate(path=Path(directory) / f"weights-{version}", weights=self._weights(version))

    async def snapshot_weights(self) -> None:
        """There is one set of weights."""

    async def forget_versions(self, first: int, last: int) -> None:
        """It stores none."""

    async def score(self, batch: TrainingBatch) -> list[Tensor]:
        import torch  # the planner does without it

        return [torch.from_numpy(batch.loss_tokens(number).logprobs) for number in range(len(batch))]

    async def save(self, directory: Path) -> None:
        await self._work("save", self.save_s)
        self.saving = directory

    async def saved(self) -> None:
        await self._work("saved", self.saved_s)
        self.saving.mkdir()

    async def save_pretrained(self, folder: Path, *, like: Path) -> None:
        """There is no model."""

    async def restore(self, directory: Path) -> None:
        """There is no state."""

    def _weights(self, version: int) -> WeightVersion:
        return WeightVersion(version, str(version))

    async def _work(self, what: str, seconds: float) -> None:
        """Take the time of a piece of work."""
        await asyncio.sleep(seconds)
