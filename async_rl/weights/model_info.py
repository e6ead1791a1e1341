"""Facts of a Hugging Face checkpoint that every part of a run needs: family, vocabulary, context, routed layers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from message_queue.errors import AsyncRLError
from message_queue.tokens import RoutingSpec

_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
_CARRIED = ("mtp.", "model.visual.")
TEXT_CONFIG, VISION_CONFIG = "text_config", "vision_config"


class CheckpointError(AsyncRLError, ValueError):
    """A checkpoint folder that cannot be used; names the folder, the problem and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a checkpoint."""

    family: str
    """`model_type` of the checkpoint."""
    vocab_size: int
    """Number of token ids."""
    num_layers: int
    """Number of layers."""
    context_length: int
    """Longest sequence in tokens."""
    routing: RoutingSpec | None
    """Layout of the routing rows; None for a dense model."""
    tied: bool = False
    """Whether the output head shares the embedding's weights."""
    has_vision: bool = False
    """Whether the checkpoint also has a vision tower."""


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Fields of config.json; of a model of text and images those of its text part, and its vision_config.

    `{"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}, "vision_config": {}}` gives
    `{"model_type": "qwen3_5_moe_text", "vision_config": {}}`.

    Raises:
        CheckpointError: there is no such file, it cannot be read, or its parts disagree.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} has no config.json; give a Hugging Face checkpoint folder")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy it again") from error
    if not isinstance(text := config.get(TEXT_CONFIG), dict):
        return config
    tied = [bool(part.get("tie_word_embeddings", False)) for part in (config, text)]
    if tied[0] != tied[1]:
        raise CheckpointError(
            f"{path} has tie_word_embeddings={tied[0]} and in text_config {tied[1]}: engines read one or the other; "
            "set both to whether the checkpoint has no lm_head"
        )
    outer = {name: config[name] for name in ("quantization_config",) if name in config}
    return {**outer, **text, VISION_CONFIG: config.get(VISION_CONFIG) or {}}


def layer_of(name: str) -> int | None:
    """Number of the layer of a Hugging Face tensor, from 0; None if it is outside the layers."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def is_carried(name: str, *, num_layers: int) -> bool:
    """Whether a Hugging Face tensor belongs to a layer for multi-token prediction, or to a vision tower.

    Such layers are numbered after the layers of the model: `model.layers.46.eh_proj.weight` with num_layers=46. In
    Qwen3-Next their names begin with `mtp.`. They serve for drafts at most (`engine.speculation`). The names of a
    vision tower begin with `model.visual.`. None of these is trained, and an exported checkpoint has them unchanged.
    """
    layer = layer_of(name)
    return name.startswith(_CARRIED) or (layer is not None and layer >= num_layers)


def is_quantized(checkpoint: Path) -> bool:
    """Whether the weights of a checkpoint folder are quantized in a format that `async_rl.weights.quantized` reads."""
    try:
        config = read_config(checkpoint)
    except CheckpointError:
        return False  # read_model_info reports it
    return bool(config.get("quantization_config")) and quantization_problem(config) is None


def quantization_problem(config: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """(field, value, reason) if the weights of a config are quantized in a format that cannot be read; else None."""
    found: Mapping[str, Any] = config.get("quantization_config") or {}
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if not found or method == "mxfp4":
        return None
    if method != "fp8":
        return "quantization_config", method, "fp8 with blocks and mxfp4 are read; convert the checkpoint to bfloat16"
    convert = "convert the checkpoint to bfloat16"
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        return "quantization_config.weight_block_size", block, f"fp8 is read with blocks such as [128, 128]; {convert}"
    for field, allowed in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if found.get(field, allowed) != allowed:
            return f"quantization_config.{field}", found[field], f"fp8 is read with {field}={allowed}; {convert}"
    return None


def read_model_info(checkpoint: Path) -> ModelInfo:
    """Read `config.json` of a Hugging Face checkpoint folder.

    Raises:
        CheckpointError: see `read_config`; or a field is absent.
    """
    config = read_config(checkpoint)
    try:
        return ModelInfo(
            family=config["model_type"],
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            context_length=config["max_position_embeddings"],
            routing=_routing(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            has_vision=VISION_CONFIG in config,
        )
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint / 'config.json'} has no field {error}; give the folder of a causal language model"
        ) from error


def _routing(config: dict[str, Any]) -> RoutingSpec | None:
    """MoE layers in global numbers, from the fields that the families use."""
    num_experts = next(
        (config[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if config.get(k)), None
    )
    if not num_experts:
        return None
    layers = range(config["num_hidden_layers"])
    if "first_k_dense_replace" in config:
        moe = [i for i in layers if i >= config["first_k_dense_replace"]]
    else:
        step, dense = config.get("decoder_sparse_step", 1), set[int](config.get("mlp_only_layers") or ())
        moe = [i for i in layers if (i + 1) % step == 0 and i not in dense]
    if not moe:
        return None
    return RoutingSpec(layers=tuple(moe), num_experts=num_experts, top_k=config["num_experts_per_tok"])
