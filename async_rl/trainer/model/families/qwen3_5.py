"""Qwen3.5 and Qwen3.6, the text part: the layers of Qwen3-Next with separate input projections, dense or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import HFConfig, WeightNames, refuse_unless
from async_rl.trainer.model.families.qwen import GATED_EXPERTS
from async_rl.trainer.model.families.qwen3_next import DELTA_NET, HYBRID, hybrid
from async_rl.trainer.model.families.qwen3_next import FAMILIES as QWEN3_NEXT


def qwen3_5(config: HFConfig, *, width: int | None = None) -> dict[str, Any]:
    """Dense model; `width`: columns of its MLP, by default those of the config."""
    refuse_unless(config, "layer_scale", (False, None), "the trainer builds layers without it")
    return {**parts.attention(config, width=width), **hybrid(config)}


def qwen3_5_moe(config: HFConfig) -> dict[str, Any]:
    """Experts in all layers, with normalised weights, and a shared expert with a sigmoid gate."""
    for field, allowed in (("mlp_only_layers", ([], None)), ("decoder_sparse_step", (1,)), ("norm_topk_prob", (True,))):
        refuse_unless(config, field, allowed, "transformers ignores it in this family, but engines read it")
    shared = config["shared_expert_intermediate_size"]
    experts = parts.softmax_experts(
        config, number=config["num_experts"], width=config["moe_intermediate_size"], normed=True
    )
    return {
        **qwen3_5(config, width=shared),  # a layer has no other MLP
        **experts,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": True,
    }


_LAYERS = {
    **HYBRID,
    "self_attention.in_proj_qkvz.weight": WeightNames(
        "delta_qkvz", (f"{DELTA_NET}in_proj_qkv.weight", f"{DELTA_NET}in_proj_z.weight")
    ),
    "self_attention.in_proj_ba.weight": WeightNames(
        "delta_ba", (f"{DELTA_NET}in_proj_b.weight", f"{DELTA_NET}in_proj_a.weight")
    ),
}
_MOE = replace(
    QWEN3_NEXT["qwen3_next"],
    megatron=qwen3_5_moe,
    layer_weights={**_LAYERS, **GATED_EXPERTS},
    takes_vision=True,
)
FAMILIES = {
    "qwen3_5_text": replace(_MOE, megatron=qwen3_5, layer_weights={**_LAYERS, **parts.DENSE_MLP}, expert_weights={}),
    "qwen3_5_moe_text": _MOE,
}
