"""Reads Hugging Face configs: keyword arguments of megatron's TransformerConfig, and the rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_rl.weights.model_info import quantization_problem

if TYPE_CHECKING:
    from torch import Tensor

HFConfig = dict[str, Any]


class UnbuiltFeature(ValueError):
    """The trainer does not support a value in a model config. The caller adds the name of the file."""

    def __init__(self, field: str, value: Any, why: str) -> None:
        super().__init__(f"sets {field}={value!r}: {why}")


def refuse_unless(config: HFConfig, field: str, allowed: tuple[Any, ...], why: str) -> None:
    """Refuse a value of `field` that is not in `allowed`; the field may be missing.

    Raises:
        UnbuiltFeature: the message has field, value and `why`.
    """
    if field in config and config[field] not in allowed:
        raise UnbuiltFeature(field, config[field], why)


def refuse_common(config: HFConfig) -> None:
    """Refuse features that the trainer supports in no family.

    Raises:
        UnbuiltFeature: the config has such a feature.
    """
    if problem := quantization_problem(config):
        raise UnbuiltFeature(*problem)
    refuse_unless(config, "hidden_act", ("silu",), "the trainer builds gated SiLU layers")
    refuse_unless(config, "mlp_bias", (False, None), "the trainer builds MLPs without bias")
    if config.get("use_sliding_window"):
        raise UnbuiltFeature("use_sliding_window", True, "the trainer attends to the whole sequence")
    built = {"full_attention", *(("sliding_attention",) if config.get("model_type") == "gpt_oss" else ())}
    if other := sorted(set(config.get("layer_types") or ()) - built):
        raise UnbuiltFeature("layer_types", other, "the trainer attends to the whole sequence in every layer")


# ---- settings of each family

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


def _experts(config: HFConfig, *, number: int, layers: Sequence[int], normed: bool) -> dict[str, Any]:
    if normed and config["num_experts_per_tok"] == 1:
        raise UnbuiltFeature("num_experts_per_tok", 1, "a weight normalised over one expert is 1: no router gradient")
    return {
        "num_moe_experts": number,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": list(layers),
    }


def _softmax_experts(config: HFConfig, *, layers: Sequence[int]) -> dict[str, Any]:
    normed = bool(config.get("norm_topk_prob", False))
    number = config.get("num_experts") or config["num_local_experts"]
    return {
        **_experts(config, number=number, layers=layers, normed=normed),
        # norm_topk_prob: a softmax over the chosen logits equals the renormalised softmax over all logits.
        "moe_router_pre_softmax": not normed,
    }


def _sigmoid_experts(config: HFConfig) -> dict[str, Any]:
    refuse_unless(config, "scoring_func", ("sigmoid",), "the trainer scores experts by sigmoid in this family")
    refuse_unless(config, "topk_method", ("noaux_tc",), "the trainer chooses by score and bias in this family")
    refuse_unless(config, "moe_layer_freq", (1,), "every layer after first_k_dense_replace has experts")
    top_k, groups, chosen = config["num_experts_per_tok"], config.get("n_group") or 1, config.get("topk_group") or 1
    refuse_unless(config, "norm_topk_prob", (True,), "the trainer normalises the weights of experts scored by sigmoid")
    limited = groups > 1 and chosen < groups
    if limited and top_k // chosen != 2:
        raise UnbuiltFeature(
            "topk_group",
            chosen,
            f"megatron ranks a group by its best num_experts_per_tok // topk_group = {top_k // chosen} experts, "
            "the checkpoint was trained with 2",
        )
    dense = config["first_k_dense_replace"]
    layers = [int(i >= dense) for i in range(config["num_hidden_layers"])]
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    return {
        **_experts(config, number=config["n_routed_experts"], layers=layers, normed=True),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        "moe_shared_expert_intermediate_size": shared or None,
    }


# ---- rotary embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071), or the scaling of Llama 3.1: slow channels are interpolated, fast ones are unchanged.

    Channels with `slow` to `fast` rotations over `original_length` positions are mixed linearly.
    """

    factor: float
    """Interpolation of slow channels."""
    original_length: int
    """Context length of pre-training, in positions."""
    fast: float
    """Channels with more rotations are unchanged."""
    slow: float
    """Channels with fewer rotations are interpolated."""
    by_rotations: bool
    """Whether the mix is linear in the number of rotations (Llama 3.1), not in the number of the channel (YaRN)."""
    truncate: bool = True
    """Whether the range of mixed channels is rounded outwards to integers (YaRN)."""
    amplitude: float = 1.0
    """Factor of cosine and sine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of a head."""

    dim: int
    """Number of rotated channels, the first of the head."""
    base: float
    """Theta."""
    scaling: RopeScaling | None = None
    """None without scaling."""

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def frequencies(self) -> Tensor:
        """Radians per position of each pair of channels, float32 [dim / 2].

        dim=4 and base=10000: (1, 0.01).
        """
        import torch  # a configuration does without it

        powers = self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if (scaling := self.scaling) is None:
            return 1.0 / powers
        if scaling.by_rotations:
            turns = scaling.original_length / (2 * math.pi * powers)
            kept = ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
        else:
            first, last = (self._channel(turns, scaling) for turns in (scaling.fast, scaling.slow))
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.dim - 1)
            width = last - first or 0.001  # avoids a division by 0; a step in place of a ramp
            kept = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        return (1 - kept) / (scaling.factor * powers) + kept / powers

    def _channel(self, turns: float, scaling: RopeScaling) -> float:
        """The channel pair (fractional) with `turns` rotations over the original length."""
        return self.dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def read_rope(config: HFConfig, *, head_dim: int, partial_rotary: float | None = None) -> Rope:
    """Read the rotary embedding of a Hugging Face config.

    Args:
        config: the config.
        head_dim: channels of a head.
        partial_rotary: default share of rotated channels; None if the family always rotates whole heads.

    Raises:
        UnbuiltFeature: the family does not have this kind, or the share is not supported.
    """
    kind, fields = _kind_and_fields(config)
    share = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", partial_rotary or 1.0))
    if partial_rotary is None and share != 1.0:
        raise UnbuiltFeature("partial_rotary_factor", share, "the trainer rotates whole heads in this family")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise UnbuiltFeature(
            "partial_rotary_factor", share, f"it rotates {dim} of {head_dim} channels; need an even number"
        )
    base = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    match kind:
        case "default":
            return Rope(dim=dim, base=base)
        case "yarn":
            return Rope(dim=dim, base=base, scaling=_yarn(fields, config))
        case "llama3" if config.get("model_type") == "llama":
            return Rope(dim=dim, base=base, scaling=_llama3(fields, config))
        case _:
            raise UnbuiltFeature("rope_type", kind, "the trainer builds plain and yarn, and llama3 in Llama only")


def attention_gain(config: HFConfig) -> float:
    """Additional factor of the attention scores in DeepSeek models with YaRN; 1 without YaRN."""
    kind, fields = _kind_and_fields(config)
    whole = fields.get("mscale_all_dim")
    return _mscale(_yarn(fields, config).factor, whole) ** 2 if kind == "yarn" and whole else 1.0


def _kind_and_fields(config: HFConfig) -> tuple[str, dict[str, Any]]:
    """(rope type, fields) from `rope_parameters` of transformers 5 or `rope_scaling` of older configs."""
    fields: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return fields.get("rope_type") or fields.get("type") or "default", fields


def _yarn(fields: dict[str, Any], config: HFConfig) -> RopeScaling:
    original = (
        fields.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    factor = float(fields.get("factor") or config["max_position_embeddings"] / original)
    amplitude = fields.get("attention_factor")
    if amplitude is None:
        part, whole = fields.get("mscale"), fields.get("mscale_all_dim")
        amplitude = _mscale(factor, part) / _mscale(factor, whole) if part and whole else _mscale(factor, 1.0)
    return RopeScaling(
        factor=factor,
        original_length=int(original),
        fast=float(fields.get("beta_fast") or 32),
        slow=float(fields.get("beta_slow") or 1),
        by_rotations=False,
        truncate=bool(fields.get("truncate", True)),
        amplitude=float(amplitude),
    )


def _llama3(fields: dict[str, Any], config: HFConfig) -> RopeScaling:
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    if high <= low:
        raise UnbuiltFeature("high_freq_factor", high, f"it must be more than low_freq_factor={low}")
    return RopeScaling(
        factor=float(fields["factor"]),
        original_length=int(fields.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        slow=low,
        fast=high,
        by_rotations=True,
    )


def _mscale(factor: float, scale: float) -> float:
    """1 + 0.1 scale ln(factor), section 3.4 of the YaRN paper."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
