"""GLM-4.5 and later, with experts."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig


def glm4_moe(config: HFConfig) -> dict[str, Any]:
    """Sigmoid routing with a correction bias, partial rotary embedding, optional bias and head norms."""
    return {
        **parts.attention(config),
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        **parts.sigmoid_experts(config),
    }


FAMILIES = {
    "glm4_moe": Family(
        megatron=glm4_moe,
        layer_weights={
            **parts.GROUPED_QUERIES,
            **parts.QKV_BIAS,
            **parts.HEAD_NORMS,
            **parts.DENSE_MLP,
            **parts.router(correction=True),
            **parts.shared_experts(),
        },
        expert_weights=parts.experts(),
        partial_rotary=0.5,
    )
}
