"""Model families: conversion of Hugging Face configs to megatron's config, and of weight names.

To add a family, add a Family to FAMILIES under the `model_type` of its configs, which is also ModelInfo.family. Layers
for multi-token prediction (num_nextn_predict_layers) are not trained; see `is_carried`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.trainer.model.families import names, settings
from async_rl.trainer.model.families.checks import UnbuiltFeature, refuse_common
from async_rl.trainer.model.families.names import Kind, Table, WeightNames
from async_rl.trainer.model.families.rope import Rope, read_rope
from async_rl.weights.model_info import CheckpointError

__all__ = ["FAMILIES", "Family", "Kind", "ModelShape", "WeightNames", "read_shape", "weight_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family."""

    megatron: Callable[[dict[str, Any]], dict[str, Any]]
    """Hugging Face config -> keyword arguments of megatron's TransformerConfig."""
    layer_weights: Table
    """Weights of one layer except its experts."""
    expert_weights: Table
    """Weights of one expert."""
    partial_rotary: float | None = None
    """Default share of a head's channels with rotary embedding; None if the family always rotates whole heads."""
    norms_all_heads: bool = False
    """Whether the norms of queries and of keys are over all heads together, not over each head."""
    local_only: bool = False
    """Whether the family is built with megatron's local spec only, and not split over tensor or context ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Properties of a model from its Hugging Face config."""

    family: Family
    """The model family."""
    megatron: dict[str, Any]
    """Keyword arguments of megatron's TransformerConfig."""
    vocab_size: int
    """Token ids, without padding."""
    context_length: int
    """Longest sequence in tokens."""
    rope: Rope
    """Rotary embedding."""
    tied: bool
    """Whether the output layer uses the weight of the embedding."""
    num_carried_layers: int = 0
    """Layers for multi-token prediction, numbered after the others; see `is_carried`."""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        megatron=settings.llama, layer_weights={**names.attention(), **names.dense_mlp()}, expert_weights={}
    ),
    "qwen2": Family(
        megatron=settings.qwen2, layer_weights={**names.attention(), **names.dense_mlp()}, expert_weights={}
    ),
    "qwen3": Family(
        megatron=settings.qwen3, layer_weights={**names.attention(), **names.dense_mlp()}, expert_weights={}
    ),
    "qwen2_moe": Family(
        megatron=settings.qwen2_moe,
        layer_weights={
            **names.attention(),
            **names.dense_mlp(),
            **names.router(),
            **names.shared_experts("shared_expert"),
        },
        expert_weights=names.experts(),
    ),
    "qwen3_moe": Family(
        megatron=settings.qwen3_moe,
        layer_weights={**names.attention(), **names.dense_mlp(), **names.router()},
        expert_weights=names.experts(),
    ),
    "mixtral": Family(
        megatron=settings.mixtral,
        layer_weights={**names.attention(), **names.router("block_sparse_moe")},
        expert_weights=names.experts("block_sparse_moe", projections=("w1", "w3", "w2")),
    ),
    "olmoe": Family(
        megatron=settings.olmoe,
        layer_weights={**names.attention(), **names.router()},
        expert_weights=names.experts(),
        norms_all_heads=True,
    ),
    "glm4_moe": Family(
        megatron=settings.glm4_moe,
        layer_weights={**names.attention(), **names.dense_mlp(), **names.router(), **names.shared_experts()},
        expert_weights=names.experts(),
        partial_rotary=0.5,
    ),
    "deepseek_v3": Family(
        megatron=settings.deepseek_v3,
        layer_weights={**names.latent_attention(), **names.dense_mlp(), **names.router(), **names.shared_experts()},
        expert_weights=names.experts(),
    ),
    "gpt_oss": Family(
        megatron=settings.gpt_oss,
        layer_weights=names.biased_attention_and_router(),
        expert_weights=names.stacked_experts(),
        local_only=True,
    ),
}


# Families that are asked for, and the part that is missing.
_UNBUILT = {
    "qwen3_next": (
        "whose Gated DeltaNet layers the trainer cannot build: megatron-core's need the package flash-linear-"
        "attention, which has GPU kernels only, and take neither packed sequences nor context ranks"
    )
}


def read_shape(checkpoint: Path) -> ModelShape:
    """Read config.json of a Hugging Face checkpoint folder.

    Raises:
        CheckpointError: the config cannot be read, or the family or a feature is not supported.
    """
    path = checkpoint / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be read ({cause}); give a Hugging Face checkpoint folder") from error
    name = config.get("model_type")
    if name not in FAMILIES:
        why = f", {_UNBUILT[name]}" if name in _UNBUILT else ""
        raise CheckpointError(f"{path} has model_type {name!r}{why}; use a model of {', '.join(sorted(FAMILIES))}")
    try:
        refuse_common(config)
        return _shape(config, FAMILIES[name])
    except UnbuiltFeature as error:
        raise CheckpointError(f"{path} {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} has no field {error.args[0]!r}, which {name} needs; complete it") from error


def weight_names(shape: ModelShape, name: str) -> WeightNames:
    """Hugging Face names of a megatron weight with global layer (from 0) and expert numbers.

    `decoder.layers.2.mlp.experts.local_experts.5.linear_fc2.weight` of qwen3_moe is
    `model.layers.2.mlp.experts.5.down_proj.weight`.

    Raises:
        KeyError: the family has no such weight.
    """
    if name in _OUTER:
        return _OUTER[name]
    if name == "output_layer.weight":
        return WeightNames("vocabulary", ("model.embed_tokens.weight" if shape.tied else "lm_head.weight",))
    layer, rest = _LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    expert = _EXPERT.fullmatch(rest)
    found = shape.family.expert_weights[expert[2]] if expert else shape.family.layer_weights[rest]
    number = expert[1] if expert else ""
    return WeightNames(found.kind, tuple(n.format(layer=layer, expert=number) for n in found.names))


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_OUTER = {
    "embedding.word_embeddings.weight": WeightNames("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": WeightNames("direct", ("model.norm.weight",)),
}


def _shape(config: dict[str, Any], family: Family) -> ModelShape:
    megatron = family.megatron(config)
    return ModelShape(
        family=family,
        megatron=megatron,
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        rope=read_rope(
            config,
            head_dim=megatron.get("qk_pos_emb_head_dim") or megatron["kv_channels"],
            partial_rotary=family.partial_rotary,
        ),
        tied=bool(config.get("tie_word_embeddings", False)),
        num_carried_layers=config.get("num_nextn_predict_layers") or 0,
    )
