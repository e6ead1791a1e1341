"""Model families: a Hugging Face config as megatron's, and the names of the weights on both sides.

To add a family, add a Family to FAMILIES; names are those of `transformers` and of megatron's local spec.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from async_rl.model_info import CheckpointError

Kind = Literal["direct", "vocabulary", "qkv", "gate_up"]
HFConfig = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """kind: how the Hugging Face tensors `names` make one megatron tensor.

    direct: as it is. vocabulary: rows padded for tensor parallelism. qkv: interleaved by kv group.
    gate_up: gate on top of up.
    """

    kind: Kind
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """megatron: keyword arguments of TransformerConfig that the family decides. names: weights of one layer."""

    megatron: Callable[[HFConfig], dict[str, Any]]
    layer_weights: dict[str, WeightNames]
    expert_weights: dict[str, WeightNames]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a checkpoint's config says about the model to build."""

    family: Family
    megatron: dict[str, Any]
    vocab_size: int
    context_length: int
    rope_theta: float
    rope_dim: int
    tied: bool


def read_shape(checkpoint: Path) -> ModelShape:
    """The model of a Hugging Face checkpoint folder.

    Raises:
        CheckpointError: no readable config, a family that is not known, or a feature that is not built.
    """
    path = checkpoint / "config.json"
    try:
        config: HFConfig = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; give a Hugging Face checkpoint folder") from error
    name = config.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(f"{path} has model_type {name!r}; the trainer builds {', '.join(sorted(FAMILIES))}")
    for feature in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if config.get(feature):
            raise CheckpointError(f"{path} sets {feature}={config[feature]}, which the trainer does not build")
    family = FAMILIES[name]
    megatron = family.megatron(config)
    return ModelShape(
        family=family,
        megatron=megatron,
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        rope_theta=_rope_theta(config, path),
        rope_dim=megatron["kv_channels"],
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def weight_names(shape: ModelShape, name: str) -> WeightNames:
    """Hugging Face names of a megatron parameter with global layer (from 0) and expert numbers.

    Raises:
        KeyError: a parameter the family does not list.
    """
    if name in _OUTER:
        return _OUTER[name]
    if name == "output_layer.weight":
        return WeightNames("vocabulary", ("model.embed_tokens.weight" if shape.tied else "lm_head.weight",))
    layer, rest = _LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    expert = _EXPERT.fullmatch(rest)
    names = shape.family.expert_weights[expert[2]] if expert else shape.family.layer_weights[rest]
    number = expert[1] if expert else ""
    return WeightNames(names.kind, tuple(n.format(layer=layer, expert=number) for n in names.names))


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_OUTER = {
    "embedding.word_embeddings.weight": WeightNames("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": WeightNames("direct", ("model.norm.weight",)),
}


def _rope_theta(config: HFConfig, path: Path) -> float:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise CheckpointError(f"{path} has rope type {kind!r}; the trainer builds plain rotary embeddings")
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _attention(config: HFConfig) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "qk_layernorm": True,
    }


def _qwen3_moe(config: HFConfig) -> dict[str, Any]:
    experts = config.get("num_experts") or config.get("num_local_experts")
    step: int = config.get("decoder_sparse_step", 1)
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    layers = [int((i + 1) % step == 0 and i not in dense) for i in range(config["num_hidden_layers"])]
    return {
        **_attention(config),
        "num_moe_experts": experts,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": layers,
        # norm_topk_prob: softmax over the chosen logits alone is the softmax over all, renormalised.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def _dense_layer(attention: str = "model.layers.{layer}.self_attn.") -> dict[str, WeightNames]:
    layer = "model.layers.{layer}."
    return {
        "input_layernorm.weight": WeightNames("direct", (layer + "input_layernorm.weight",)),
        "pre_mlp_layernorm.weight": WeightNames("direct", (layer + "post_attention_layernorm.weight",)),
        "self_attention.linear_qkv.weight": WeightNames("qkv", tuple(f"{attention}{c}_proj.weight" for c in "qkv")),
        "self_attention.linear_proj.weight": WeightNames("direct", (attention + "o_proj.weight",)),
        "self_attention.q_layernorm.weight": WeightNames("direct", (attention + "q_norm.weight",)),
        "self_attention.k_layernorm.weight": WeightNames("direct", (attention + "k_norm.weight",)),
        "mlp.linear_fc1.weight": WeightNames("gate_up", (layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight")),
        "mlp.linear_fc2.weight": WeightNames("direct", (layer + "mlp.down_proj.weight",)),
    }


_EXPERT_PREFIX = "model.layers.{layer}.mlp.experts.{expert}."
FAMILIES: dict[str, Family] = {
    "qwen3": Family(megatron=_attention, layer_weights=_dense_layer(), expert_weights={}),
    "qwen3_moe": Family(
        megatron=_qwen3_moe,
        layer_weights={
            **_dense_layer(),
            "mlp.router.weight": WeightNames("direct", ("model.layers.{layer}.mlp.gate.weight",)),
        },
        expert_weights={
            "linear_fc1.weight": WeightNames(
                "gate_up", (_EXPERT_PREFIX + "gate_proj.weight", _EXPERT_PREFIX + "up_proj.weight")
            ),
            "linear_fc2.weight": WeightNames("direct", (_EXPERT_PREFIX + "down_proj.weight",)),
        },
    ),
}
