"""Stands for an absent Transformer Engine: megatron's spec for it, over modules with its layout of weights.

A linear layer includes the norm before it (`layer_norm_weight`), the experts of a rank are one module (`weight0`,
`weight1`, ...), and attention takes packed sequences (`thd`) and passes keys and values around context ranks. Weights
are marked as Transformer Engine marks them; for experts this is not the dimension of their split. The activation is
that of a GPU, with its own backward pass.
"""

import contextlib
import itertools
import math

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from async_rl.trainer.model import gpt
from async_rl.trainer.model.attention import RMSNorm


@contextlib.contextmanager
def fused_layers():
    """Models built inside are of megatron's Transformer Engine spec, with any trainer.layer_spec."""
    held = {(gpt_layer_specs, "TESpecProvider"): FusedSpecProvider, (gpt_layer_specs, "TENorm"): RMSNorm}
    held[gpt, "uses_transformer_engine"] = lambda _config, device: True
    held[gpt, "fusions"] = lambda shape, _device, fusions=gpt.fusions: fusions(shape, torch.device("cuda"))
    before = {key: vars(key[0]).get(key[1]) for key in held}
    for (module, name), value in held.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


class NormLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear."""

    def __init__(self, input_size, output_size, *, config, **settings):
        super().__init__(input_size, output_size, config=config, **settings)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(F.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))


class GroupedLinear(torch.nn.Module):
    """TEGroupedLinear of a rank that shares experts with others: it does not know that its weights are split."""

    split: int  # dimension of a weight that expert-tensor parallelism splits

    def __init__(self, num_gemms, input_size, output_size, *, config, pg_collection, **_settings):
        super().__init__()
        self.groups = pg_collection
        shape = [output_size, input_size]
        shape[self.split] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x, m_splits):
        parts = zip(x.split(m_splits), self.parameters(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Of each expert a part of one tensor, by the keys of experts that are separate modules."""
        weights = list(self.parameters())
        experts, first = self.groups.ep.size() * len(weights), self.groups.ep.rank() * len(weights)
        shards = {}
        for i, weight in enumerate(weights):
            of_expert = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.split},
                (*sharded_offsets, (len(sharded_offsets), first + i, experts)),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            (shard,) = of_expert.values()
            shard.replica_id = (*shard.replica_id[:2], self.groups.expt_dp.rank())
            shards[f"{prefix}weight{i}"] = shard
        return shards


class ColumnGroupedLinear(GroupedLinear):
    split = 0


class RowGroupedLinear(GroupedLinear):
    split = 1


class PackedAttention(torch.nn.Module):
    """TEDotProductAttention: knows rows by cu_seqlens alone, and of context ranks that they cut sequences in zigzag."""

    def __init__(self, config, *, softmax_scale=None, k_channels=None, v_channels=None, **_settings):
        super().__init__()
        self.v_channels = v_channels or config.kv_channels
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or config.kv_channels)
        self.ring = parallel_state.get_context_parallel_group()

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None):
        packed, ranks = packed_seq_params, self.ring.size()
        assert attention_mask is None and packed.qkv_format == "thd"
        assert value.shape[-1] == self.v_channels and all(x.is_contiguous() for x in (query, key, value))
        if attn_mask_type.name == "padding_causal_bottom_right":
            return self._to_the_ends(query, key, value, packed)
        assert attn_mask_type is AttnMaskType.causal
        ends = packed.cu_seqlens_q_padded.tolist()
        # One object: else rows between sequences are taken for padding, which fewer kernels can skip.
        assert packed.cu_seqlens_q_padded is packed.cu_seqlens_q is packed.cu_seqlens_kv is packed.cu_seqlens_kv_padded
        assert packed.cu_seqlens_q.dtype == torch.int32
        lengths = [end - begin for begin, end in itertools.pairwise(ends)]
        assert packed.max_seqlen_q == max(lengths) and sum(lengths) == len(query) * ranks
        if ranks > 1:
            assert all(length % (2 * ranks) == 0 for length in lengths)
            key, value = (gather_from_sequence_parallel_region(x, group=self.ring) for x in (key, value))
        rows = [self._rows_of(rank, ends) for rank in range(ranks)]
        here, whole = rows[self.ring.rank()], torch.cat(rows).argsort()
        outs = []
        for begin, end in itertools.pairwise(ends):
            mine = (here >= begin) & (here < end)
            mask = here[mine].unsqueeze(1) >= torch.arange(begin, end)
            outs.append(self._attend(query[mine], key[whole[begin:end]], value[whole[begin:end]], mask))
        return torch.cat(outs).flatten(1)

    def _to_the_ends(self, query, key, value, packed):
        """The last query of each sequence is that of its last key."""
        assert self.ring.size() == 1, "rings cut sequences with as many queries as keys"
        ends = [x.tolist() for x in (packed.cu_seqlens_q, packed.cu_seqlens_kv)]
        assert packed.cu_seqlens_q is packed.cu_seqlens_q_padded and packed.cu_seqlens_kv is packed.cu_seqlens_kv_padded
        sizes = [[end - begin for begin, end in itertools.pairwise(each)] for each in ends]
        assert [sum(each) for each in sizes] == [len(query), len(key)]
        assert [max(each) for each in sizes] == [packed.max_seqlen_q, packed.max_seqlen_kv]
        outs = []
        for q, k, v in zip(query.split(sizes[0]), key.split(sizes[1]), value.split(sizes[1]), strict=True):
            outs.append(self._attend(q, k, v, torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))))
        return torch.cat(outs).flatten(1)

    def _attend(self, query, key, value, mask):
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return out.transpose(0, 1)

    def _rows_of(self, rank, ends):
        """int64: the rows that a rank holds, of each sequence its chunk from the front and its chunk from the back."""
        if self.ring.size() == 1:
            return torch.arange(ends[-1])
        chunks = 2 * self.ring.size()
        sequences = [torch.arange(begin, end).chunk(chunks) for begin, end in itertools.pairwise(ends)]
        return torch.cat([chunk for each in sequences for chunk in (each[rank], each[chunks - 1 - rank])])


class FusedSpecProvider(LocalSpecProvider):
    """TESpecProvider."""

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return NormLinear

    def layer_norm(self, rms_norm=False, for_qk=False):
        return RMSNorm

    def core_attention(self):
        return PackedAttention

    def linear(self):
        return None  # LatentAttention brings its own

    def grouped_mlp_modules(self, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm):
        assert moe_use_grouped_gemm and not moe_use_legacy_grouped_gemm
        return TEGroupedMLP, MLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
