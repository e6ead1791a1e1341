"""Parts that families share: settings from fields of a config, and tables of the weights of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.trainer.model.families.family import HFConfig, Table, UnbuiltFeature, WeightNames, refuse_unless

# ---- settings


def attention(config: HFConfig, *, head_dim: int | None = None, width: int | None = None) -> dict[str, Any]:
    """Sizes of the model, with grouped-query attention.

    Args:
        head_dim: channels of a head, by default those of the config.
        width: columns of a dense MLP, by default those of the config.
    """
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": head_dim or config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": width or config["intermediate_size"],
        "layernorm_epsilon": config["rms_norm_eps"],
    }


def refuse_bias(config: HFConfig) -> None:
    """Refuse attention_bias, in a family without it.

    Raises:
        UnbuiltFeature: the config sets it.
    """
    refuse_unless(config, "attention_bias", (False, None), "the trainer builds attention without a bias on the output")


def softmax_experts(
    config: HFConfig, *, number: int, width: int, normed: bool, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Experts with scores by softmax.

    Args:
        number: experts of a layer.
        width: intermediate columns of an expert.
        normed: whether the weights of the chosen experts are normalised.
        layers: 1 for each layer with experts, 0 for a dense one; None if all have experts.
    """
    if normed and config["num_experts_per_tok"] == 1:
        raise UnbuiltFeature("num_experts_per_tok", 1, "a weight normalised over one expert is 1: no router gradient")
    return {
        "num_moe_experts": number,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": [1] * config["num_hidden_layers"] if layers is None else list(layers),
        # A softmax over the chosen logits equals the renormalised softmax over all logits.
        "moe_router_pre_softmax": not normed,
    }


def sigmoid_experts(config: HFConfig) -> dict[str, Any]:
    """Experts with scores by sigmoid and a correction bias, chosen from groups, after dense layers; shared experts."""
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
    number, width, dense = (config[f] for f in ("n_routed_experts", "moe_intermediate_size", "first_k_dense_replace"))
    layers = [int(i >= dense) for i in range(config["num_hidden_layers"])]
    settings = softmax_experts(config, number=number, width=width, normed=True, layers=layers)
    return {
        **settings,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
        "moe_router_num_groups": groups if limited else None,
        "moe_router_group_topk": chosen if limited else None,
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * width or None,
    }


# ---- weights of a layer

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def direct(weights: Mapping[str, str], *, ours: str = "", theirs: str = LAYER) -> Table:
    """Unchanged weights: name in the local spec -> name in the checkpoint, both without their prefixes."""
    return {f"{ours}{name}": WeightNames("direct", (f"{theirs}{hf}",)) for name, hf in weights.items()}


def gated(ours: str, theirs: str, projections: tuple[str, str, str] = PROJECTIONS) -> Table:
    """A gated MLP with the prefixes `ours` and `theirs`, and the names of gate, up and down projection."""
    gate, up, down = (f"{theirs}{projection}.weight" for projection in projections)
    return {
        f"{ours}linear_fc1.weight": WeightNames("gate_up", (gate, up)),
        f"{ours}linear_fc2.weight": WeightNames("direct", (down,)),
    }


NORMS = direct(
    {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    }
)
"""Norms of a layer."""
GROUPED_QUERIES: Table = {
    **NORMS,
    "self_attention.linear_qkv.weight": WeightNames("qkv", tuple(f"{ATTENTION}{c}_proj.weight" for c in "qkv")),
    **direct({"self_attention.linear_proj.weight": "self_attn.o_proj.weight"}),
}
"""Norms of a layer and grouped-query attention."""
QKV_BIAS: Table = {
    "self_attention.linear_qkv.bias": WeightNames("qkv", tuple(f"{ATTENTION}{c}_proj.bias" for c in "qkv"))
}
"""Biases of queries, keys and values."""
HEAD_NORMS = direct(
    {f"self_attention.{c}_layernorm.weight": f"self_attn.{c}_norm.weight" for c in "qk"},
)
"""Norms of queries and keys."""
DENSE_MLP = gated("mlp.", LAYER + "mlp.")
"""MLP of a layer without experts."""


def router(block: str = "mlp", *, correction: bool = False) -> Table:
    """Router of a layer; `correction`: with a correction bias."""
    bias = {"mlp.router.expert_bias": "e_score_correction_bias"} if correction else {}
    return direct({"mlp.router.weight": "weight", **bias}, theirs=f"{LAYER}{block}.gate.")


def shared_experts(name: str = "shared_experts") -> Table:
    """Shared experts, which process every token."""
    return gated("mlp.shared_experts.", f"{LAYER}mlp.{name}.")


def experts(block: str = "mlp", *, projections: tuple[str, str, str] = PROJECTIONS) -> Table:
    """Weights of one expert in the MoE block `block`, with the names of gate, up and down projection."""
    return gated("", LAYER + block + ".experts.{expert}.", projections)
