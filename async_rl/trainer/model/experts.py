"""The experts of a rank in one grouped matrix multiplication per linear layer, without Transformer Engine.

Rows of tokens are in the order of the experts, as megatron's token dispatcher returns them:

    hidden [5, 64]    experts 0 0 0 2 2    weight [3, 128, 64]    ends [3, 3, 5]    output [5, 128]

The number of kernels does not depend on the number of experts, nor does the number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from async_rl.trainer.distributed import expert_group, expert_tensor_group


class GroupedLinear(nn.Module):
    """A linear layer of all experts of a rank; the arguments are those of Transformer Engine's GroupedLinear.

    Args:
        experts: number of experts of this rank.
        inputs: columns of the layer on all expert-tensor ranks.
        outputs: rows of the layer on all expert-tensor ranks.
        config: megatron's config.
        bias: whether each expert has a bias.
        skip_bias_add: whether the caller adds the bias.
        split: dimension of an expert's weight that expert-tensor ranks split.

    Attributes:
        weight: [experts, rows, columns], this rank's part.
        bias: [experts, rows], this rank's part if `split` is 0, or None.
    """

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        split: int,
        **_unused: Any,
    ) -> None:
        super().__init__()
        ranks = expert_tensor_group().size()
        shape = [outputs // ranks, inputs] if split == 0 else [outputs, inputs // ranks]
        device = "cpu" if config.use_cpu_initialization else "cuda"
        new = partial(torch.empty, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(new(experts, *shape))
        self.bias = nn.Parameter(new(experts, shape[0])) if bias else None
        self._skip_bias_add = skip_bias_add
        # With split 1 the sum over the ranks has the bias of the first one. The bias of the others counts as 0, and all
        # get the same gradient.
        self._adds_bias = split == 0 or expert_tensor_group().rank() == 0

    def forward(self, hidden: Tensor, tokens_per_expert: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """[rows, outputs], and the bias if the caller adds it. hidden: [rows, inputs] in the order of the experts."""
        ends = torch.tensor([*accumulate(tokens_per_expert)], dtype=torch.int32).to(hidden.device, non_blocking=True)
        output = self._forward_impl(input=hidden, weight=self.weight, ends=ends)
        bias = self.bias if self.bias is None or self._adds_bias else self.bias - self.bias.detach()
        if bias is None or self._skip_bias_add:
            return output, bias
        return output + rows_of(bias, tokens_per_expert), None

    def _forward_impl(self, *, input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """The product; LoRA replaces it (`async_rl.trainer.model.lora`), as that of megatron's layers."""
        if not len(input):  # torch 2.13 has no gradient of an empty product
            return input @ weight[0].t()
        return F.grouped_mm(input, weight.transpose(1, 2), offs=ends)


def rows_of(values: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
    """[rows, n]: the row of `values` [experts, n] for each token."""
    counts = torch.tensor(tokens_per_expert, device=values.device)
    return values.repeat_interleave(counts, dim=0, output_size=sum(tokens_per_expert))


class GroupedExperts(TEGroupedMLP):
    """Megatron's grouped experts over the linear layers of this module; checkpoints are those of its other experts."""

    @staticmethod
    def _apply_bias(
        intermediate_parallel: Tensor,
        bias_parallel: Tensor | None,
        tokens_per_expert: Sequence[int],
        permuted_probs: Tensor,
    ) -> Tensor:
        if bias_parallel is None:
            return intermediate_parallel
        bias = rows_of(bias_parallel, tokens_per_expert)
        return (intermediate_parallel + bias * permuted_probs).to(intermediate_parallel.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The part of each weight of the experts of all ranks that this rank has."""
        del metadata
        return {
            f"{prefix}{name}": _shard(name, parameter, prefix=prefix, outer=sharded_offsets)
            for name, parameter in self.named_parameters()
        }


GROUPED = ModuleSpec(
    module=GroupedExperts,
    submodules=MLPSubmodules(
        linear_fc1=ModuleSpec(module=GroupedLinear, params={"split": 0}),
        linear_fc2=ModuleSpec(module=GroupedLinear, params={"split": 1}),
    ),
)
"""Spec of the experts of a layer."""


def _shard(
    name: str, parameter: Tensor, *, prefix: str, outer: tuple[Any, ...]
) -> ShardedTensor | ShardedTensorFactory:
    """Shard of a parameter. The gate and the up projection of linear_fc1 are split one by one.

    With 2 expert-tensor ranks the rows of linear_fc1 are g0 u0 on rank 0 and g1 u1 on rank 1, and g0 g1 u0 u1 in the
    checkpoint.

    Args:
        outer: offsets of the layer, if a checkpoint has one tensor for all layers.
    """
    experts, tensors = expert_group(), expert_tensor_group()
    split = cast(Any, parameter).partition_dim
    expert = (len(outer), experts.rank(), experts.size())
    copy = (0, 0 if split >= 0 else tensors.rank(), parallel_state.get_expert_data_parallel_rank())
    key = f"{prefix}experts.{name}"

    def part(key: str, tensor: Tensor, replica_id: Any, place: int, places: int) -> ShardedTensor:
        offsets = [*outer, expert, *([(len(outer) + split, place, places)] if split >= 0 else [])]
        return ShardedTensor.from_rank_offsets(
            key, tensor, *offsets, replica_id=replica_id, prepend_axis_num=len(outer)
        )

    if not name.startswith("linear_fc1."):
        return part(key, parameter, copy, tensors.rank(), tensors.size())

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, _flattened: slice | None) -> list[ShardedTensor]:
        places = 2 * tensors.size()
        return [
            part(key, half.contiguous(), replica_id, tensors.rank() + i * tensors.size(), places)
            for i, half in enumerate(tensor.chunk(2, dim=1))
        ]

    merge = partial(torch.cat, dim=1)
    return ShardedTensorFactory(key, parameter, cast(Any, build), cast(Any, merge), copy)
