"""Model families: conversion of Hugging Face configs to megatron's config, and of weight names.

To add a family, add a Family to FAMILIES under the `model_type` of its configs, which is also ModelInfo.family. Layers
for multi-token prediction (num_nextn_predict_layers) are not trained; see `is_carried`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from async_rl.trainer.model.families import settings
from async_rl.trainer.model.families.settings import Rope, UnbuiltFeature, read_rope, refuse_common
from async_rl.weights.model_info import CheckpointError

Kind = Literal["direct", "vocabulary", "qkv", "gate_up", "stacked", "stacked_gate_up"]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The Hugging Face tensors that form one megatron tensor."""

    kind: Kind
    """direct: unchanged. vocabulary: with rows padded for tensor parallelism. qkv: interleaved by key-value head.
    gate_up: concatenated, gate first. stacked: one tensor of all experts, matrices transposed. stacked_gate_up: the
    same, with gate and up in turns."""
    names: tuple[str, ...]
    """Names; in a Table with the placeholders {layer} and {expert}."""


Table = dict[str, WeightNames]
"""Name in megatron's local spec -> tensors of a Hugging Face checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family."""

    megatron: Callable[[dict[str, Any]], dict[str, Any]]
    """Hugging Face config -> keyword arguments of megatron's TransformerConfig."""
    layer_weights: Table
    """Weights of one layer except its experts."""
    expert_weights: Table = field(default_factory=Table)
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


# Tables of the weights of one layer. A table may list optional weights (a bias, a norm, a shared expert). Only weights
# of the built model are looked up.

_HF_LAYER = "model.layers.{layer}."
_HF_ATTENTION = _HF_LAYER + "self_attn."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _direct(weights: Mapping[str, str], *, ours: str = "", theirs: str = _HF_LAYER) -> Table:
    """Unchanged weights: name in the local spec -> name in the checkpoint, both without their prefixes."""
    return {f"{ours}{name}": WeightNames("direct", (f"{theirs}{hf}",)) for name, hf in weights.items()}


def _gated(ours: str, theirs: str, projections: tuple[str, str, str] = _PROJECTIONS) -> Table:
    gate, up, down = (f"{theirs}{projection}.weight" for projection in projections)
    return {
        f"{ours}linear_fc1.weight": WeightNames("gate_up", (gate, up)),
        f"{ours}linear_fc2.weight": WeightNames("direct", (down,)),
    }


_NORMS = _direct(
    {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    }
)
_ATTENTION: Table = {
    **_NORMS,
    "self_attention.linear_qkv.weight": WeightNames("qkv", tuple(f"{_HF_ATTENTION}{c}_proj.weight" for c in "qkv")),
    "self_attention.linear_qkv.bias": WeightNames("qkv", tuple(f"{_HF_ATTENTION}{c}_proj.bias" for c in "qkv")),
    **_direct(
        {
            "linear_proj.weight": "o_proj.weight",
            "q_layernorm.weight": "q_norm.weight",
            "k_layernorm.weight": "k_norm.weight",
        },
        ours="self_attention.",
        theirs=_HF_ATTENTION,
    ),
}
"""Norms of a layer and grouped-query attention, with optional bias and head norms."""
_LATENT_ATTENTION: Table = {
    **_NORMS,
    **_direct(
        {
            "linear_q_proj.weight": "q_proj.weight",
            "linear_q_down_proj.weight": "q_a_proj.weight",
            "q_layernorm.weight": "q_a_layernorm.weight",
            "linear_q_up_proj.weight": "q_b_proj.weight",
            "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
            "kv_layernorm.weight": "kv_a_layernorm.weight",
            "linear_kv_up_proj.weight": "kv_b_proj.weight",
            "linear_proj.weight": "o_proj.weight",
        },
        ours="self_attention.",
        theirs=_HF_ATTENTION,
    ),
}
"""Norms of a layer and latent attention."""
_DENSE_MLP = _gated("mlp.", _HF_LAYER + "mlp.")
"""MLP of a layer without experts."""
_BIASED_ATTENTION_AND_ROUTER: Table = {
    **_ATTENTION,
    **_direct(
        {
            "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
            "self_attention.core_attention.softmax_offset": "self_attn.sinks",
            "mlp.router.weight": "mlp.router.weight",
            "mlp.router.bias": "mlp.router.bias",
        }
    ),
}
"""Attention with sinks and a bias on the output, and a router with a bias, as in gpt-oss."""
_STACKED_EXPERTS: Table = {
    "linear_fc1.weight": WeightNames("stacked_gate_up", (_HF_LAYER + "mlp.experts.gate_up_proj",)),
    "linear_fc1.bias": WeightNames("stacked_gate_up", (_HF_LAYER + "mlp.experts.gate_up_proj_bias",)),
    "linear_fc2.weight": WeightNames("stacked", (_HF_LAYER + "mlp.experts.down_proj",)),
    "linear_fc2.bias": WeightNames("stacked", (_HF_LAYER + "mlp.experts.down_proj_bias",)),
}
"""Weights of one expert that a checkpoint has in one tensor of all experts, as gpt-oss."""


def _router(block: str = "mlp") -> Table:
    """Router of a layer, with an optional correction bias."""
    gate = {"mlp.router.weight": "weight", "mlp.router.expert_bias": "e_score_correction_bias"}
    return _direct(gate, theirs=f"{_HF_LAYER}{block}.gate.")


def _shared_experts(name: str = "shared_experts") -> Table:
    """Shared experts, which process every token, with the optional gate of Qwen2-MoE."""
    return {
        **_gated("mlp.shared_experts.", f"{_HF_LAYER}mlp.{name}."),
        **_direct({"mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight"}),
    }


def _experts(block: str = "mlp", *, projections: tuple[str, str, str] = _PROJECTIONS) -> Table:
    """Weights of one expert in the MoE block `block`, with the names of gate, up and down projection."""
    return _gated("", _HF_LAYER + block + ".experts.{expert}.", projections)


_DENSE = {**_ATTENTION, **_DENSE_MLP}
FAMILIES: dict[str, Family] = {
    "llama": Family(megatron=settings.llama, layer_weights=_DENSE),
    "qwen2": Family(megatron=settings.qwen2, layer_weights=_DENSE),
    "qwen3": Family(megatron=settings.qwen3, layer_weights=_DENSE),
    "qwen2_moe": Family(
        megatron=settings.qwen2_moe,
        layer_weights={**_DENSE, **_router(), **_shared_experts("shared_expert")},
        expert_weights=_experts(),
    ),
    "qwen3_moe": Family(megatron=settings.qwen3_moe, layer_weights={**_DENSE, **_router()}, expert_weights=_experts()),
    "mixtral": Family(
        megatron=settings.mixtral,
        layer_weights={**_ATTENTION, **_router("block_sparse_moe")},
        expert_weights=_experts("block_sparse_moe", projections=("w1", "w3", "w2")),
    ),
    "olmoe": Family(
        megatron=settings.olmoe,
        layer_weights={**_ATTENTION, **_router()},
        expert_weights=_experts(),
        norms_all_heads=True,
    ),
    "glm4_moe": Family(
        megatron=settings.glm4_moe,
        layer_weights={**_DENSE, **_router(), **_shared_experts()},
        expert_weights=_experts(),
        partial_rotary=0.5,
    ),
    "deepseek_v3": Family(
        megatron=settings.deepseek_v3,
        layer_weights={**_LATENT_ATTENTION, **_DENSE_MLP, **_router(), **_shared_experts()},
        expert_weights=_experts(),
    ),
    "gpt_oss": Family(
        megatron=settings.gpt_oss,
        layer_weights=_BIASED_ATTENTION_AND_ROUTER,
        expert_weights=_STACKED_EXPERTS,
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
