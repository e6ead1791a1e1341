"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, experts and a shared expert in all."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig, UnbuiltFeature, WeightNames, refuse_unless
from async_rl.trainer.model.families.qwen import qwen2_moe

LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_next(config: HFConfig) -> dict[str, Any]:
    """Norms multiply by 1 + weight. Key and value heads of the gated delta nets have their own sizes."""
    parts.refuse_bias(config)
    refuse_unless(config, "qkv_bias", (False, None), "trainer and engines build this family without it")
    kinds = _layer_types(config)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise UnbuiltFeature("linear_num_value_heads", values, f"it must be a multiple of linear_num_key_heads={keys}")
    return {
        **qwen2_moe(config),
        "add_qkv_bias": False,
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
_DELTA_NET = parts.LAYER + "linear_attn."
FAMILIES = {
    "qwen3_next": Family(
        megatron=qwen3_next,
        layer_weights={
            **parts.GROUPED_QUERIES,
            "self_attention.linear_qkv.weight": WeightNames("gated_qkv", _QKV),
            **parts.HEAD_NORMS,
            "self_attention.conv_weight": WeightNames("conv_qkv", (f"{_DELTA_NET}conv1d.weight",)),
            **parts.direct(
                {
                    "in_proj_qkvz.weight": "in_proj_qkvz.weight",
                    "in_proj_ba.weight": "in_proj_ba.weight",
                    "A_log": "A_log",
                    "dt_bias": "dt_bias",
                    "norm_weight": "norm.weight",
                    "out_proj.weight": "out_proj.weight",
                },
                ours="self_attention.",
                theirs=_DELTA_NET,
            ),
            **parts.DENSE_MLP,
            **parts.router(),
            **parts.shared_experts("shared_expert"),
            **parts.direct({"mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight"}),
        },
        expert_weights=parts.experts(),
        layer_types=(LINEAR, FULL),
        partial_rotary=0.25,
    )
}
