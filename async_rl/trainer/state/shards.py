"""Describes the parts of global tensors that a rank has, so that a checkpoint is independent of the layout.

Megatron's modules describe their parameters and buffers (`sharded_state_dict`). Tensors with one value per weight
element (moments, float32 weights, reference weights) are sharded like the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from async_rl.trainer.distributed import expert_group
from async_rl.trainer.model.convert import LORA, Split, named_tensors
from async_rl.trainer.model.layers import is_expert, is_grouped, local_name

Shard = ShardedTensor | ShardedTensorFactory


def model_shards(chunks: Sequence[Any], *, lora: bool) -> dict[str, Shard]:
    """`chunk.name` -> shard of every parameter and persistent buffer of this rank; `data` is the live tensor.

    In a checkpoint a tensor has its name in the local spec, also with Transformer Engine. With `lora` the shards are
    those of the adapters alone, because the other weights remain those of the start checkpoint.
    """
    if lora:
        return {name: _adapter_shard(name, parameter) for name, parameter in named_tensors(chunks) if LORA in name}
    shards = {
        f"{i}.{name}": shard
        for i, chunk in enumerate(chunks)
        for name, shard in chunk.sharded_state_dict(prefix="").items()
        if isinstance(shard, Shard)
    }
    for shard in shards.values():
        shard.key = local_name(shard.key)
    return shards


def _adapter_shard(name: str, parameter: Any) -> ShardedTensor:
    """The part of an adapter's matrix on this rank, under its name with the global layer number."""
    split = Split.of(name)
    if is_expert(name):
        copy = parallel_state.get_expert_data_parallel_rank()
    else:
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    is_split = parameter.partition_dim >= 0
    offsets = [(parameter.partition_dim, split.rank, split.size)] if is_split else []
    if is_grouped(name):
        offsets.append((0, expert_group().rank(), expert_group().size()))
    return ShardedTensor.from_rank_offsets(
        name, parameter, *offsets, replica_id=(0, 0 if is_split else split.rank, copy)
    )


def live_tensors(shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The live tensors of the shards. Call this before a load, because a load replaces `data` of the shards."""
    return {name: cast(Tensor, shard.data) for name, shard in shards.items()}


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Copy loaded tensors into the live tensors with the same names."""
    for name, tensor in live.items():
        tensor.copy_(loaded[name])
