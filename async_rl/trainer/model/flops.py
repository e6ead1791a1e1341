"""Floating-point operations of a train step, and the peak rate of a GPU. This module must not import megatron.

A multiply-add is 2 operations. Counted are the products with the weights of attention, MLPs, routers, experts and
output layer, attention itself, and the three products with the state of a gated delta net: once in the forward pass,
and twice in the backward pass for the gradients of both factors. A frozen weight has no gradient; LoRA takes that of
each weight that it adapts. A token has K experts, also where `replay_threshold` leaves out recorded ones, because the
live router fills their places.

Not counted are the embedding, norms, convolutions and other steps per element, the products that chunks of a gated
delta net need in addition to its recurrence, the merging of adapters (a share of rank / tokens), padding,
recomputation, and passes without gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_rl.trainer.model.families import ModelShape
from async_rl.trainer.model.layout import module_name
from async_rl.trainer.model.model import LoraConfig

_PEAKS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Start of a device name without "NVIDIA" -> operations per second in dense bfloat16, by NVIDIA's data sheets. Where
they give the rate with sparsity only, it is half of that."""


def peak_of(device: str) -> float | None:
    """Operations per second in dense bfloat16 of a GPU; None if they are not known, or for a part of a GPU (MIG).

    Args:
        device: name by `torch.cuda.get_device_name`, such as `NVIDIA H100 80GB HBM3`.
    """
    name = device.removeprefix("NVIDIA ")
    return None if "MIG" in name else next((rate for start, rate in _PEAKS.items() if name.startswith(start)), None)


def train_operations(shape: ModelShape, runs: NDArray[np.int64], *, num_loss_tokens: int, lora: LoraConfig) -> int:
    """Operations of forward and backward pass, over all ranks.

    Args:
        shape: properties of the model.
        runs: int64 [runs, 2], (first position, tokens) of the runs that are computed; see `UpdatePlan.runs`.
        num_loss_tokens: tokens in the loss; only these have logits.
        lora: settings of the adapters.
    """
    model, tokens, longest = shape.megatron, int(runs[:, 1].sum()), shape.context_length
    count = model["num_layers"]
    window = model["window_size"][0] + 1 if model.get("window_size") else longest
    windowed = model.get("window_attn_skip_freq") or [1] * count
    total = (2 if lora.rank else 3) * model["hidden_size"] * shape.vocab_size * num_loss_tokens
    for has_window, (is_linear, products) in zip(windowed, _layers(model), strict=True):
        total += sum((3 if _is_trained(name, shape, lora) else 2) * tokens * size for name, size in products.items())
        if is_linear:
            total += 3 * _state(model) * tokens
        else:
            total += 3 * _pair(model) * attended_pairs(runs, window=window if has_window else longest)
    return 2 * total


def pair_cost(shape: ModelShape) -> float:
    """Operations of a token and a token that it attends to, over those of a token with the weights of the layers.

    Layers with a window count as if they had none. 0.001 says that 1,000 attended tokens cost as much as a token.
    """
    model = shape.megatron
    layers = _layers(model)
    of_token = sum(sum(products.values()) + is_linear * _state(model) for is_linear, products in layers)
    return sum(not is_linear for is_linear, _ in layers) * _pair(model) / of_token


def attended_pairs(runs: NDArray[np.int64], *, window: int) -> int:
    """Pairs of a token and a token that it attends to, itself included.

    The run (0, 5) with a window of 3 has 1 + 2 + 3 + 3 + 3 = 12 pairs, the run (1, 2) has 2 + 3.
    """

    def of_first(tokens: NDArray[np.int64]) -> int:
        reach = np.minimum(tokens, window)
        return int((reach * (2 * tokens - reach + 1) // 2).sum())

    return of_first(runs.sum(1)) - of_first(runs[:, 0])


def _layers(model: Mapping[str, Any]) -> list[tuple[bool, dict[str, int]]]:
    """(whether it is a gated delta net, multiply-adds of a token with each weight) of each layer."""
    none = [0] * model["num_layers"]
    kinds, routed = model.get("linear_attention_freq") or none, model.get("moe_layer_freq") or none
    return [
        (bool(is_linear), (_delta_net(model) if is_linear else _attention(model)) | _mlp(model, experts=bool(experts)))
        for is_linear, experts in zip(kinds, routed, strict=True)
    ]


def _delta_net(model: Mapping[str, Any]) -> dict[str, int]:
    """As `_attention`, of a gated delta net."""
    hidden, heads = model["hidden_size"], model["linear_num_value_heads"]
    values, keys = heads * model["linear_value_head_dim"], model["linear_num_key_heads"] * model["linear_key_head_dim"]
    sizes = {"in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads, "out_proj": values}
    return {f"self_attention.{name}": hidden * size for name, size in sizes.items()}


def _state(model: Mapping[str, Any]) -> int:
    """Multiply-adds of a token with the states of all heads: of its key, its update and its query.

    0 for a model without gated delta nets.
    """
    if not model.get("linear_attention_freq"):
        return 0
    return 3 * model["linear_num_value_heads"] * model["linear_key_head_dim"] * model["linear_value_head_dim"]


def _pair(model: Mapping[str, Any]) -> int:
    """Multiply-adds of all heads for the score of a pair and its part of the output."""
    latent = model.get("multi_latent_attention")
    keys = model["qk_head_dim"] + model["qk_pos_emb_head_dim"] if latent else model["kv_channels"]
    return model["num_attention_heads"] * (keys + model["kv_channels"])


def _attention(model: Mapping[str, Any]) -> dict[str, int]:
    """Multiply-adds of a token with each weight, by its name in megatron's local spec, as in `_mlp`."""
    hidden, heads, values = model["hidden_size"], model["num_attention_heads"], model["kv_channels"]
    sizes = {"linear_proj": heads * values * hidden}
    if model.get("multi_latent_attention"):
        keys, turned, latent, rank = (
            model[name] for name in ("qk_head_dim", "qk_pos_emb_head_dim", "kv_lora_rank", "q_lora_rank")
        )
        queries = heads * (keys + turned)
        sizes |= {"linear_q_down_proj": hidden * rank, "linear_q_up_proj": rank * queries} if rank else {}
        sizes |= {} if rank else {"linear_q_proj": hidden * queries}
        sizes["linear_kv_down_proj"] = hidden * (latent + turned)
        sizes["linear_kv_up_proj"] = latent * heads * (keys + values)
    else:
        queries = heads * (2 if model.get("attention_output_gate") else 1)
        sizes["linear_qkv"] = hidden * values * (queries + 2 * model["num_query_groups"])
    return {f"self_attention.{name}": size for name, size in sizes.items()}


def _mlp(model: Mapping[str, Any], *, experts: bool) -> dict[str, int]:
    hidden, shared = model["hidden_size"], model.get("moe_shared_expert_intermediate_size")
    if not experts:
        return _gated("mlp", hidden * model["ffn_hidden_size"])
    return {
        "mlp.router": hidden * model["num_moe_experts"],
        **_gated("mlp.experts", model["moe_router_topk"] * hidden * model["moe_ffn_hidden_size"]),
        **(_gated("mlp.shared_experts", hidden * shared) if shared else {}),
        "mlp.shared_experts.gate_weight": hidden * bool(model.get("moe_shared_expert_gate")),
    }


def _gated(name: str, size: int) -> dict[str, int]:
    """Gate and up projection, and down projection, of `size` each."""
    return {f"{name}.linear_fc1": 2 * size, f"{name}.linear_fc2": size}


def _is_trained(name: str, shape: ModelShape, lora: LoraConfig) -> bool:
    """Whether a weight needs a gradient: without LoRA each, else those with an adapter on one of their projections."""
    if not lora.rank or ".linear_" not in name:
        return not lora.rank
    of_expert, weight = name.removeprefix("mlp.experts."), f"{name}.weight"
    family = shape.family
    found = family.layer_weights[weight] if of_expert == name else family.expert_weights[f"{of_expert}.weight"]
    return not lora.target_modules or any(module_name(each) in lora.target_modules for each in found.names)
