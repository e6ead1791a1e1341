"""GLM-4.7-Flash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from async_rl.trainer.model.families import deepseek
from async_rl.trainer.model.families.family import HFConfig, refuse_unless


def glm4_moe_lite(config: HFConfig) -> dict[str, Any]:
    """The layers of DeepSeek-V3; transformers counts dense ones by mlp_layer_types."""
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    refuse_unless(config, "mlp_layer_types", (kinds, None), f"vLLM reads first_k_dense_replace={dense}")
    return deepseek.deepseek_v3(config)


FAMILIES = {"glm4_moe_lite": replace(deepseek.FAMILIES["deepseek_v3"], megatron=glm4_moe_lite)}
