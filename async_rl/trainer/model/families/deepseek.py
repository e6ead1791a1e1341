"""DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig, Table, refuse_unless
from async_rl.trainer.model.families.rope import attention_gain


def deepseek_v3(config: HFConfig) -> dict[str, Any]:
    """Latent attention; sigmoid routing with a correction bias, limited to groups of experts.

    The norms of the latent vectors use rms_norm_eps, as the engines do; transformers always uses 1e-6.
    """
    parts.refuse_bias(config)
    refuse_unless(config, "rope_interleave", (True, None), "the trainer rotates adjacent channels in this family")
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {
        **parts.attention(config, head_dim=config["v_head_dim"]),
        "num_query_groups": config["num_attention_heads"],
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "softmax_scale": attention_gain(config) / size**0.5,
        **parts.sigmoid_experts(config),
    }


_LATENT_ATTENTION: Table = {
    **parts.NORMS,
    **parts.direct(
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
        theirs=parts.ATTENTION,
    ),
}
FAMILIES = {
    "deepseek_v3": Family(
        megatron=deepseek_v3,
        layer_weights={
            **_LATENT_ATTENTION,
            **parts.DENSE_MLP,
            **parts.router(correction=True),
            **parts.shared_experts(),
        },
        expert_weights=parts.experts(),
    )
}
