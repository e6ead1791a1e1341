"""Gated delta net (arXiv 2412.06464) over packed rows, and the attention with an output gate next to it in Qwen3-Next.

Each value head has a state S [key channels, value channels]. For each token, with a key k of length 1:

    S = exp(g) S;  S = S + k (beta (v - k S));  output = q S

Megatron's layer takes neither packed rows nor context ranks. Here a chunk of rows is computed at once, as in the paper,
and begins with the state of the chunk that it continues (see `batch/chains.py`). The state and all sums are at least
float32.

All weights of a head stand together, key head by key head with its value heads, so that ranks split them evenly.
Context ranks exchange rows for heads: each computes all rows of a share of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from async_rl.trainer.batch.chains import Chains
from async_rl.trainer.batch.micro_batch import Slots
from async_rl.trainer.distributed import context_group, tensor_group
from async_rl.trainer.model.attention import RowContext, recomputed, to_rows, to_slots

_LENGTH_EPSILON = 1e-6
"""Added to the squared length of a query or key before the division by its length."""
SPLIT_VECTORS = ("conv_weight", "A_log", "dt_bias")
"""Parameters of GatedDeltaNet that tensor parallelism splits along their first dimension."""


class GatedDeltaNet(MegatronModule):
    """In place of a layer's attention.

    Args:
        config: megatron's TransformerConfig; its fields `linear_*` have the sizes.
        submodules: megatron's linear layers.
        layer_number: number of the layer, from 1.

    Attributes:
        in_proj_qkvz: rows of each key head: query, key, its value heads, their output gates.
        in_proj_ba: rows of each key head: for its value heads those of beta, then those of the decay.
        conv_weight: [channels, 1, taps], channels of each key head: query, key, its value heads.
        A_log: [value heads], logarithm of the decay rate.
        dt_bias: [value heads], added to the decay input.
        norm_weight: [channels of a value head].
    """

    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.tensor_group, self.context_group = layer_number, tensor_group(), context_group()
        ranks = self.tensor_group.size()
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        self.heads = config.linear_num_key_heads // ranks
        self.values = config.linear_num_value_heads // config.linear_num_key_heads
        self.sizes = (key, key, self.values * value)
        rows = config.linear_num_key_heads * (sum(self.sizes) + self.values * value)
        self.in_proj_qkvz = self._linear(submodules.in_proj, config.hidden_size, rows, gather_output=False)
        rows = 2 * config.linear_num_value_heads
        self.in_proj_ba = self._linear(submodules.in_proj, config.hidden_size, rows, gather_output=False)
        columns = config.linear_num_value_heads * value
        self.out_proj = self._linear(submodules.out_proj, columns, config.hidden_size, input_is_parallel=True)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))

        self.conv_weight = parameter(self.heads * sum(self.sizes), 1, config.linear_conv_kernel_dim)
        self.A_log = parameter(self.heads * self.values)
        self.dt_bias = parameter(self.heads * self.values)
        self.norm_weight = parameter(value)
        # Each tensor-parallel rank has the gradient of its heads; megatron sums those of marked weights.
        self.norm_weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def _linear(self, linear: Any, inputs: int, outputs: int, **settings: bool) -> Any:
        return linear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tensor_group,
            **settings,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: RowContext | None = None,
        **_unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, None as bias) from `hidden_states`; both tensors are [t / tensor, 1, hidden].

        Raises:
            ValueError: `packed_seq_params` is missing or has no chains.
        """
        if packed_seq_params is None or packed_seq_params.chains is None:
            raise ValueError("GatedDeltaNet needs packed_seq_params: a RowContext with chains")
        chains = packed_seq_params.chains
        qkvz, ba = (linear(hidden_states)[0] for linear in (self.in_proj_qkvz, self.in_proj_ba))
        of_heads = torch.cat([x.view(len(x), self.heads, -1) for x in (qkvz, ba)], dim=-1)
        of_heads = _rows_for_heads(of_heads, self.context_group)

        mixed = recomputed(self, lambda of_heads: self._mix(of_heads, chains), of_heads)
        mixed = _heads_for_rows(mixed, self.context_group)
        return self.out_proj(mixed.reshape(len(mixed), 1, -1))

    def _mix(self, of_heads: Tensor, chains: Chains) -> Tensor:
        """[rows, key heads, value channels of a key head] from the projections [rows, key heads, ...]."""
        wide = torch.promote_types(of_heads.dtype, torch.float32)
        qkv, z, b, a = of_heads.split([sum(self.sizes), self.sizes[2], self.values, self.values], dim=-1)
        share, ranks = self.context_group.rank(), self.context_group.size()
        weight, rate, shift = (
            x.chunk(ranks)[share].to(wide).unflatten(0, (qkv.shape[1], -1))
            for x in (self.conv_weight.squeeze(1), self.A_log, self.dt_bias)
        )
        decay = -rate.exp() * F.softplus(a.to(wide) + shift)
        inputs = torch.cat((qkv.to(wide), b.to(wide).sigmoid(), decay), dim=-1)
        slots = to_slots(inputs, chains.inputs).unflatten(0, chains.is_row.shape)
        qkv, b, decay = (slots * chains.is_row[:, :, None, None]).split(
            [sum(self.sizes), self.values, self.values], dim=-1
        )
        q, k, v = F.silu(convolve(qkv, weight)).transpose(1, 2).split(self.sizes, dim=-1)
        v = v.unflatten(-1, (self.values, -1)).transpose(2, 3)
        b, decay = (x[:, chains.earlier :].permute(0, 2, 3, 1) for x in (b, decay))
        out = gated_delta_rule(_normed(q), _normed(k), v, decay, b, chains=chains)  # [n, heads, values, size, channels]
        out = to_rows(out.permute(0, 3, 1, 2, 4).flatten(0, 1), chains.outputs)
        out = F.rms_norm(out, out.shape[-1:], self.norm_weight.to(wide), cast(Any, self.config).layernorm_epsilon)
        return (out.flatten(2) * F.silu(z.to(wide))).to(of_heads.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See megatron's MegatronModule."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(SPLIT_VECTORS, 0),
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            settings: Any = {"tp_group": self.tensor_group}
            sharded |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, **settings)
        return sharded


def keep_decay_rates_float32(model: torch.nn.Module) -> None:
    """Hold A_log in float32 after a conversion of the model to bfloat16, as vLLM does; call this before weights load.

    bfloat16 rounds the decay rate exp(A_log) by up to 0.2 % for each unit of A_log.
    """
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.A_log.data = module.A_log.data.float()


class GatedAttention(SelfAttention):
    """Megatron's attention whose output is multiplied by the sigmoid of a gate.

    Megatron compiles this product, and takes the gates of all ranks that share a key-value head.
    """

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x: [t, 1, heads of this rank * channels]; gate: [t, 1, heads, channels], of all ranks that share a head."""
        heads = x.shape[-1] // gate.shape[-1]
        gate = gate.split(heads, dim=2)[tensor_group().rank() % (gate.shape[2] // heads)]
        return (x * gate.reshape(x.shape).to(torch.promote_types(x.dtype, torch.float32)).sigmoid()).to(x.dtype)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Causal convolution of each channel: [chunks, size, heads, channels] of x [chunks, taps - 1 + size, ...].

    The weights (1, 10) make 1 * 2 + 10 * 3 = 32 of the rows 2, 3.

    Args:
        weight: [heads, channels, taps], the last tap for the row itself.
    """
    taps = weight.shape[-1]
    size = x.shape[1] - taps + 1
    return cast(Tensor, sum(x[:, i : i + size] * weight[..., i] for i in range(taps)))


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, chains: Chains) -> Tensor:
    """Outputs [chunks, key heads, values, size, value channels]; `values` is the number of value heads of a key head.

    Within a chunk, row i writes w_i = beta_i (v_i - exp(G_i) k_i S - sum over j < i of exp(G_i - G_j) (k_i k_j) w_j),
    where S is the state at the start and G the sum of the decays up to a row. This triangular system is solved for v
    and for k at once, before S is known.

    Args:
        q: [chunks, key heads, size, key channels], scaled to length 1; as k.
        v: [chunks, key heads, values, size, value channels].
        decay: [chunks, key heads, values, size], logarithm of the factor of the state; 0 for padding.
        beta: the same shape, strength of the update; 0 for padding.
        chains: the order of the chunks.
    """
    q, k = q.unsqueeze(2) * q.shape[-1] ** -0.5, k.unsqueeze(2)
    total = decay.cumsum(-1)
    above = torch.ones(chains.size, chains.size, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()
    grown, strength = total.unsqueeze(-1).exp(), beta.unsqueeze(-1)
    # The diagonal is not read: it counts as 1.
    system = (k @ k.transpose(-1, -2)) * between * strength
    right = torch.cat((v * strength, k * (strength * grown)), dim=-1)
    of_values, of_state = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    scores = (q @ k.transpose(-1, -2)) * between
    left = total[..., -1:, None]
    kept_keys = (k * (left - total.unsqueeze(-1)).exp()).transpose(-1, -2)
    columns = (of_values, of_state, q * grown, scores, kept_keys, left.exp())
    return torch.cat(_waves([column.split(chains.waves) for column in columns], chains.continued))


def _waves(columns: Sequence[Sequence[Tensor]], continued: Sequence[Slots]) -> list[Tensor]:
    """Outputs of each wave from the columns of `gated_delta_rule`, each split into waves."""
    outputs: list[Tensor] = []
    state: Tensor | None = None
    for wave, (writes, of_state, queries, scores, keys, left) in enumerate(zip(*columns, strict=True)):
        before: Tensor | None = None
        if state is not None:
            before = to_slots(state, continued[wave - 1])
            writes = writes - of_state @ before
        outputs.append(scores @ writes if before is None else queries @ before + scores @ writes)
        if wave < len(continued):
            added = keys @ writes
            state = added if before is None else before * left + added
    return outputs


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LENGTH_EPSILON).rsqrt()


def _rows_for_heads(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """[t, heads, ...] -> [t * context, heads / context, ...], the rows of one context rank after the other."""
    if group.size() == 1:
        return x
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1)
    return cast(Tensor, all_to_all(group, parts)).flatten(0, 1)


def _heads_for_rows(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Inverse of `_rows_for_heads`."""
    if group.size() == 1:
        return x
    parts = cast(Tensor, all_to_all(group, x.unflatten(0, (group.size(), -1))))
    return parts.transpose(0, 1).flatten(1, 2)
