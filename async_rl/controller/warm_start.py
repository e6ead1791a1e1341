"""Supervised steps through the RL trainer before RL, for tasks that build their own model. Cached by what made it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from async_rl.cluster.trainer import TrainerClient
from async_rl.config import WarmStartConfig
from async_rl.rollout.task import Task, TaskConfig
from async_rl.trainer.batch.training_batch import supervised_batch
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.rank_methods import TrainerRank

FORMAT = 1  # part of the cache key: raise it when the same settings give other weights


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
    trainer: TrainerClient,
    initial: Path,
    folder: Path,
    progress: Callable[[int, float], None],
) -> None:
    """Train on the task's demonstrations and write a Hugging Face checkpoint into `folder`, whole or not at all.

    Another run may do the same at the same time: the first to end fills `folder`.

    Args:
        initial: checkpoint that the trainer was started from; gives config and tokenizer.
        progress: called with (step, loss) after each step.
    """
    for step in range(config.steps):
        demonstrations = await asyncio.to_thread(task.demonstrations, step * config.batch, config.batch)
        metrics = await trainer.train_supervised(supervised_batch(demonstrations))
        progress(step + 1, metrics["loss"])
    own = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}")
    try:
        await trainer.call(TrainerRank.save_pretrained, own, like=initial)
        own.rename(folder)
    except OSError:
        if not folder.is_dir():  # noqa: ASYNC240 - the cache of this run
            raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
