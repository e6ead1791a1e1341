"""Describes the parts of global tensors that a rank has, so that a checkpoint is independent of the layout.

Megatron's modules describe their parameters and buffers (`sharded_state_dict`). Tensors with one value per weight
element (moments, float32 weights, reference weights) are sharded like the weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from async_rl.trainer.distributed import expert_group
from async_rl.trainer.model.convert import LORA, Split, named_tensors
from async_rl.trainer.model.layers import is_expert, is_grouped, local_name

Shard = ShardedTensor | ShardedTensorFactory
CopiedShards = dict[str, Any]
"""Name of a tensor or value -> the part that this rank writes, in torch's types, in memory of the CPU."""


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
    if is_expert(name):
        split, copy = Split.expert_tensor(), parallel_state.get_expert_data_parallel_rank()
    else:
        split, copy = Split.tensor(), parallel_state.get_data_parallel_rank(with_context_parallel=True)
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


def shards_by_tensor(shards: Mapping[str, Shard]) -> dict[int, Shard]:
    """id of the live tensor -> its shard."""
    return {id(shard.data): shard for shard in shards.values()}


def shard_like(weight: Shard, tensor: Tensor, kind: str) -> Shard:
    """A shard of `tensor`, shaped like this rank's `weight`, with the name `kind`.`name of the weight`."""
    return make_sharded_optimizer_tensor(weight, tensor, kind)


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Copy loaded tensors into the live tensors with the same names."""
    for name, tensor in live.items():
        tensor.copy_(loaded[name])


def object_of_rank(name: str, value: object, *, rank: int, ranks: int) -> ShardedObject:
    """A shard for a value that differs between ranks."""
    return ShardedObject(name, value, (ranks,), (rank,))


def copy_shards(directory: Path, state: dict[str, Any]) -> CopiedShards:
    """Copy nested shards for `write_shards`, and begin a checkpoint in the empty folder `directory`. Collective.

    Of replicated parts one rank has a copy. `state` must not be used afterwards.
    """
    copies = _Copies("torch_dist", 1)
    dist_checkpointing.save(state, str(directory), sharded_strategy=copies)
    return copies.shards


def write_shards(directory: Path, shards: CopiedShards, *, group: dist.ProcessGroup) -> None:
    """Write shards into the folder that `copy_shards` prepared, and sync them to disk. Collective in `group`.

    Megatron's own strategies fork a process per file. This is unsafe in a rank with gloo, NCCL or CUDA threads, and
    errors in that process have no errno.

    Raises:
        torch.distributed.checkpoint.CheckpointException: a rank could not write; raised on all ranks.
    """
    save(
        shards,
        storage_writer=FileSystemWriter(directory, sync_files=True),
        planner=torch_strategies.MCoreSavePlanner(flatten_state_dict=False),
        process_group=group,
    )


def stored_files(directory: Path) -> set[str]:
    """Names of all files that a checkpoint of `write_shards` needs; its index names those of the tensors.

    Raises:
        OSError: there is no index.
    """
    stored = FileSystemReader(directory).read_metadata().storage_data
    return {".metadata", "common.pt", "metadata.json", *(place.relative_path for place in stored.values())}


def read_shards(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Read the tensors of nested shards, for this rank's layout; the result has the same nesting. Collective.

    The tensors in `state` may be overwritten even if reading fails.

    Raises:
        Exception: an error of megatron or torch; the files do not fit the shards.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # megatron uses deprecated names of torch
        return cast(dict[str, Any], dist_checkpointing.load(state, str(directory)))


class _Copies(SaveShardedStrategy):
    """Takes what this rank has to write; megatron checks the shards and writes the rest."""

    shards: CopiedShards

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        parts, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(  # pyright: ignore[reportPrivateUsage]
            sharded_state_dict, keep_only_main_replica=True
        )
        for part in chain.from_iterable(parts.values()):
            if isinstance(part, ShardedTensor):  # the others are serialized below
                part.data = cast(Tensor, part.data).detach().to("cpu", copy=True)
        self.shards = torch_strategies.mcore_to_pyt_state_dict(parts)  # pyright: ignore[reportArgumentType]

    @property
    def can_handle_sharded_objects(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True
