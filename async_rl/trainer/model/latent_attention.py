"""Latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values from a small latent vector per token.

Megatron's implementation splits the down projections over tensor-parallel ranks and then misses a part of the gradient
of the rotary key. Here every rank has the complete down projections and applies them to its own rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from async_rl.trainer.model.attention import RowContext, recomputed, rotate


class WholeLinear(torch.nn.Linear):
    """A linear layer that is replicated on tensor-parallel ranks; each applies it to its own rows."""

    def __init__(self, inputs: int, outputs: int, *, config: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: Tensor) -> Tensor:
        """See torch.nn.Linear."""
        return self._forward_impl(input=input, weight=self.weight)

    def _forward_impl(self, *, input: Tensor, weight: Tensor) -> Tensor:
        """The product, as in megatron's linear layers, whose weight LoRA replaces here."""
        return torch.nn.functional.linear(input, weight)


class LatentAttention(Attention):
    """Replaces megatron's MLASelfAttention, with the same parameter names.

    In the config, `kv_channels` is the size of a value head and `softmax_scale` the factor of the attention scores.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, pg_collection)
        self.sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        self.latent_sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        queries, heads = sum(self.sizes), config.num_attention_heads
        if config.q_lora_rank is None:
            self.linear_q_proj = self._heads(submodules.linear_q_proj, config.hidden_size, heads * queries)
        else:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config=config)
            self.q_layernorm = submodules.q_layernorm(config, config.q_lora_rank, eps=config.layernorm_epsilon)
            self.linear_q_up_proj = self._heads(submodules.linear_q_up_proj, config.q_lora_rank, heads * queries)
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, sum(self.latent_sizes), config=config)
        self.kv_layernorm = submodules.kv_layernorm(config, config.kv_lora_rank, eps=config.layernorm_epsilon)
        self.linear_kv_up_proj = self._heads(
            submodules.linear_kv_up_proj, config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim)
        )

    def _heads(self, linear: Any, inputs: int, outputs: int) -> Any:
        """A projection to heads that are split over tensor-parallel ranks; it gathers the rows of all ranks."""
        return linear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: RowContext | None = None,
        **_unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, None as bias) from `hidden_states`; both tensors are [t / tensor, 1, hidden].

        Raises:
            ValueError: `packed_seq_params` is missing.
        """
        if packed_seq_params is None:
            raise ValueError("LatentAttention needs packed_seq_params: a RowContext")
        query, key, value = self.get_query_key_value_tensors(hidden_states, packed_seq_params)
        attend = partial(cast(Any, self.core_attention), packed_seq_params=packed_seq_params)
        return self.linear_proj(recomputed(self, attend, query, key, value))

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, context: RowContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [t, 1, heads of this rank, head size] with the rotary embedding applied."""
        config = cast(Any, self.config)
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        latent, turned_key = self.linear_kv_down_proj(hidden_states).split(self.latent_sizes, dim=-1)
        if config.sequence_parallel:
            # Each rank's heads use the rotary key of all rows; backward sums the gradients of the ranks.
            turned_key = gather_from_sequence_parallel_region(turned_key.contiguous(), group=self.tp_group)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))

        heads = self.num_attention_heads_per_partition
        query, turned_query = query.view(-1, heads, sum(self.sizes)).split(self.sizes, dim=-1)
        key, value = key_value.view(len(query), heads, -1).split([config.qk_head_dim, config.v_head_dim], dim=-1)
        turned_query, turned_key = (rotate(_halves(x), context.rotary) for x in (turned_query, turned_key))
        query = torch.cat((query, turned_query), dim=-1)
        key = torch.cat((key, turned_key.expand(-1, heads, -1)), dim=-1)
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)


def _halves(x: Tensor) -> Tensor:
    """Even channels before odd channels: (0, 1, 2, 3) -> (0, 2, 1, 3).

    Checkpoints rotate channel 2i with 2i + 1; `rotate` rotates channel i with i + dim / 2.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
