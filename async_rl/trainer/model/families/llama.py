"""Llama."""

from __future__ import annotations

from typing import Any

from async_rl.trainer.model.families import parts
from async_rl.trainer.model.families.family import Family, HFConfig


def llama(config: HFConfig) -> dict[str, Any]:
    """Dense model without bias."""
    parts.refuse_bias(config)
    return parts.attention(config)


FAMILIES = {
    "llama": Family(
        megatron=llama,
        layer_weights={**parts.GROUPED_QUERIES, **parts.DENSE_MLP},
        rope_types=("default", "yarn", "llama3"),
    )
}
