"""Converts Hugging Face configs to keyword arguments of megatron's TransformerConfig."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_rl.trainer.model.families.checks import UnbuiltFeature, refuse_unless
from async_rl.trainer.model.families.rope import attention_gain

HFConfig = dict[str, Any]

_NO_OUTPUT_BIAS = "the trainer builds attention without a bias on the output"


def qwen2(config: HFConfig) -> dict[str, Any]:
    """Dense model with bias on query, key and value."""
    return {**_attention(config), "add_qkv_bias": True}


def llama(config: HFConfig) -> dict[str, Any]:
    """Dense model without bias."""
    refuse_unless(config, "attention_bias", (False, None), _NO_OUTPUT_BIAS)
    return _attention(config)


def qwen3(config: HFConfig) -> dict[str, Any]:
    """Dense model with norms on query and key heads."""
    refuse_unless(config, "attention_bias", (False, None), _NO_OUTPUT_BIAS)
    return {**_attention(config), "qk_layernorm": True}


def qwen3_moe(config: HFConfig) -> dict[str, Any]:
    """Softmax routing; some layers may be dense."""
    return {**qwen3(config), **_softmax_experts(config, layers=_sparse_step(config))}


def qwen2_moe(config: HFConfig) -> dict[str, Any]:
    """Softmax routing, and a shared expert with a sigmoid gate."""
    return {
        **_attention(config),
        "add_qkv_bias": bool(config.get("qkv_bias", True)),
        **_softmax_experts(config, layers=_sparse_step(config)),
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


def mixtral(config: HFConfig) -> dict[str, Any]:
    """Softmax over the chosen experts; every layer has experts."""
    if config.get("sliding_window"):
        raise UnbuiltFeature("sliding_window", config["sliding_window"], "the trainer attends to the whole sequence")
    every = [1] * config["num_hidden_layers"]
    normed = {**config, "norm_topk_prob": True, "moe_intermediate_size": config["intermediate_size"]}
    return {**_attention(config), **_softmax_experts(normed, layers=every)}


def olmoe(config: HFConfig) -> dict[str, Any]:
    """Softmax routing in every layer, and norms over all query and all key heads (Family.norms_all_heads)."""
    refuse_unless(config, "attention_bias", (False, None), _NO_OUTPUT_BIAS)
    refuse_unless(config, "clip_qkv", (None,), "the trainer does not clip queries, keys and values")
    refuse_unless(config, "rms_norm_eps", (1e-5,), "the engines always use 1e-5 in this family")
    refuse_unless(
        config, "norm_topk_prob", (False, None), "the engines never normalise weights of experts in this family"
    )
    sized = {**config, "moe_intermediate_size": config["intermediate_size"]}
    every = [1] * config["num_hidden_layers"]
    return {**_attention(config), "qk_layernorm": True, **_softmax_experts(sized, layers=every)}


def glm4_moe(config: HFConfig) -> dict[str, Any]:
    """Sigmoid routing with a correction bias, partial rotary embedding, optional bias and head norms."""
    return {
        **_attention(config),
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        **_sigmoid_experts(config),
    }


def deepseek_v3(config: HFConfig) -> dict[str, Any]:
    """Latent attention; sigmoid routing with a correction bias, limited to groups of experts.

    The norms of the latent vectors use rms_norm_eps, as the engines do; transformers always uses 1e-6.
    """
    refuse_unless(config, "attention_bias", (False, None), _NO_OUTPUT_BIAS)
    refuse_unless(config, "rope_interleave", (True, None), "the trainer rotates adjacent channels in this family")
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    heads = config["num_attention_heads"]
    return {
        **_attention({**config, "head_dim": config["v_head_dim"], "num_key_value_heads": heads}),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "softmax_scale": attention_gain(config) / size**0.5,
        **_sigmoid_experts(config),
    }


def gpt_oss(config: HFConfig) -> dict[str, Any]:
    """Attention sinks, every second layer with a sliding window, biases everywhere, and clamped experts.

    An expert computes (up + 1) * gate * sigmoid(1.702 gate), with gate and up clamped at 7.
    """
    refuse_unless(config, "attention_bias", (True,), "the trainer builds this family with biases")
    refuse_unless(config, "swiglu_alpha", (1.702,), "trainer and engines build experts with 1.702")
    refuse_unless(config, "swiglu_limit", (7.0,), "the engines always clamp at 7 in this family")
    number = config["num_hidden_layers"]
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(number)]
    refuse_unless(config, "layer_types", (kinds, None), "the engines build windows in every second layer from layer 0")
    if "rope_theta" not in {**config, **(config.get("rope_parameters") or {})}:
        raise KeyError("rope_theta")
    sized = {**config, "norm_topk_prob": True, "moe_intermediate_size": config["intermediate_size"]}
    return {
        **_attention(config),
        **_softmax_experts(sized, layers=[1] * number),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (config["sliding_window"] - 1, 0),  # earlier and later tokens that a token attends to
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    }


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
    }


def _sparse_step(config: HFConfig) -> list[int]:
    """1 for layers with experts, 0 for dense layers, from Qwen's fields.

    4 layers with decoder_sparse_step=2 and mlp_only_layers=[3]: (0, 1, 0, 0).
    """
    step: int = config.get("decoder_sparse_step", 1)
    dense: set[int] = set(config.get("mlp_only_layers") or ())
    return [int((i + 1) % step == 0 and i not in dense) for i in range(config["num_hidden_layers"])]


def _experts(config: HFConfig, *, number: int, layers: Sequence[int]) -> dict[str, Any]:
    return {
        "num_moe_experts": number,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": list(layers),
    }


def _softmax_experts(config: HFConfig, *, layers: Sequence[int]) -> dict[str, Any]:
    normed = bool(config.get("norm_topk_prob", False))
    if normed and config["num_experts_per_tok"] == 1:
        raise UnbuiltFeature("num_experts_per_tok", 1, "a weight normalised over one expert is 1: no router gradient")
    return {
        **_experts(config, number=config.get("num_experts") or config["num_local_experts"], layers=layers),
        # norm_topk_prob: a softmax over the chosen logits equals the renormalised softmax over all logits.
        "moe_router_pre_softmax": not normed,
    }


def _sigmoid_experts(config: HFConfig) -> dict[str, Any]:
    refuse_unless(config, "scoring_func", ("sigmoid",), "the trainer scores experts by sigmoid in this family")
    refuse_unless(config, "topk_method", ("noaux_tc",), "the trainer chooses by score and bias in this family")
    refuse_unless(config, "moe_layer_freq", (1,), "every layer after first_k_dense_replace has experts")
    top_k, groups, chosen = config["num_experts_per_tok"], config.get("n_group") or 1, config.get("topk_group") or 1
    refuse_unless(config, "norm_topk_prob", (True,), "the trainer normalises the weights of experts scored by sigmoid")
    if top_k == 1:
        raise UnbuiltFeature("num_experts_per_tok", 1, "a weight normalised over one expert is 1: no router gradient")
    limited = groups > 1 and chosen < groups
    if limited and top_k // chosen != 2:
        raise UnbuiltFeature(
            "topk_group",
            chosen,
            f"megatron ranks a group by its best num_experts_per_tok // topk_group = {top_k // chosen} experts, "
            "the checkpoint was trained with 2",
        )
    dense = config["first_k_dense_replace"]
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    return {
        **_experts(
            config,
            number=config["n_routed_experts"],
            layers=[int(i >= dense) for i in range(config["num_hidden_layers"])],
        ),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        "moe_shared_expert_intermediate_size": shared or None,
    }
