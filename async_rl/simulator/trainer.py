"""A trainer whose weights are a hash of everything it was trained on."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from async_rl.cluster.trainer import TrainerError, TrainerLostError
from async_rl.inference.stub import InProcess
from async_rl.rollout.group_contents import fetched
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import WeightVersion

if TYPE_CHECKING:
    from async_rl.simulator.world import World

INITIAL = hashlib.blake2b(b"initial weights", digest_size=8).hexdigest()


class SimulatedTrainer(InProcess):
    """See `controller.recovery.Trainer`. digest: of the weights now. train_step: updates they hold."""

    def __init__(self, world: World) -> None:
        self.digest = INITIAL
        self.train_step = 0
        self._world = world

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        per_batch = self._world.scenario.config.trainer.updates_per_batch
        batch = replace(batch, contents=await fetched(batch.contents))
        for mini_batch in range(per_batch):
            await self._work("train", seconds=self._world.scenario.train_s / per_batch)
            if not mini_batch:
                self._world.judge(self._world.oracle.check_batch, batch, train_step=self.train_step)
                self._world.progressed()
            content = hashlib.blake2b(self.digest.encode(), digest_size=8)
            for number in (batch.mini_batch == mini_batch).nonzero()[0].tolist():
                for part in (batch.sequence(number).token_ids, batch.loss_tokens(number).logprobs):
                    content.update(part.tobytes())
            content.update(batch.advantages[batch.mini_batch == mini_batch].tobytes())
            self.digest = content.hexdigest()
            self.train_step += 1
        self._world.judge(self._world.oracle.trained_to, self.train_step, self.digest)
        self._world.note("trainer", "train", self.train_step, self.digest)
        return {"loss": 0.0, "grad_norm": 1.0, "entropy": 1.0}

    async def export(self, directory: Path | str, *, version: int, keep_version: int) -> WeightUpdate:
        await self._work("export", seconds=self._world.scenario.train_s / 4)
        weights = WeightVersion(version, self.digest)
        self._world.judge(self._world.oracle.exported, weights, updates=self.train_step)
        self._world.note("trainer", "export", version, self.digest)
        return WeightUpdate(path=Path(directory) / f"weights-{version}", weights=weights)

    async def snapshot_weights(self) -> None:
        """The simulation compares what engines sampled by itself, so nothing is scored."""

    async def score(self, batch: TrainingBatch) -> list[Tensor]:
        return [torch.from_numpy(batch.loss_tokens(number).logprobs) for number in range(len(batch))]

    async def save(self, directory: Path) -> None:
        await self._work("save", seconds=self._world.scenario.train_s / 16)
        self._saving = directory, {"digest": self.digest, "train_step": self.train_step}

    async def saved(self) -> None:
        await self._work("saved", seconds=1.5 * self._world.scenario.train_s)
        directory, state = self._saving
        directory.mkdir()
        (directory / "state.json").write_text(json.dumps(state))

    async def save_pretrained(self, folder: Path, *, like: Path) -> None:
        self._world.note("trainer", "save_pretrained", self.digest)

    async def restore(self, directory: Path) -> None:
        state = json.loads((directory / "state.json").read_text())
        self.digest, self.train_step = state["digest"], state["train_step"]

    async def _work(self, what: str, *, seconds: float) -> None:
        kind, _ = self._world.fault(what)
        await asyncio.sleep(seconds)
        if kind == "trainer fails":
            raise TrainerError(f"trainer rank 0: {what} failed: out of memory")
        if kind == "trainer dies":
            raise TrainerLostError(f"trainer rank 0: process died during {what}")
