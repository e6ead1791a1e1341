"""Sends the weights of the ranks bucket by bucket: each bucket is complete on one rank, its owner, and on no other.

tensor-parallel parts of a dense tensor    gathered by one rank of the tensor group; the ranks take turns
experts                                    sent by their expert-parallel rank
pipeline stages                            each sends its own layers
data-parallel ranks but the first          send nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from async_rl.trainer.distributed import expert_group, expert_tensor_group
from async_rl.trainer.model.convert import (
    STACKED,
    Split,
    expert_of,
    exported_value,
    glue_parts,
    named_weights,
    split_names,
    split_of,
)
from async_rl.trainer.model.families import Kind, ModelShape, WeightNames, weight_names
from async_rl.trainer.model.layers import is_expert
from async_rl.trainer.model.lora import adapter_names
from async_rl.weights.plan import BUCKET_BYTES, Bucket, TensorSpec, plan_buckets


@dataclass(slots=True)
class _Parameter:
    """A parameter of this rank, or those of all its experts in a layer if engines have them in one tensor."""

    name: str
    """Name in the local spec; of the first expert if there are several."""
    kind: Kind
    """How the parts are joined."""
    names: tuple[str, ...]
    """Hugging Face names of its tensors."""
    owner: int
    """Trainer rank that sends it."""
    weights: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Number of the expert (0 if there is one parameter) -> parameter."""


class WeightSource:
    """The weights of all ranks. Collective: all ranks build it, and iterate over its tensors together.

    Args:
        chunks: model chunks of this rank.
        shape: properties of the model.
        adapters: send the matrices of LoRA adapters under their names in PEFT, not the weights.
        bucket_bytes: bound on a bucket. An owner holds one bucket at a time besides what its caller keeps.

    Attributes:
        plan: the buckets, equal on all ranks.
    """

    def __init__(
        self, chunks: Sequence[Any], *, shape: ModelShape, adapters: bool = False, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._config = chunks[0].config
        self._device: torch.device = next(chunks[0].parameters()).device
        self._vocab_size = shape.vocab_size
        names_of = adapter_names if adapters else weight_names
        parameters = _parameters(named_weights(chunks, adapters=adapters), names_of, shape=shape)
        self._parameters = {parameter.names[0]: parameter for parameter in parameters}
        mine = [
            tuple(self._specs(parameter))
            for parameter in self._parameters.values()
            if parameter.owner == dist.get_rank()
        ]
        owned: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(owned, mine)
        self.plan = plan_buckets(dict(enumerate(owned)), bucket_bytes=bucket_bytes)

    @torch.no_grad()
    def buckets(self) -> Iterator[tuple[Bucket, list[tuple[str, Tensor]]]]:
        """Yield each bucket of the plan, and its (Hugging Face name, complete tensor) if this rank owns it.

        The list of tensors is empty on other ranks. A tensor may share its memory with the model, so it is valid until
        the weights change.
        """
        for bucket in self.plan:
            tensors: list[tuple[str, Tensor]] = []
            for unit in bucket.units:
                parameter = self._parameters.get(unit[0].name)
                if parameter is None:
                    continue
                whole = self._whole(parameter)
                if whole is not None:
                    tensors += zip(parameter.names, self._split(parameter, whole), strict=True)
            yield bucket, tensors

    @torch.no_grad()
    def on_first_rank(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, complete tensor) of all buckets on rank 0; it receives them one by one.

        On other ranks nothing is yielded; iterating sends the buckets that they own. Tensors are as in `buckets`.
        """
        for bucket, tensors in self.buckets():
            if dist.get_rank() > 0:
                for _, tensor in tensors:
                    dist.send(tensor.contiguous(), dst=0)
            elif bucket.owner == 0:
                yield from tensors
            else:
                for spec in bucket.tensors:
                    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
                    dist.recv(tensor, src=bucket.owner)
                    yield spec.name, tensor

    def _specs(self, parameter: _Parameter) -> Iterator[TensorSpec]:
        """Tensors of a parameter as engines know them."""
        (first, *_) = parameter.weights.values()
        shape, split = list(first.shape), split_of(parameter.name, first)
        if split is not None:
            shape[first.partition_dim] *= split.size  # pyright: ignore[reportAttributeAccessIssue]
        if parameter.kind in STACKED:
            shape.insert(0, self._config.num_moe_experts)
        whole = torch.empty(shape, dtype=first.dtype, device="meta")
        for name, part in zip(parameter.names, self._split(parameter, whole), strict=True):
            yield TensorSpec(name, str(part.dtype).removeprefix("torch."), tuple(part.shape))

    def _split(self, parameter: _Parameter, whole: Tensor) -> list[Tensor]:
        """Tensors for engines of a complete parameter; of [E, ...] if it is that of all experts of a layer."""
        if parameter.kind in STACKED:
            experts = [split_names(parameter.kind, expert, self._config)[0] for expert in whole]
            return [torch.stack(experts)]
        if parameter.kind == "vocabulary":
            whole = whole[: self._vocab_size]
        return split_names(parameter.kind, whole, self._config)

    def _whole(self, parameter: _Parameter) -> Tensor | None:
        """The complete parameter on its owner, None on the other ranks with a part."""
        parts = [self._glued(parameter, parameter.weights[number]) for number in sorted(parameter.weights)]
        if parameter.kind not in STACKED:
            return parts[0]
        if parts[0] is None:  # its first expert-tensor rank has the experts
            return None
        here = torch.stack(cast(list[Tensor], parts))
        del parts  # those of split experts are copies
        stacks = _gather(here, expert_group(), owner=parameter.owner)
        return None if stacks is None else torch.cat(stacks)

    def _glued(self, parameter: _Parameter, weight: Tensor) -> Tensor | None:
        """The complete tensor of a parameter on its owner, or on the first expert-tensor rank if it is stacked."""
        value, split = exported_value(weight), split_of(parameter.name, weight)
        owner = (
            dist.get_global_rank(Split.of(parameter.name).group, 0) if parameter.kind in STACKED else parameter.owner
        )
        if split is None:
            return value if owner == dist.get_rank() else None
        parts = _gather(value.contiguous(), split.group, owner=owner)
        if parts is None:
            return None
        return glue_parts(parameter.kind, parts, weight.partition_dim)  # pyright: ignore[reportAttributeAccessIssue]


def _parameters(
    local: Iterable[tuple[str, Tensor]], names_of: Callable[[ModelShape, str], WeightNames], *, shape: ModelShape
) -> Iterator[_Parameter]:
    """Parameters in `local` that this rank takes part in sending, in the same order on all ranks of their group.

    Args:
        local: (name in the local spec, parameter) of this rank.
        names_of: returns the Hugging Face names for a name.
        shape: properties of the model.
    """
    first = {
        False: parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        True: parallel_state.get_expert_data_parallel_rank() == 0,
    }
    stacks: dict[str, _Parameter] = {}
    for number, (name, weight) in enumerate(local):
        names = names_of(shape, name)
        if not first[is_expert(name)] or (name == "output_layer.weight" and shape.tied):
            continue
        if names.kind not in STACKED:
            split = Split.of(name)
            owner = dist.get_global_rank(split.group, number % split.size)
            yield _Parameter(name, names.kind, names.names, owner, {0: weight})
            continue
        owner = _first_expert_rank()
        stack = stacks.setdefault(names.names[0], _Parameter(name, names.kind, names.names, owner))
        stack.weights[expert_of(name)] = weight
    yield from stacks.values()


def _first_expert_rank() -> int:
    """The rank that sends the tensors of all experts of a layer: it has the first experts, and the first part of each.

    A rank that only passes its parts on, to the first expert-tensor rank, gets the number of that rank.
    """
    parts = expert_tensor_group()
    return dist.get_global_rank(expert_group() if parts.rank() == 0 else parts, 0)


def _gather(part: Tensor, group: dist.ProcessGroup, *, owner: int) -> list[Tensor] | None:
    """Parts of all ranks of `group` on its member `owner`, None on the others."""
    parts = [torch.empty_like(part) for _ in range(group.size())] if owner == dist.get_rank() else None
    dist.gather(part, parts, dst=owner, group=group)
    return parts
