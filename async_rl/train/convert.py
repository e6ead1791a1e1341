"""Weights between Hugging Face checkpoints and the chunks of a rank, one tensor at a time.

Loading reads only what this rank holds. Exporting is collective: every rank iterates in step and sees every tensor
whole, in the names and shapes of Hugging Face, experts one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from async_rl.model_info import CheckpointError
from async_rl.train.distributed import expert_group, expert_tensor_group, pipeline_group, tensor_group
from async_rl.train.families import Kind, ModelShape, WeightNames, weight_names

_LOCAL_EXPERT = re.compile(r"local_experts\.(\d+)\.")
_HF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load_weights(chunks: Sequence[Any], checkpoint: Path, *, shape: ModelShape) -> None:
    """Fill every parameter of this rank from the safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: a tensor is absent or has another shape.
    """
    reader = _Reader(checkpoint)
    tensor = _Split.tensor()
    for name, parameter in named_weights(chunks):
        names = weight_names(shape, name)
        full = _join_names(names, [reader.read(n) for n in names.names], chunks[0].config)
        if names.kind == "vocabulary":
            full = torch.nn.functional.pad(full, (0, 0, 0, parameter.shape[0] * tensor.size - len(full)))
        part = _cut(names.kind, full, parameter, _split_of(name, parameter))
        if part.shape != parameter.shape:
            raise CheckpointError(
                f"{checkpoint}: {', '.join(names.names)} make {name} of shape {list(part.shape)} on this rank, but the "
                f"config asks for {list(parameter.shape)}; config.json and weights do not belong together"
            )
        with torch.no_grad():
            parameter.copy_(part)


def export_weights(
    chunks: Sequence[Any], *, shape: ModelShape, read: Callable[[Tensor], Tensor] = torch.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor, a copy) of every weight. Collective over all ranks.

    Args:
        read: what of a parameter is exported, of its shape; by default its value.
    """
    config = chunks[0].config
    for name, weight in _whole_weights(chunks, shape, read):
        names = weight_names(shape, name)
        if name == "output_layer.weight" and shape.tied:
            continue
        if names.kind == "vocabulary":
            weight = weight[: shape.vocab_size]
        for hf_name, part in zip(names.names, _split_names(names, weight, config), strict=True):
            yield hf_name, part.detach().clone(memory_format=torch.contiguous_format)


def named_weights(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """(name with global layer and expert numbers, parameter) of this rank, the same order on all of a stage."""
    per_rank = (chunks[0].config.num_moe_experts or 0) // expert_group().size()
    first_expert = per_rank * expert_group().rank()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                name = f"decoder.layers.{chunk.decoder.layers[int(number)].layer_number - 1}.{rest}"
            name = _LOCAL_EXPERT.sub(lambda m: f"local_experts.{int(m[1]) + first_expert}.", name)
            yield name, parameter


@dataclass(frozen=True, slots=True)
class _Split:
    """A group over which single tensors are split."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def tensor(cls) -> _Split:
        group = tensor_group()
        return cls(group, group.size(), group.rank())

    @classmethod
    def expert_tensor(cls) -> _Split:
        group = expert_tensor_group()
        return cls(group, group.size(), group.rank())


def _is_expert(name: str) -> bool:
    return ".local_experts." in name


# ---- Hugging Face names <-> one megatron tensor


def _join_names(names: WeightNames, tensors: list[Tensor], config: Any) -> Tensor:
    match names.kind:
        case "qkv":
            groups = config.num_query_groups
            return torch.cat([t.view(groups, -1, *t.shape[1:]) for t in tensors], dim=1).flatten(0, 1)
        case "gate_up":
            return torch.cat(tensors)
        case "direct" | "vocabulary":
            return tensors[0]


def _split_names(names: WeightNames, weight: Tensor, config: Any) -> list[Tensor]:
    match names.kind:
        case "qkv":
            grouped = weight.view(config.num_query_groups, -1, *weight.shape[1:])
            head = config.kv_channels
            sizes = [grouped.shape[1] - 2 * head, head, head]
            return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
        case "gate_up":
            return list(weight.chunk(2))
        case "direct" | "vocabulary":
            return [weight]


# ---- one whole tensor <-> its parts on the ranks of a group


def _cut(kind: Kind, full: Tensor, parameter: Tensor, split: _Split | None) -> Tensor:
    if split is None:
        return full
    if kind == "gate_up":  # each rank holds a part of gate on top of the same part of up
        return torch.cat([half.chunk(split.size)[split.rank] for half in full.chunk(2)])
    return full.chunk(split.size, dim=parameter.partition_dim)[split.rank]  # pyright: ignore[reportAttributeAccessIssue]


def _glue(kind: Kind, parts: list[Tensor], dim: int) -> Tensor:
    if kind == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(parts, dim=dim)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One or more whole tensors that a parameter of some stage becomes, as the other stages must know them.

    names: one; with expert parallelism those of the experts at the same place on every rank.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def _whole_weights(
    chunks: Sequence[Any], shape: ModelShape, read: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Every megatron tensor, whole, on every rank, stage after stage."""
    pipeline = pipeline_group()
    local = list(named_weights(chunks))
    stages: list[Any] = [[_entry(name, parameter, chunks) for name, parameter in local]]
    if pipeline.size() > 1:
        mine, stages = stages[0], [None] * pipeline.size()
        dist.all_gather_object(stages, mine, group=pipeline)
    for stage, entries in enumerate(stages):
        for i, entry in enumerate(entries):
            if stage == pipeline.rank():
                weights = _gather(*local[i], shape, read)
            else:
                device = local[0][1].device
                weights = [torch.empty(entry.shape, dtype=entry.dtype, device=device) for _ in entry.names]
            for name, weight in zip(entry.names, weights, strict=True):
                if pipeline.size() > 1:
                    weight = weight.contiguous()
                    dist.broadcast(weight, dist.get_global_rank(pipeline, stage), group=pipeline)
                yield name, weight


def _entry(name: str, parameter: Tensor, chunks: Sequence[Any]) -> _Entry:
    shape = list(parameter.shape)
    split = _split_of(name, parameter)
    if split is not None:
        shape[parameter.partition_dim] *= split.size  # pyright: ignore[reportAttributeAccessIssue]
    ranks = expert_group().size()
    found = _LOCAL_EXPERT.search(name)
    names = [name]
    if found is not None and ranks > 1:
        per_rank = chunks[0].config.num_moe_experts // ranks
        place = int(found[1]) % per_rank
        names = [_LOCAL_EXPERT.sub(f"local_experts.{place + r * per_rank}.", name) for r in range(ranks)]
    return _Entry(tuple(names), tuple(shape), parameter.dtype)


def _gather(name: str, parameter: Tensor, shape: ModelShape, read: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The whole tensor of a parameter; for an expert, those of the same place on every expert-parallel rank."""
    weight = read(parameter).contiguous()
    split = _split_of(name, parameter)
    if split is not None:
        parts = [torch.empty_like(weight) for _ in range(split.size)]
        dist.all_gather(parts, weight, group=split.group)
        weight = _glue(weight_names(shape, name).kind, parts, parameter.partition_dim)  # pyright: ignore[reportAttributeAccessIssue]
    experts = expert_group()
    if not _is_expert(name) or experts.size() == 1:
        return [weight]
    parts = [torch.empty_like(weight) for _ in range(experts.size())]
    dist.all_gather(parts, weight.contiguous(), group=experts)
    return parts


def _split_of(name: str, parameter: Tensor) -> _Split | None:
    """The group that holds the parts of this parameter; None where every rank holds it whole."""
    split = _Split.expert_tensor() if _is_expert(name) else _Split.tensor()
    return split if split.size > 1 and getattr(parameter, "tensor_model_parallel", False) else None


class _Reader:
    """Tensors of a checkpoint folder by name. Experts saved as one tensor per layer are cut out of it."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise CheckpointError(f"{checkpoint} has no *.safetensors file; save the checkpoint in that format")

    def read(self, name: str) -> Tensor:
        if name in self._files:
            return self._files[name].get_tensor(name)
        expert = _HF_EXPERT.fullmatch(name)
        if expert is not None:
            prefix, number, kind = expert.groups()
            fused = f"{prefix}.down_proj" if kind == "down" else f"{prefix}.gate_up_proj"
            if fused in self._files:
                whole = self._files[fused].get_slice(fused)[int(number)]
                return whole if kind == "down" else whole.chunk(2)[0 if kind == "gate" else 1]
        raise CheckpointError(f"{self._checkpoint} has no tensor {name}; config.json asks for it")
