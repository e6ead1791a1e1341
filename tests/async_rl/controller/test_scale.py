"""Presets for GPUs: a checkpoint of the full size is checked, and the memory of trainer and engine ranks fits."""

from dataclasses import replace

import pytest

from async_rl.config import CONFIGS, load_config, preset_names
from async_rl.controller.preflight import check_run
from async_rl.controller.summary import engine_memory, parameters_of, rank_memory, rank_parts, summary
from async_rl.inference.serving import gpu_bytes
from async_rl.trainer.model.model import LoraConfig, ParallelConfig, TrainerConfig
from tests.helpers.full_size import PARAMETERS, save_empty
from tests.helpers.tiny_models import qwen3_moe_config, save_checkpoint

CASES = [  # preset, model, further options
    ("one_gpu", "Qwen3-1.7B"),
    ("one_gpu", "Qwen3-8B", "trainer.lora.rank=32"),
    ("dense_8b_8", "Qwen3-8B"),
    ("qwen3_30b_a3b_8", "Qwen3-30B-A3B"),
    ("qwen3_30b_a3b_16", "Qwen3-30B-A3B"),
    ("qwen3_30b_a3b_24", "Qwen3-30B-A3B"),
    ("qwen3_235b_a22b", "Qwen3-235B-A22B"),
]
SEVERAL_NODES = ("qwen3_30b_a3b_16", "qwen3_30b_a3b_24", "qwen3_235b_a22b")
TASK = """
from async_rl import Task

task = Task(prompts=[{"prompt": "7+8", "answer": "15"}], rewards=lambda completion: 1.0, validation=["1+1"])
"""


def test_every_preset_is_checked():
    assert {name for name, *_ in CASES} == set(preset_names(CONFIGS / "scale"))


@pytest.mark.parametrize(("preset", "model", "more"), [(preset, model, more) for preset, model, *more in CASES])
def test_scale_preset_accepts_the_model_and_its_ranks_fit_an_h100(preset, model, more, tmp_path):
    checkpoint = save_empty(model, tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK)
    config = load_config(
        [
            *(f"scale={preset}", "task=python", f"task.factory={tmp_path / 'task.py'}:task"),
            *(f"model.checkpoint={checkpoint}", f"output_dir={tmp_path / 'run'}", *more),
            *([f"sync.directory={tmp_path}"] if preset in SEVERAL_NODES else []),
        ]
    )
    checked = check_run(config)
    assert not checked.warnings
    assert sum(parameters_of(checkpoint)) == PARAMETERS[model]
    trainer, engine = sum(rank_memory(config, checkpoint).values()), sum(engine_memory(config, checkpoint).values())
    of_trainer, of_engine = config.cluster.gpus_per_rank, config.engine.gpu_memory_utilization
    assert of_trainer + of_engine * (of_trainer < 1) <= 1  # the shares of a GPU that both use
    assert trainer < 0.9 * of_trainer * gpu_bytes()  # the rest is for activations
    assert engine < 0.9 * of_engine * gpu_bytes()  # the rest is for K/V
    assert f"{PARAMETERS[model]:,} parameters" in summary(config)


def test_rank_bytes_with_lora_are_those_of_the_frozen_weights():
    config = load_config(["scale=qwen3_30b_a3b_24", "model.checkpoint=/m", "sync.directory=/w"])
    adapted = replace(config.trainer, lora=LoraConfig(rank=8))
    held = sum(rank_parts(adapted, cpu_offload=0.0, dense=200, experts=800, layers=48).values())
    assert held == 2 * (200 / 2 + 800 / 8)  # tensor 2, expert 8


def test_an_own_trunk_of_the_critic_takes_the_memory_of_a_second_model(tmp_path):
    checkpoint = save_checkpoint(qwen3_moe_config(), tmp_path / "model", seed=0)
    gae = [f"model.checkpoint={checkpoint}", "advantage.name=gae"]
    own = rank_memory(load_config(gae), checkpoint)
    model = sum(own[name] for name in ("weights", "gradients", "optimizer state"))
    assert own["the critic"] == model
    shared = rank_memory(load_config([*gae, "critic.trunk=shared"]), checkpoint)
    assert shared == {name: size for name, size in own.items() if name != "the critic"}
    adapted = rank_memory(load_config([*gae, "trainer.lora.rank=8"]), checkpoint)
    assert adapted["the critic"] == own["weights"]


def test_rank_bytes_are_those_of_the_pipeline_rank_with_most_layers():
    def held(*, layers, **parallel):
        config = TrainerConfig(ranks=2, parallel=ParallelConfig(pipeline=2, **parallel))
        return sum(rank_parts(config, cpu_offload=0.0, dense=600, experts=0, layers=layers).values())

    whole = 600 * (4 + 4 + 8)
    assert held(layers=4) == whole / 2
    assert held(layers=3) == pytest.approx(whole * 2 / 3)
    assert held(layers=5, virtual_pipeline=2) == pytest.approx(whole * 3 / 5)
