"""Tables of the weights of one layer: name in megatron's local spec -> tensors of a Hugging Face checkpoint.

A table may list optional weights (a bias, a norm, a shared expert). Only weights of the built model are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_NORMS: Table = {
    "input_layernorm.weight": WeightNames("direct", (_LAYER + "input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": WeightNames("direct", (_LAYER + "post_attention_layernorm.weight",)),
}


def attention() -> Table:
    """Norms of a layer and grouped-query attention, with optional bias and head norms."""
    return {
        **_NORMS,
        "self_attention.linear_qkv.weight": WeightNames("qkv", tuple(f"{_ATTENTION}{c}_proj.weight" for c in "qkv")),
        "self_attention.linear_qkv.bias": WeightNames("qkv", tuple(f"{_ATTENTION}{c}_proj.bias" for c in "qkv")),
        "self_attention.linear_proj.weight": WeightNames("direct", (_ATTENTION + "o_proj.weight",)),
        "self_attention.q_layernorm.weight": WeightNames("direct", (_ATTENTION + "q_norm.weight",)),
        "self_attention.k_layernorm.weight": WeightNames("direct", (_ATTENTION + "k_norm.weight",)),
    }


def latent_attention() -> Table:
    """Norms of a layer and latent attention."""
    weights = {
        "linear_q_proj": "q_proj",
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    return {
        **_NORMS,
        **{
            f"self_attention.{ours}.weight": WeightNames("direct", (f"{_ATTENTION}{theirs}.weight",))
            for ours, theirs in weights.items()
        },
    }


def dense_mlp() -> Table:
    """MLP of a layer without experts."""
    return _gated("mlp.", _LAYER + "mlp.", ("gate_proj", "up_proj", "down_proj"))


def router(block: str = "mlp") -> Table:
    """Router of a layer, with an optional correction bias."""
    gate = f"{_LAYER}{block}.gate."
    return {
        "mlp.router.weight": WeightNames("direct", (gate + "weight",)),
        "mlp.router.expert_bias": WeightNames("direct", (gate + "e_score_correction_bias",)),
    }


def biased_attention_and_router() -> Table:
    """Attention with sinks and a bias on the output, and a router with a bias, as in gpt-oss."""
    return {
        **attention(),
        "self_attention.linear_proj.bias": WeightNames("direct", (_ATTENTION + "o_proj.bias",)),
        "self_attention.core_attention.softmax_offset": WeightNames("direct", (_ATTENTION + "sinks",)),
        "mlp.router.weight": WeightNames("direct", (_LAYER + "mlp.router.weight",)),
        "mlp.router.bias": WeightNames("direct", (_LAYER + "mlp.router.bias",)),
    }


def stacked_experts() -> Table:
    """Weights of one expert that a checkpoint has in one tensor of all experts, as gpt-oss."""
    experts = _LAYER + "mlp.experts."
    return {
        "linear_fc1.weight": WeightNames("stacked_gate_up", (experts + "gate_up_proj",)),
        "linear_fc1.bias": WeightNames("stacked_gate_up", (experts + "gate_up_proj_bias",)),
        "linear_fc2.weight": WeightNames("stacked", (experts + "down_proj",)),
        "linear_fc2.bias": WeightNames("stacked", (experts + "down_proj_bias",)),
    }


def shared_experts(name: str = "shared_experts") -> Table:
    """Shared experts, which process every token, with the optional gate of Qwen2-MoE."""
    return {
        **_gated("mlp.shared_experts.", f"{_LAYER}mlp.{name}.", ("gate_proj", "up_proj", "down_proj")),
        "mlp.shared_experts.gate_weight": WeightNames("direct", (_LAYER + "mlp.shared_expert_gate.weight",)),
    }


def experts(block: str = "mlp", *, projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Table:
    """Weights of one expert.

    Args:
        block: name of the MoE block.
        projections: names of gate, up and down projection.
    """
    return _gated("", _LAYER + block + ".experts.{expert}.", projections)


def _gated(ours: str, theirs: str, projections: tuple[str, str, str]) -> Table:
    gate, up, down = (f"{theirs}{projection}.weight" for projection in projections)
    return {
        f"{ours}linear_fc1.weight": WeightNames("gate_up", (gate, up)),
        f"{ours}linear_fc2.weight": WeightNames("direct", (down,)),
    }
