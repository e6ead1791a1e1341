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
from async_rl.train.layers import is_expert, local_name

_LOCAL_EXPERT = re.compile(r"local_experts\.(\d+)\.")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load_weights(chunks: Sequence[Any], checkpoint: Path, *, shape: ModelShape) -> None:
    """Fill every parameter and correction bias of this rank from the safetensors files of a checkpoint folder.

    Of a tensor that is split over ranks only this rank's part is read.

    Raises:
        CheckpointError: a tensor is absent or has another shape, or there are layers for multi-token prediction.
    """
    reader = _Reader(checkpoint)
    reader.refuse_layers_from(shape.megatron["num_layers"])
    for name, weight in named_weights(chunks):
        names = weight_names(shape, name)
        split = _split_of(name, weight)
        parts = [reader.read(n, weight=weight, split=split) for n in names.names]
        try:
            part = _join_names(names, parts, query_groups=_query_groups(chunks[0].config, split))
            if names.kind == "vocabulary":
                part = torch.nn.functional.pad(part, (0, 0, 0, len(weight) - len(part)))
        except RuntimeError:  # parts that do not fit each other
            part = parts[0]
        if part.shape != weight.shape:
            found = ", ".join(f"{n} {list(p.shape)}" for n, p in zip(names.names, parts, strict=True))
            raise CheckpointError(
                f"{checkpoint}: {found} (this rank's part) make {name}, for which the config asks the shape "
                f"{list(weight.shape)}; config.json and weights do not belong together"
            )
        with torch.no_grad():
            weight.copy_(part)


def export_weights(
    chunks: Sequence[Any], *, shape: ModelShape, read: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor, a copy) of every weight. Collective over all ranks.

    Args:
        read: what of a parameter is exported, of its shape; None for its value. Only values have the correction biases
            of routers among them, which are no parameters.
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


def named_weights(chunks: Sequence[Any], *, parameters_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name in the local spec with global layer and expert numbers, weight) of this rank, in one order on a stage."""
    per_rank = (chunks[0].config.num_moe_experts or 0) // expert_group().size()
    first_expert = per_rank * expert_group().rank()
    for chunk in chunks:
        biases = [] if parameters_only else [(n, b) for n, b in chunk.named_buffers() if n.endswith(".expert_bias")]
        for name, weight in (*chunk.named_parameters(), *biases):
            name = local_name(name)
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                name = f"decoder.layers.{chunk.decoder.layers[int(number)].layer_number - 1}.{rest}"
            name = _LOCAL_EXPERT.sub(lambda m: f"local_experts.{int(m[1]) + first_expert}.", name)
            yield name, weight


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


# ---- Hugging Face names <-> one megatron tensor


def _query_groups(config: Any, split: _Split | None) -> int:
    """Key-value heads of this rank's part of a tensor."""
    return config.num_query_groups // (split.size if split else 1)


def _join_names(names: WeightNames, tensors: list[Tensor], *, query_groups: int) -> Tensor:
    match names.kind:
        case "qkv":
            return torch.cat([t.unflatten(0, (query_groups, -1)) for t in tensors], dim=1).flatten(0, 1)
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


# ---- parts on the ranks of a group -> one whole tensor


def _glue(kind: Kind, parts: list[Tensor], dim: int) -> Tensor:
    if kind == "gate_up":  # each rank holds a part of gate on top of the same part of up
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
    chunks: Sequence[Any], shape: ModelShape, read: Callable[[Tensor], Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """Every megatron tensor, whole, on every rank, stage after stage."""
    pipeline = pipeline_group()
    local = list(named_weights(chunks, parameters_only=read is not None))
    stages: list[Any] = [[_entry(name, parameter, chunks) for name, parameter in local]]
    if pipeline.size() > 1:
        mine, stages = stages[0], [None] * pipeline.size()
        dist.all_gather_object(stages, mine, group=pipeline)
    for stage, entries in enumerate(stages):
        for i, entry in enumerate(entries):
            if stage == pipeline.rank():
                weights = _gather(*local[i], shape, read or torch.detach)
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
    if not is_expert(name) or experts.size() == 1:
        return [weight]
    parts = [torch.empty_like(weight) for _ in range(experts.size())]
    dist.all_gather(parts, weight.contiguous(), group=experts)
    return parts


def _split_of(name: str, parameter: Tensor) -> _Split | None:
    """The group that holds the parts of this parameter; None where every rank holds it whole."""
    split = _Split.expert_tensor() if is_expert(name) else _Split.tensor()
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

    def refuse_layers_from(self, first: int) -> None:
        """Refuse layers after the decoder's: checkpoints keep those for multi-token prediction there.

        Raises:
            CheckpointError: there are some; they would be neither trained nor exported.
        """
        further = [name for name in self._files if (found := _HF_LAYER.match(name)) and int(found[1]) >= first]
        if further:
            raise CheckpointError(
                f"{self._checkpoint} holds {len(further)} tensors of layers after num_hidden_layers={first}, the first "
                f"{min(further)}: multi-token prediction, which the trainer does not train. Save the checkpoint "
                "without them, as load and save_pretrained of transformers do"
            )

    def read(self, name: str, *, weight: Tensor, split: _Split | None) -> Tensor:
        """This rank's part of a tensor that is split as `weight` is; the last of a vocabulary may be short.

        Raises:
            CheckpointError: there is no such tensor.
        """
        saved, where = self._find(name)
        if split is not None:
            axis = weight.partition_dim + len(where) - weight.dim()  # pyright: ignore[reportAttributeAccessIssue]
            start, stop = where[axis].start, where[axis].stop
            size = -(-(stop - start) // split.size)
            first = min(start + split.rank * size, stop)
            where[axis] = slice(first, min(first + size, stop))
        part = saved[tuple(where)]
        return part.squeeze(0) if len(where) > weight.dim() else part

    def _find(self, name: str) -> tuple[Any, list[slice]]:
        """The saved tensor that `name` is or lies in, and where it lies."""
        if name in self._files:
            saved = self._files[name].get_slice(name)
            return saved, [slice(0, size) for size in saved.get_shape()]
        expert = _HF_EXPERT.fullmatch(name)
        if expert is not None:
            prefix, number, kind = expert.groups()
            fused = f"{prefix}.down_proj" if kind == "down" else f"{prefix}.gate_up_proj"
            if fused in self._files:
                saved = self._files[fused].get_slice(fused)
                _, rows, columns = saved.get_shape()
                half = {"gate": slice(0, rows // 2), "up": slice(rows // 2, rows), "down": slice(0, rows)}[kind]
                return saved, [slice(int(number), int(number) + 1), half, slice(0, columns)]
        raise CheckpointError(f"{self._checkpoint} has no tensor {name}; config.json asks for it")
