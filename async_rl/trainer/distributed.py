"""The process groups of a trainer rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.trainer.batch.micro_batch import Coordinates
from async_rl.trainer.model.model import TrainerConfig


def open_store(host: str) -> TCPStore:
    """Start a rendezvous store for the ranks on a free port of this machine. It is closed with the returned object.

    The store binds the port immediately, so that no other process can take it before the ranks connect.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


class ProcessGroups:
    """Joins the other ranks and initialises megatron's parallel groups; `close` leaves them.

    A process has one layout. A second trainer in a process shares the groups and does not destroy them.

    Args:
        config: layout and time-out.
        rank: of this process.
        world_size: number of ranks.
        rendezvous: host:port of the store (`open_store`); None for a single rank.

    Attributes:
        device: GPU or CPU of this rank.
        coordinates: position in the groups that split rows.
        data_rank: rank in the data-parallel group; it determines the sequences.
        saving: group of all ranks for the thread that writes checkpoints; all others are for the thread that trains.
        is_last_stage: whether this rank has the last pipeline stage and computes logits.

    Raises:
        RuntimeError: the process already has another layout, or `world_size` differs from the config.
    """

    def __init__(self, config: TrainerConfig, *, rank: int, world_size: int, rendezvous: str | None) -> None:
        if world_size != config.ranks:
            raise RuntimeError(f"world_size is {world_size}, but trainer.ranks is {config.ranks}; both must be equal")
        self.rank, self.size = rank, world_size
        self.device = _device(rank)
        self._owned = not dist.is_initialized()
        parallel, timeout = config.parallel, timedelta(seconds=config.timeout_s)
        layout = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.expert_tensor_size)
        if self._owned:
            host, _, port = (rendezvous or "").rpartition(":")
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=TCPStore(host, int(port), wait_for_workers=False, timeout=timeout) if host else HashStore(),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=self.device if self.device.type == "cuda" else None,
            )
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                virtual_pipeline_model_parallel_size=(
                    parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
                ),
                context_parallel_size=parallel.context,
                expert_model_parallel_size=parallel.expert,
                expert_tensor_parallel_size=parallel.expert_tensor_size,
                distributed_timeout_minutes=max(1, round(config.timeout_s / 60)),
            )
        elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size) or _layout() != layout:
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in layout {_layout()}; a trainer "
                f"of rank {rank} of {world_size} in layout {layout} needs a separate process"
            )
        saving = dist.new_group(backend="gloo", timeout=timeout)
        self.saving = cast(dist.ProcessGroup, saving)
        self.reseed(config.seed)
        self.coordinates = Coordinates(
            tensor=parallel_state.get_tensor_model_parallel_world_size(),
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            context=parallel_state.get_context_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
        )
        self.data_rank: int = parallel_state.get_data_parallel_rank()
        self.is_last_stage: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def reseed(self, seed: int) -> None:
        """Reset the random state from `seed`; megatron derives different numbers for each rank."""
        tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    def random_state(self) -> dict[str, Any]:
        """Random state of this rank: torch's generators and megatron's generators for dropout."""
        return {
            "cpu": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
            "megatron": cast(Any, tensor_parallel.get_cuda_rng_tracker()).get_states(),
        }

    def set_random_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `random_state`."""
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["device"])
        cast(Any, tensor_parallel.get_cuda_rng_tracker()).set_states(state["megatron"])

    def gather(self, value: object, *, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Values of all ranks, by rank, through `group` or the default group. Values are pickled. Collective."""
        values: list[Any] = [value]
        if dist.get_world_size() > 1:
            values *= dist.get_world_size()
            dist.all_gather_object(values, value, group=group)
        return values

    def sum_over_ranks(self, values: torch.Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce `values` float64 [n] over all ranks, in place. Collective."""
        if dist.get_world_size() > 1:
            moved = values.to(self.device)
            dist.all_reduce(moved, op=op)
            values.copy_(moved)
        return values

    def barrier(self) -> None:
        """Wait for all ranks, at most trainer.timeout_s."""
        if dist.get_world_size() > 1:
            dist.barrier()

    def close(self) -> None:
        """Destroy the groups if this object created them."""
        if self._owned and dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def tensor_group() -> dist.ProcessGroup:
    """Tensor parallelism: ranks with parts of the same dense tensors."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def expert_group() -> dist.ProcessGroup:
    """Expert parallelism: ranks with different experts of the same layers."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    """Expert tensor parallelism: ranks with parts of the same experts."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group())


def context_group() -> dist.ProcessGroup:
    """Context parallelism: ranks with parts of the same sequences."""
    return cast(dist.ProcessGroup, parallel_state.get_context_parallel_group())


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _layout() -> tuple[int, ...]:
    """Sizes of the groups of this process."""
    pipeline = cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())
    groups = (tensor_group(), pipeline, context_group(), expert_group(), expert_tensor_group())
    return tuple(group.size() for group in groups)
