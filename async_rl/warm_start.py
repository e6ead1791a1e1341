"""Supervised steps through the RL trainer before RL, for tasks that build their own model. Cached by what made it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from async_rl.batch.training_batch import TrainingBatch, supervised_batch
from async_rl.data.task import Task, TaskConfig
from async_rl.train.model import TrainerConfig
from async_rl.train.optimizer import OptimizerConfig

FORMAT = 1  # part of the cache key: raise it when the same settings give other weights


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """steps of `batch` demonstrations each; 0 steps skips it. cache: folder of finished warm starts."""

    steps: int
    batch: int
    optimizer: OptimizerConfig
    cache: Path

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch < 1:
            raise ValueError(f"warm_start.steps={self.steps}, warm_start.batch={self.batch}; need >= 0 and >= 1")


class SupervisedTrainer(Protocol):
    async def train_supervised(self, batch: TrainingBatch) -> dict[str, float]: ...
    async def save_pretrained(self, folder: Path, *, like: Path) -> None: ...


def warm_start_folder(config: WarmStartConfig, *, task: TaskConfig, seed: int, trainer: TrainerConfig) -> Path:
    """Folder of the checkpoint that these settings make; it exists once the warm start has run."""
    made_by = {
        "format": FORMAT,
        "steps": (config.steps, config.batch, asdict(config.optimizer)),
        "task": (task.factory, dict(task.options), seed),
        "trainer": (trainer.dtype, trainer.seed, trainer.supervised_aux_loss_coefficient),
    }
    key = hashlib.sha256(json.dumps(made_by, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return config.cache / key


async def run_warm_start(
    config: WarmStartConfig,
    *,
    task: Task,
    trainer: SupervisedTrainer,
    initial: Path,
    folder: Path,
    progress: Callable[[int, float], None],
) -> None:
    """Train on the task's demonstrations and write a Hugging Face checkpoint into `folder`, whole or not at all.

    Args:
        initial: checkpoint that the trainer was started from; gives config and tokenizer.
        progress: called with (step, loss) after each step.
    """
    for step in range(config.steps):
        demonstrations = await asyncio.to_thread(task.demonstrations, step * config.batch, config.batch)
        metrics = await trainer.train_supervised(supervised_batch(demonstrations))
        progress(step + 1, metrics["loss"])
    await trainer.save_pretrained(folder, like=initial)
