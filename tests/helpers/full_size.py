"""Checkpoints of the full size of published models, without content: their files take no space on disk."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.helpers import tokenizers_of_families

SHARD_BYTES = 1 << 30
COMMON: dict[str, Any] = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
EXPERTS: dict[str, Any] = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, **COMMON}
MODELS: dict[str, PretrainedConfig] = {  # config.json of the published checkpoints, as far as it decides sizes
    "Qwen3-0.6B": Qwen3Config(
        **{"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"intermediate_size": 3072, "tie_word_embeddings": True, **COMMON},
    ),
    "Qwen3-1.7B": Qwen3Config(
        **{"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"intermediate_size": 6144, "tie_word_embeddings": True, **COMMON},
    ),
    "Qwen3-8B": Qwen3Config(
        **{"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 12288, **COMMON},
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, moe_intermediate_size=768, **EXPERTS
    ),
    "Qwen3-235B-A22B": Qwen3MoeConfig(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536, **EXPERTS
    ),
}
PARAMETERS = {  # as their model cards say, rounded
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}


def save_empty(model: str, folder: Path) -> Path:
    """Write the checkpoint of a model of MODELS into a new folder."""
    config = MODELS[model]
    files: list[dict[str, dict[str, Any]]] = [{}]
    size = 0
    for name, shape in _tensor_shapes(config):
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


def _tensor_shapes(config: PretrainedConfig) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of the tensors of a published checkpoint. Each expert has separate tensors."""
    family = Qwen3MoeForCausalLM if isinstance(config, Qwen3MoeConfig) else Qwen3ForCausalLM
    one_layer = type(config).from_dict({**config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    with torch.device("meta"):
        state = family(one_layer).state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layers = config.num_hidden_layers if ".layers.0." in name else 1
        for layer in range(layers):
            yield from _published(name.replace(".layers.0.", f".layers.{layer}."), list(tensor.shape))


def _published(name: str, shape: list[int]) -> Iterator[tuple[str, list[int]]]:
    """One tensor of transformers as those of a published checkpoint: stacked experts have a tensor for each."""
    if ".mlp.experts." not in name:
        yield name, shape
        return
    prefix, _, kind = name.rpartition(".")
    number, rows, columns = shape
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert in range(number):
        yield from ((f"{prefix}.{expert}.{part}.weight", [rows // len(parts), columns]) for part in parts)
