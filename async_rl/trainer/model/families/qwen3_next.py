"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts and a shared expert in all."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig, UnbuiltFeature, WeightNames, refuse_unless
from async_rl.trainer.model.families.qwen import GATED_EXPERTS, qwen2_moe

LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_next(config: HFConfig) -> dict[str, Any]:
    """Softmax routing, and a shared expert with a sigmoid gate."""
    refuse_unless(config, "qkv_bias", (False, None), "trainer and engines build this family without it")
    return {**qwen2_moe(config), "add_qkv_bias": False, **hybrid(config)}


def hybrid(config: HFConfig) -> dict[str, Any]:
    """Gated delta nets, whose key and value heads have their own sizes, and gated attention; norms times 1 + weight."""
    parts.refuse_bias(config)
    refuse_unless(config, "attn_output_gate", (True, None), "the trainer builds attention with an output gate")
    refuse_unless(config, "output_gate_type", ("swish", "silu", None), "the trainer builds gates of delta nets by SiLU")
    kinds = _layer_types(config)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise UnbuiltFeature("linear_num_value_heads", values, f"it must be a multiple of linear_num_key_heads={keys}")
    return {
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "linear_attention_freq": [int(kind == LINEAR) for kind in kinds],
        "linear_conv_kernel_dim": config["linear_conv_kernel_dim"],
        "linear_key_head_dim": config["linear_key_head_dim"],
        "linear_value_head_dim": config["linear_value_head_dim"],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }


def _layer_types(config: HFConfig) -> list[str]:
    """Kinds of the layers. By default every fourth layer is attention, from layer 3."""
    every, number = config.get("full_attention_interval", 4), config["num_hidden_layers"]
    kinds: list[str] = config.get("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(number)]
    if len(kinds) != number:
        raise UnbuiltFeature("layer_types", kinds, f"it must name all {number} layers")
    return kinds


_QKV = tuple(f"{parts.ATTENTION}{c}_proj.weight" for c in "qkv")
DELTA_NET = parts.LAYER + "linear_attn."
HYBRID = {
    **parts.GROUPED_QUERIES,
    "self_attention.linear_qkv.weight": WeightNames("gated_qkv", _QKV),
    **parts.HEAD_NORMS,
    "self_attention.conv_weight": WeightNames("delta_conv", (f"{DELTA_NET}conv1d.weight",)),
    **parts.direct(
        {"A_log": "A_log", "dt_bias": "dt_bias", "norm_weight": "norm.weight", "out_proj.weight": "out_proj.weight"},
        ours="self_attention.",
        theirs=DELTA_NET,
    ),
}
"""Gated attention, and gated delta nets without their input projections."""
_IN_PROJECTIONS = parts.direct(
    {f"{name}.weight": f"{name}.weight" for name in ("in_proj_qkvz", "in_proj_ba")},
    ours="self_attention.",
    theirs=DELTA_NET,
)
FAMILIES = {
    "qwen3_next": Family(
        megatron=qwen3_next,
        layer_weights={**HYBRID, **_IN_PROJECTIONS, **parts.DENSE_MLP, **GATED_EXPERTS},
        expert_weights=parts.experts(),
        layer_types=(LINEAR, FULL),
        partial_rotary=0.25,
    )
}
