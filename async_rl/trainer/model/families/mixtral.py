"""Mixtral."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig, refuse_unless


def mixtral(config: HFConfig) -> dict[str, Any]:
    """Softmax over the chosen experts; every layer has experts."""
    refuse_unless(config, "sliding_window", (None, 0), "the trainer attends to the whole sequence")
    number, width = config["num_local_experts"], config["intermediate_size"]
    return {**parts.attention(config), **parts.softmax_experts(config, number=number, width=width, normed=True)}


FAMILIES = {
    "mixtral": Family(
        megatron=mixtral,
        layer_weights={**parts.GROUPED_QUERIES, **parts.router("block_sparse_moe")},
        expert_weights=parts.experts("block_sparse_moe", projections=("w1", "w3", "w2")),
    )
}
