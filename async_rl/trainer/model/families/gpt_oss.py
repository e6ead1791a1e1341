"""gpt-oss."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig, WeightNames, refuse_unless


def gpt_oss(config: HFConfig) -> dict[str, Any]:
    """Attention sinks, every second layer with a sliding window, biases everywhere, and clamped experts.

    An expert computes (up + 1) * gate * sigmoid(1.702 gate), with gate and up clamped at 7.
    """
    refuse_unless(config, "attention_bias", (True,), "the trainer builds this family with biases")
    refuse_unless(config, "swiglu_alpha", (1.702,), "trainer and engines build experts with 1.702")
    refuse_unless(config, "swiglu_limit", (7.0,), "the engines always clamp at 7 in this family")
    number, width = config["num_local_experts"], config["intermediate_size"]
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(config["num_hidden_layers"])]
    refuse_unless(config, "layer_types", (kinds, None), "the engines build windows in every second layer from layer 0")
    if "rope_theta" not in (config.get("rope_parameters") or {}):
        config["rope_theta"]  # KeyError: it has no default in this family
    return {
        **parts.attention(config),
        **parts.softmax_experts(config, number=number, width=width, normed=True),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (config["sliding_window"] - 1, 0),  # earlier and later tokens that a token attends to
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    }


FAMILIES = {
    "gpt_oss": Family(
        megatron=gpt_oss,
        layer_weights={
            **parts.GROUPED_QUERIES,
            **parts.QKV_BIAS,
            **parts.direct(
                {
                    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
                    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
                    "mlp.router.weight": "mlp.router.weight",
                    "mlp.router.bias": "mlp.router.bias",
                }
            ),
        },
        expert_weights={
            "linear_fc1.weight": WeightNames("stacked_gate_up", (parts.LAYER + "mlp.experts.gate_up_proj",)),
            "linear_fc1.bias": WeightNames("stacked_gate_up", (parts.LAYER + "mlp.experts.gate_up_proj_bias",)),
            "linear_fc2.weight": WeightNames("stacked", (parts.LAYER + "mlp.experts.down_proj",)),
            "linear_fc2.bias": WeightNames("stacked", (parts.LAYER + "mlp.experts.down_proj_bias",)),
        },
        layer_types=("full_attention", "sliding_attention"),
        local_only=True,
    )
}
