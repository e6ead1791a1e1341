"""A trainer whose steps, exports and checkpoints take time, and do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from async_rl.controller.checkpoints import Checkpoints, RunState
from async_rl.controller.parts import Trainer
from async_rl.inference.stub import InProcess
from async_rl.metrics.recorder import Recorder
from async_rl.plan.description import Interruptions, Rates
from async_rl.plan.figures import OpenTrajectories
from async_rl.plan.replica import PlannedReplica
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.weights.transport import WeightUpdate
from message_queue.tokens import WeightVersion

CLOSE_S = 1e-6


class PlannedTrainer(InProcess):
    """See `async_rl.controller.parts.Trainer`; without the calls that only a probe or a restart makes.

    Args:
        rates: those of the trainer, `switch_s` and `shared_speed`.
        gpus: number of GPUs.
        groups_of: groups of the cluster for each that it gets.
        replicas: get slower while it trains, if they share its cores.
        opened: trajectories in rollout; they make it slower then.
    """

    def __init__(
        self,
        rates: Rates,
        *,
        gpus: int,
        groups_of: float,
        replicas: Sequence[PlannedReplica],
        opened: OpenTrajectories,
    ) -> None:
        self._rates = rates
        self._token_s = groups_of / (rates.train_tokens_per_s * gpus)
        self._replicas = replicas
        self._opened = opened

    async def train(self, batch: TrainingBatch) -> dict[str, float]:
        await self._work(self._rates.train_s + float(batch.lengths.sum()) * self._token_s)
        await asyncio.sleep(self._rates.switch_s)
        return {}

    async def export(self, directory: Path | str, *, version: int, keep_version: int) -> WeightUpdate:
        await asyncio.sleep(self._rates.export_s)
        return WeightUpdate(path=Path(directory), weights=WeightVersion(version, str(version)))

    async def _work(self, seconds: float) -> None:
        """Train for `seconds` at full speed; slower while a trajectory is open, if both share cores."""
        loop, shared = asyncio.get_running_loop(), self._rates.shared_speed
        if shared == 1:
            await asyncio.sleep(seconds)
            return
        for replica in self._replicas:
            replica.share(shared)
        while seconds > CLOSE_S:
            started, speed = loop.time(), shared if self._opened else 1.0
            self._opened.turned.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds / speed):
                    await self._opened.turned.wait()
            seconds -= speed * (loop.time() - started)
        for replica in self._replicas:
            replica.share(1.0)


class PlannedCheckpoints(Checkpoints):
    """Checkpoints that stop the trainer, and are not written."""

    def __init__(self, interruptions: Interruptions) -> None:
        self._interruptions = interruptions

    @property
    def every(self) -> int:
        return self._interruptions.checkpoint_every

    async def begin(self, train_step: int, *, trainer: Trainer) -> None:
        await asyncio.sleep(self._interruptions.checkpoint_s)

    async def finish(self, state: RunState, *, trainer: Trainer, records: Recorder) -> Path:
        return Path()
