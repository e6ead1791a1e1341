"""Names of the weights of one layer: megatron's local spec -> the tensors of a Hugging Face checkpoint.

A table may list more than a config builds (a bias, a norm, a shared expert): only what the model has is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["direct", "vocabulary", "qkv", "gate_up"]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """kind: how the Hugging Face tensors `names` make one megatron tensor.

    direct: as it is. vocabulary: rows padded for tensor parallelism. qkv: interleaved by kv group.
    gate_up: gate on top of up.
    """

    kind: Kind
    names: tuple[str, ...]


Table = dict[str, WeightNames]

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_NORMS: Table = {
    "input_layernorm.weight": WeightNames("direct", (_LAYER + "input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": WeightNames("direct", (_LAYER + "post_attention_layernorm.weight",)),
}


def attention() -> Table:
    """Norms of a layer and grouped-query attention, with the bias and the head norms that some configs have."""
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
    """A layer without experts."""
    return _gated("mlp.", _LAYER + "mlp.", ("gate_proj", "up_proj", "down_proj"))


def router(block: str = "mlp") -> Table:
    """The router of a layer, with the correction bias that some families have."""
    gate = f"{_LAYER}{block}.gate."
    return {
        "mlp.router.weight": WeightNames("direct", (gate + "weight",)),
        "mlp.router.expert_bias": WeightNames("direct", (gate + "e_score_correction_bias",)),
    }


def shared_experts(name: str = "shared_experts") -> Table:
    """What every token goes through besides its experts, with the gate of Qwen2-MoE."""
    return {
        **_gated("mlp.shared_experts.", f"{_LAYER}mlp.{name}.", ("gate_proj", "up_proj", "down_proj")),
        "mlp.shared_experts.gate_weight": WeightNames("direct", (_LAYER + "mlp.shared_expert_gate.weight",)),
    }


def experts(block: str = "mlp", *, projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Table:
    """One expert; projections: what gate, up and down are called."""
    return _gated("", _LAYER + block + ".experts.{expert}.", projections)


def _gated(ours: str, theirs: str, projections: tuple[str, str, str]) -> Table:
    gate, up, down = (f"{theirs}{projection}.weight" for projection in projections)
    return {
        f"{ours}linear_fc1.weight": WeightNames("gate_up", (gate, up)),
        f"{ours}linear_fc2.weight": WeightNames("direct", (down,)),
    }
