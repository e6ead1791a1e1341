"""Gated delta nets of vLLM 0.32 on the CPU in float32; its kernels take bfloat16 only, and heads of 64 or 128 channels.

The state is updated token by token, so that this is for tests and small models. In bfloat16 vLLM's kernels are used.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name  # pyright: ignore[reportPrivateUsage]

_LENGTH_EPSILON = 1e-6
"""Added to the squared length of a query or key, as in transformers."""


def compute_delta_nets_in_float32() -> None:
    """Patch vLLM's operation to compute layers with float32 activations, before the first layer registers it."""
    upstream: Any = importlib.import_module("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    compute = upstream.cpu_gdn_attention_core

    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        if mixed_qkv.dtype != torch.float32:
            compute(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context: Any = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is not None:  # None in a warm-up run
            _compute(layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    upstream.cpu_gdn_attention_core = cpu_gdn_attention_core


def _compute(
    layer: Any, step: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the outputs [tokens, value heads, channels] of a step into `out`, and the new states into the caches.

    Args:
        layer: vLLM's layer.
        step: GDNAttentionMetadata; requests with one token come before those with several.
        mixed_qkv: [tokens, channels] before the convolution.
        b: [tokens, value heads], input of beta.
        a: [tokens, value heads], input of the decay.
        out: is written.

    Raises:
        NotImplementedError: the step has drafted tokens.
    """
    if step.spec_sequence_masks is not None:
        raise NotImplementedError("gated delta nets in float32 on the CPU take no drafted tokens; use bfloat16")
    tokens = step.num_actual_tokens
    slots, bounds = step.non_spec_state_indices_tensor, step.non_spec_query_start_loc
    continues = torch.ones(len(bounds) - 1, dtype=torch.bool)
    if step.num_prefills:
        continues[step.num_decodes :] = step.has_initial_state[step.num_decodes : len(continues)]
    mixed = causal_conv1d_fn_cpu(
        mixed_qkv[:tokens].t(),
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        conv_states=layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(1, 2),
        query_start_loc=bounds,
        cache_indices=slots,
        has_initial_state=continues,
        activation=layer.activation,
    ).t()
    query, key, value = (x.squeeze(0) for x in layer.rearrange_mixed_qkv(mixed))
    of_key = value.shape[1] // key.shape[1]
    query, key = (
        (x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPSILON).rsqrt()).repeat_interleave(of_key, dim=1)
        for x in (query, key)
    )
    query = query * key.shape[-1] ** -0.5
    kept = (-layer.A_log.float().exp() * F.softplus(a[:tokens].float() + layer.dt_bias.float())).exp()
    strength, states = b[:tokens].float().sigmoid(), layer.kv_cache[1]
    for slot, goes_on, (start, end) in zip(slots.tolist(), continues.tolist(), pairwise(bounds.tolist()), strict=False):
        state = states[slot].float() if goes_on else torch.zeros(states.shape[1:])  # [heads, value, key channels]
        for t in range(start, end):
            state = state * kept[t, :, None, None]
            change = (value[t] - (state @ key[t].unsqueeze(-1)).squeeze(-1)) * strength[t].unsqueeze(-1)
            state = state + change.unsqueeze(-1) * key[t].unsqueeze(1)
            out[t] = (state @ query[t].unsqueeze(-1)).squeeze(-1)
        states[slot] = state
