"""Qwen2 and Qwen3, dense and with experts."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig


def qwen2(config: HFConfig) -> dict[str, Any]:
    """Dense model with bias on query, key and value."""
    return {**parts.attention(config), "add_qkv_bias": True}


def qwen3(config: HFConfig) -> dict[str, Any]:
    """Dense model with norms on query and key heads."""
    parts.refuse_bias(config)
    return {**parts.attention(config), "qk_layernorm": True}


def qwen2_moe(config: HFConfig) -> dict[str, Any]:
    """Softmax routing, and a shared expert with a sigmoid gate."""
    return {
        **parts.attention(config),
        "add_qkv_bias": bool(config.get("qkv_bias", True)),
        **_experts(config),
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def qwen3_moe(config: HFConfig) -> dict[str, Any]:
    """Softmax routing; some layers may be dense."""
    return {**qwen3(config), **_experts(config)}


def _experts(config: HFConfig) -> dict[str, Any]:
    """4 layers with decoder_sparse_step=2 and mlp_only_layers=[3]: layer 1 has experts."""
    step: int = config.get("decoder_sparse_step", 1)
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    return parts.softmax_experts(
        config,
        number=config.get("num_experts") or config["num_local_experts"],
        width=config["moe_intermediate_size"],
        normed=bool(config.get("norm_topk_prob", False)),
        layers=[int((i + 1) % step == 0 and i not in dense) for i in range(config["num_hidden_layers"])],
    )


GATED_EXPERTS = {
    **parts.router(),
    **parts.shared_experts("shared_expert"),
    **parts.direct({"mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight"}),
}
"""Router, and a shared expert with a gate."""
_DENSE = {**parts.GROUPED_QUERIES, **parts.DENSE_MLP}
FAMILIES = {
    "qwen2": Family(megatron=qwen2, layer_weights={**_DENSE, **parts.QKV_BIAS}),
    "qwen3": Family(megatron=qwen3, layer_weights={**_DENSE, **parts.HEAD_NORMS}),
    "qwen2_moe": Family(
        megatron=qwen2_moe,
        layer_weights={**_DENSE, **parts.QKV_BIAS, **GATED_EXPERTS},
        expert_weights=parts.experts(),
    ),
    "qwen3_moe": Family(
        megatron=qwen3_moe,
        layer_weights={**_DENSE, **parts.HEAD_NORMS, **parts.router()},
        expert_weights=parts.experts(),
    ),
}
