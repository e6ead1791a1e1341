"""Which part of which whole tensor a rank holds, so that a checkpoint fits every layout.

Megatron's modules say it of their parameters and buffers (`sharded_state_dict`). Whatever has one value per weight
(moments, float32 weights, the reference of a KL term) is cut as its weight is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from async_rl.train.layers import local_name

Shard = ShardedTensor | ShardedTensorFactory


def model_shards(chunks: Sequence[Any]) -> dict[str, Shard]:
    """Every parameter and persistent buffer of this rank by chunk and name; `data` is the live tensor itself.

    In a checkpoint a tensor has the name of the local spec, with Transformer Engine too.
    """
    shards = {
        f"{i}.{name}": shard
        for i, chunk in enumerate(chunks)
        for name, shard in chunk.sharded_state_dict(prefix="").items()
        if isinstance(shard, Shard)
    }
    for shard in shards.values():
        shard.key = local_name(shard.key)
    return shards


def live_tensors(shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    """The tensors that the shards were made of; take them before a load, which puts others in their place."""
    return {name: cast(Tensor, shard.data) for name, shard in shards.items()}


def shards_by_tensor(shards: Mapping[str, Shard]) -> dict[int, Shard]:
    """id of the live tensor -> its shard."""
    return {id(shard.data): shard for shard in shards.values()}


def shard_like(weight: Shard, tensor: Tensor, kind: str) -> Shard:
    """`tensor`, of the shape of this rank's `weight`, under the name `kind` + name of the weight."""
    return make_sharded_optimizer_tensor(weight, tensor, kind)


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Set live tensors to what was loaded under the same name."""
    for name, tensor in live.items():
        tensor.copy_(loaded[name])


def object_of_rank(name: str, value: object, *, rank: int, ranks: int) -> ShardedObject:
    """A value that each rank has one of."""
    return ShardedObject(name, value, (ranks,), (rank,))


def write_shards(directory: Path, state: dict[str, Any]) -> None:
    """Write nested shards into the empty folder `directory`, each part of a tensor once. Collective.

    Raises:
        torch.distributed.checkpoint.CheckpointException: a rank could not write; on every rank.
    """
    dist_checkpointing.save(state, str(directory), sharded_strategy=_InProcessSave("torch_dist", 1))


def read_shards(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The same nesting with the tensors in the place of shards, cut for this rank's layout. Collective.

    Tensors that `state` brings may be written to before everything is read.

    Raises:
        Exception: whatever megatron or torch make of files that do not fit.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # megatron loads by names that torch will drop
        return cast(dict[str, Any], dist_checkpointing.load(state, str(directory)))


class _InProcessSave(SaveShardedStrategy):
    """Megatron's torch_dist format, written by the rank itself and flushed to the disk.

    Megatron's own strategy forks a process per file, which a rank with gloo, NCCL or CUDA threads must not, and an
    error of that process has no errno.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        parts, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(  # pyright: ignore[reportPrivateUsage]
            sharded_state_dict, keep_only_main_replica=True
        )
        save(
            torch_strategies.mcore_to_pyt_state_dict(parts),  # pyright: ignore[reportArgumentType]
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=torch_strategies.MCoreSavePlanner(flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return True
