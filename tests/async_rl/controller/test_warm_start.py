"""The cache of warm starts: the settings that find one, and that it appears whole or not at all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.config import WarmStartConfig
from async_rl.controller.warm_start import run_warm_start, warm_start_folder
from async_rl.inference.stub import InProcess
from async_rl.rollout.task import TaskConfig
from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.pretrained import save_pretrained

WARM = WarmStartConfig(steps=3, batch=2, optimizer=OptimizerConfig(), cache=Path("cache"))
TASK = TaskConfig(factory="module:task", options={"a": 1})
TRAINER = TrainerConfig()


def folder(warm=WARM, task=TASK, seed=0, trainer=TRAINER):
    return warm_start_folder(warm, task=task, seed=seed, trainer=trainer)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ({"warm": replace(WARM, steps=4)}, False),
        ({"warm": replace(WARM, optimizer=OptimizerConfig(lr=1e-4))}, False),
        ({"task": replace(TASK, options={"a": 2})}, False),
        ({"seed": 1}, False),
        ({"trainer": replace(TRAINER, dtype="bfloat16")}, False),
        ({"trainer": replace(TRAINER, router_replay="none", timeout_s=1.0)}, True),
        ({"task": replace(TASK, prompt_file=Path("prompts.jsonl"))}, True),
    ],
)
def test_settings_that_shape_the_weights_and_no_others_make_another_warm_start(other, is_same):
    assert (folder(**other) == folder()) is is_same


class Demonstrations:
    def __init__(self):
        self.asked = []

    def demonstrations(self, start, count):
        self.asked.append((start, count))
        return [(np.arange(4, dtype=np.int32), np.ones(4, np.bool_))] * count


class Trainer(InProcess):
    def __init__(self, fail_at=None):
        self.steps, self._fail_at = 0, fail_at

    async def train_supervised(self, batch):
        self.steps += 1
        if self.steps == self._fail_at:
            raise RuntimeError("out of memory")
        assert batch.num_loss_tokens.tolist() == batch.lengths.tolist()
        return {"loss": 1.0 / self.steps}

    async def save_pretrained(self, folder, *, like):
        save_pretrained(folder, [("w", torch.ones(2))], like=like)


async def run(directory, *, trainer):
    initial = directory / "initial"
    initial.mkdir()
    (initial / "config.json").write_text("{}")
    save_file({}, initial / "model.safetensors")
    task, seen = Demonstrations(), []
    await run_warm_start(
        WARM,
        task=task,
        trainer=trainer,
        initial=initial,
        folder=directory / "made",
        progress=lambda step, loss: seen.append((step, loss)),
    )
    return task, seen


async def test_a_warm_start_is_a_checkpoint_with_the_trained_weights(tmp_path):
    task, seen = await run(tmp_path, trainer=Trainer())
    assert task.asked == [(0, 2), (2, 2), (4, 2)], "no demonstration is seen twice"
    assert seen == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "made" / "model.safetensors")


async def test_a_warm_start_that_fails_leaves_no_folder(tmp_path):
    with pytest.raises(RuntimeError):
        await run(tmp_path, trainer=Trainer(fail_at=2))
    assert not (tmp_path / "made").exists()


async def test_of_two_runs_that_make_the_same_warm_start_each_has_a_whole_one(tmp_path):
    class Slower(Trainer):
        """Another run saves its warm start while this one does."""

        async def save_pretrained(self, folder, *, like):
            await super().save_pretrained(folder, like=like)
            save_pretrained(tmp_path / "made", [("w", torch.zeros(2))], like=like)

    await run(tmp_path, trainer=Slower())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["initial", "made"]
    assert load_file(tmp_path / "made" / "model.safetensors")["w"].tolist() == [0, 0]
