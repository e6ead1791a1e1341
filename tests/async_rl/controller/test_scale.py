"""Presets for large models on H100: a checkpoint of the full size is checked, and the ranks' memory fits."""

import json
import math
import struct
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from async_rl.config import load_config
from async_rl.controller.preflight import check_run
from async_rl.controller.summary import parameters_of, rank_bytes, summary
from async_rl.trainer.model.model import LoraConfig, ParallelConfig, TrainerConfig
from async_rl.weights.model_info import read_model_info
from tests.helpers import tokenizers_of_families

H100 = 80e9  # bytes
SHARD_BYTES = 1 << 30
COMMON = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
MODELS = {  # config.json of the published checkpoints, as far as it decides sizes
    "qwen3_30b_a3b": Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768, **COMMON
    ),
    "qwen3_235b_a22b": Qwen3MoeConfig(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536, **COMMON
    ),
}
PARAMETERS = {"qwen3_30b_a3b": 30_532_122_624, "qwen3_235b_a22b": 235_093_634_560}  # as their model cards say, rounded
TASK = """
from async_rl import Task

task = Task(prompts=[{"prompt": "7+8", "answer": "15"}], rewards=lambda completion: 1.0, validation=["1+1"])
"""


def tensor_shapes(config):
    """Name -> shape of the tensors of a published checkpoint, in which each expert has tensors of its own."""
    with torch.device("meta"):
        state = Qwen3MoeForCausalLM(config).state_dict()
    for name, tensor in state.items():
        if ".mlp.experts." not in name:
            yield name, list(tensor.shape)
            continue
        prefix, _, kind = name.rpartition(".")
        number, rows, columns = tensor.shape
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for expert in range(number):
            yield from ((f"{prefix}.{expert}.{part}.weight", [rows // len(parts), columns]) for part in parts)


def save_empty(config, folder):
    """A checkpoint whose files have their full length and no content, so that they take no space on disk."""
    files, size = [{}], 0
    for name, shape in tensor_shapes(config):
        if size > SHARD_BYTES:
            files.append({})
            size = 0
        start, size = size, size + 2 * math.prod(shape)
        files[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, size]}
    folder.mkdir()
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    for number, header in enumerate(files):
        text = json.dumps(header).encode()
        with (folder / f"{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + max(tensor["data_offsets"][1] for tensor in header.values()))
    weight_map = {name: f"{number}.safetensors" for number, header in enumerate(files) for name in header}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tokenizers_of_families.build("qwen").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_scale_preset_accepts_the_model_and_its_ranks_fit_an_h100(name, tmp_path):
    checkpoint = save_empty(MODELS[name], tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK)
    config = load_config(
        [
            *(f"scale={name}", "task=python", f"task.factory={tmp_path / 'task.py'}:task"),
            *(f"model.checkpoint={checkpoint}", f"sync.directory={tmp_path}", f"output_dir={tmp_path / 'run'}"),
        ]
    )
    check_run(config)
    dense, experts = parameters_of(checkpoint)
    assert dense + experts == PARAMETERS[name]
    layers = read_model_info(checkpoint).num_layers
    trainer = rank_bytes(
        config.trainer, cpu_offload=config.optimizer.cpu_offload, dense=dense, experts=experts, layers=layers
    )
    assert trainer < 0.7 * H100  # the rest is for activations
    assert 2 * (dense + experts) / config.engine.tensor_parallel < 0.8 * H100
    assert f"{dense + experts:,} parameters" in summary(config)


def test_rank_bytes_with_lora_are_those_of_the_frozen_weights():
    config = load_config(["scale=qwen3_30b_a3b", "model.checkpoint=/m", "sync.directory=/w"])
    adapted = replace(config.trainer, lora=LoraConfig(rank=8))
    held = rank_bytes(adapted, cpu_offload=0.0, dense=200, experts=800, layers=48)
    assert held == 2 * (200 / 2 + 800 / 8)  # tensor 2, expert 8


def test_rank_bytes_are_those_of_the_pipeline_rank_with_most_layers():
    def held(*, layers, **parallel):
        config = TrainerConfig(ranks=2, parallel=ParallelConfig(pipeline=2, **parallel))
        return rank_bytes(config, cpu_offload=0.0, dense=600, experts=0, layers=layers)

    whole = 600 * (4 + 4 + 8)
    assert held(layers=4) == whole / 2
    assert held(layers=3) == pytest.approx(whole * 2 / 3)
    assert held(layers=5, virtual_pipeline=2) == pytest.approx(whole * 3 / 5)
