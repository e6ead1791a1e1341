"""OLMoE."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig, refuse_unless


def olmoe(config: HFConfig) -> dict[str, Any]:
    """Softmax routing in every layer, and norms over all query and all key heads."""
    parts.refuse_bias(config)
    refuse_unless(config, "clip_qkv", (None,), "the trainer does not clip queries, keys and values")
    refuse_unless(config, "rms_norm_eps", (1e-5,), "the engines always use 1e-5 in this family")
    refuse_unless(
        config, "norm_topk_prob", (False, None), "the engines never normalise weights of parts.experts in this family"
    )
    number, width = config["num_experts"], config["intermediate_size"]
    routing = parts.softmax_experts(config, number=number, width=width, normed=False)
    return {**parts.attention(config), "qk_layernorm": True, **routing}


FAMILIES = {
    "olmoe": Family(
        megatron=olmoe,
        layer_weights={**parts.GROUPED_QUERIES, **parts.HEAD_NORMS, **parts.router()},
        expert_weights=parts.experts(),
        norms_all_heads=True,
    )
}
