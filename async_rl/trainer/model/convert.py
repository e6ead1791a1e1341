"""Loads Hugging Face checkpoints into the model chunks of a rank, and converts complete tensors back to their form.

Loading reads only the parts of this rank. `WeightSource` makes complete tensors of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from async_rl.trainer.distributed import expert_group, expert_tensor_group, tensor_group
from async_rl.trainer.model.families import Kind, ModelShape, WeightNames, weight_names
from async_rl.trainer.model.layers import each_expert, is_expert, local_name
from async_rl.trainer.model.layout import weight_problems
from async_rl.weights.model_info import CheckpointError, is_quantized

STACKED: tuple[Kind, ...] = ("stacked", "stacked_gate_up")
DELTA: tuple[Kind, ...] = ("delta_conv", "delta_qkvz", "delta_ba")
GATE_UP: tuple[Kind, ...] = ("gate_up", "stacked_gate_up")
_LOCAL_EXPERT = re.compile(r"local_experts\.(\d+)\.")
LORA = ".lora."
"""Part of the name of every LoRA parameter: `{linear layer}.lora.{projection}.a`."""
_HF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def load_weights(chunks: Sequence[Any], checkpoint: Path, *, shape: ModelShape) -> None:
    """Load every parameter and correction bias of this rank from the safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: the weights are quantized, a tensor is missing or has another shape, or there are more layers
            than the config says.
    """
    if is_quantized(checkpoint):
        raise CheckpointError(f"{checkpoint} has quantized weights; load the plain copy that `dequantize` makes")
    reader = _Reader(checkpoint)
    if problems := list(weight_problems(shape, reader.names)):  # some would be neither trained nor exported
        raise CheckpointError(f"{checkpoint}: {'; '.join(problems)}")
    for name, weight in named_weights(chunks):
        names = weight_names(shape, name)
        split, share = split_of(name, weight), None
        if names.kind in ("qkv", "gated_qkv") and split is not None:
            split, share = split.of_heads(chunks[0].config.num_query_groups)
        elif names.kind in DELTA:  # the rows of a head stand together only when they are joined
            split, share = None, split
        expert = expert_of(name) if names.kind in STACKED else None
        parts = [reader.read(n, weight=weight, split=split, expert=expert) for n in names.names]
        try:
            groups = num_query_groups(chunks[0].config, split)
            part = join_names(names, parts, config=chunks[0].config, query_groups=groups)
            if share is not None:
                part = part.tensor_split(share.size)[share.rank]
            if names.kind == "vocabulary":
                part = torch.nn.functional.pad(part, (0, 0, 0, len(weight) - len(part)))
        except RuntimeError:  # parts have incompatible shapes
            part = parts[0]
        if part.shape != weight.shape:
            found = ", ".join(f"{n} {list(p.shape)}" for n, p in zip(names.names, parts, strict=True))
            raise CheckpointError(
                f"{checkpoint}: {found} (this rank's part) form {name}, which must have the shape {list(weight.shape)} "
                "according to the config; config.json and weights do not belong together"
            )
        with torch.no_grad():
            weight.copy_(part)


def named_weights(chunks: Sequence[Any], *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the local spec, weight) of this rank, in the same order on all ranks of a pipeline stage.

    Layer and expert numbers in the names are global. With 8 experts on 4 expert-parallel ranks, `local_experts.1` of
    rank 2 becomes `local_experts.5`. With `adapters` the parameters are those of LoRA alone, without it the others; the
    first of Qwen3 is `decoder.layers.0.self_attention.linear_qkv.lora.q_proj.a`.
    """
    for name, weight in named_tensors(chunks):
        if (LORA in name) == adapters:
            yield from numbered(name, weight, config=chunks[0].config)


def named_tensors(chunks: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (local name with global layer number, parameter or correction bias) of this rank."""
    for chunk in chunks:
        biases = [(n, b) for n, b in chunk.named_buffers() if n.endswith(".expert_bias")]
        for name, weight in (*chunk.named_parameters(), *biases):
            name = local_name(name)
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                name = f"decoder.layers.{chunk.decoder.layers[int(number)].layer_number - 1}.{rest}"
            yield name, weight


def numbered(name: str, weight: Tensor, *, config: Any) -> Iterator[tuple[str, Tensor]]:
    """A weight of `named_tensors`, or that of each expert in it, with the global number of the expert in the name."""
    first = (config.num_moe_experts or 0) // expert_group().size() * expert_group().rank()
    for local, part in each_expert(name, weight):
        yield _LOCAL_EXPERT.sub(lambda m: f"local_experts.{int(m[1]) + first}.", local), part


@dataclass(frozen=True, slots=True)
class Split:
    """A group of ranks that each have a part of a tensor."""

    group: dist.ProcessGroup
    """The group."""
    size: int
    """Number of parts."""
    rank: int
    """Number of this rank's part."""

    @classmethod
    def of(cls, name: str) -> Split:
        """Ranks with parts of the weight with this local name: of an expert, or of a dense weight."""
        group = expert_tensor_group() if is_expert(name) else tensor_group()
        return cls(group, group.size(), group.rank())

    def of_heads(self, query_groups: int) -> tuple[Split, Split | None]:
        """Split of whole key-value heads, and that of one head with its query heads if several ranks share it.

        With 2 key-value heads and 4 query heads, the rows of qkv are q0 q1 k0 v0 q2 q3 k1 v1. On 4 ranks, rank 0 has
        q0 q1, rank 1 has k0 v0, rank 2 has q2 q3 and rank 3 has k1 v1: rank 3 has part 1 of 2 within part 1 of 2.
        """
        if self.size <= query_groups:
            return self, None
        sharing = self.size // query_groups
        head, place = divmod(self.rank, sharing)
        return Split(self.group, query_groups, head), Split(self.group, sharing, place)


# ---- Hugging Face names <-> one megatron tensor


def num_query_groups(config: Any, split: Split | None) -> int:
    """Number of key-value heads in this rank's part of a tensor."""
    return config.num_query_groups // (split.size if split else 1)


def join_names(names: WeightNames, tensors: list[Tensor], *, config: Any, query_groups: int) -> Tensor:
    """One megatron tensor of the Hugging Face tensors `names`; `query_groups`: key-value heads in it.

    qkv with 4 query heads, 2 key-value heads and head size 1: the rows are q0 q1 k0 v0 q2 q3 k1 v1. gated_qkv
    with q0 g0 q1 g1 and so on: q0 q1 g0 g1 k0 v0 q2 q3 g2 g3 k1 v1. delta_qkvz of (q0 q1 k0 k1 v0 v1 v2 v3) and
    (z0 z1 z2 z3), with 2 key heads and 4 value heads: q0 k0 v0 v1 z0 z1 q1 k1 v2 v3 z2 z3. stacked_gate_up with the
    columns g0 u0 g1 u1: the rows are g0 g1 u0 u1.
    """
    match names.kind:
        case "qkv":
            return torch.cat([t.unflatten(0, (query_groups, -1)) for t in tensors], dim=1).flatten(0, 1)
        case "gated_qkv":
            queries, keys, values = (t.unflatten(0, (query_groups, -1)) for t in tensors)
            queries = queries.unflatten(1, (-1, 2, keys.shape[1])).transpose(1, 2).flatten(1, 3)
            return torch.cat((queries, keys, values), dim=1).flatten(0, 1)
        case "delta_conv" | "delta_qkvz" | "delta_ba":
            heads, sizes = config.linear_num_key_heads, _delta_sizes(names.kind, config)
            split = (t.split([heads * n for n in rows]) for t, rows in zip(tensors, sizes, strict=True))
            return torch.cat([part.unflatten(0, (heads, -1)) for parts in split for part in parts], 1).flatten(0, 1)
        case "gate_up":
            return torch.cat(tensors)
        case "stacked":
            return tensors[0].t()  # of a vector: itself
        case "stacked_gate_up":
            return tensors[0].t().unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        case "direct" | "vocabulary":
            return tensors[0]


def split_names(kind: Kind, weight: Tensor, config: Any) -> list[Tensor]:
    """Inverse of `join_names` for a complete tensor."""
    match kind:
        case "qkv":
            grouped = weight.view(config.num_query_groups, -1, *weight.shape[1:])
            head = config.kv_channels
            sizes = [grouped.shape[1] - 2 * head, head, head]
            return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
        case "gated_qkv":
            queries, keys, values = split_names("qkv", weight, config)
            queries = queries.unflatten(0, (config.num_query_groups, 2, -1, config.kv_channels))
            return [queries.transpose(1, 2).flatten(0, 3), keys, values]
        case "delta_conv" | "delta_qkvz" | "delta_ba":
            of_heads, sizes = weight.unflatten(0, (config.linear_num_key_heads, -1)), _delta_sizes(kind, config)
            tensors = of_heads.split([sum(rows) for rows in sizes], dim=1)
            split = (tensor.split(rows, dim=1) for tensor, rows in zip(tensors, sizes, strict=True))
            return [torch.cat([part.flatten(0, 1) for part in parts]) for parts in split]
        case "gate_up":
            return list(weight.chunk(2))
        case "stacked":
            return [weight.t()]
        case "stacked_gate_up":
            return [weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1).t()]
        case "direct" | "vocabulary":
            return [weight]


def _delta_sizes(kind: Kind, config: Any) -> list[list[int]]:
    """Rows for a key head in the sections of each Hugging Face tensor.

    q, k and v of 16, 16 and 2 * 24 channels: delta_conv [[16, 16, 48]], delta_qkvz [[16, 16, 48], [48]], delta_ba
    [[2], [2]].
    """
    key, values = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
    if kind == "delta_ba":
        return [[values], [values]]
    channels = values * config.linear_value_head_dim
    return [[key, key, channels], *([[channels]] if kind == "delta_qkvz" else [])]


# ---- parts on the ranks of a group -> one complete tensor


def glue_parts(kind: Kind, parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate the parts of all ranks. gate_up parts (g0, u0) and (g1, u1) become (g0, g1, u0, u1)."""
    if kind in GATE_UP:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(parts, dim=dim)


@torch.no_grad()
def exported_value(weight: Tensor) -> Tensor:
    """The value that a forward pass uses: that of the parameter, or the merged one of a layer with LoRA adapters."""
    adapters = getattr(getattr(weight, "whole", weight), "lora", None)
    if adapters is None:
        return weight.detach()
    return adapters.merge(weight.detach(), expert=getattr(weight, "expert", None))


def split_of(name: str, parameter: Tensor) -> Split | None:
    """The group that splits a parameter; None if every rank has the complete parameter."""
    split = Split.of(name)
    return split if split.size > 1 and getattr(parameter, "partition_dim", -1) >= 0 else None


def expert_of(name: str) -> int:
    """Number of the expert that a local name belongs to."""
    return int(_LOCAL_EXPERT.findall(name)[0])


class _Reader:
    """Reads tensors of a checkpoint folder by name, also experts that are saved as one fused tensor per layer.

    Raises:
        CheckpointError: the folder has no safetensors file.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise CheckpointError(f"{checkpoint} has no *.safetensors file; save the checkpoint in that format")

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._files

    def read(self, name: str, *, weight: Tensor, split: Split | None, expert: int | None = None) -> Tensor:
        """This rank's part of a saved tensor, for a parameter `weight` with split `split`.

        With `expert`, the part of this expert in a tensor of all experts, whose matrices are transposed. The columns
        g0 u0 g1 u1 of gate and up are those of linear_fc1 on two ranks, g0 u0 on the first.

        The last part of a vocabulary may be shorter than `weight`: 9 rows on 2 ranks are the parts 0..4 and 5..8.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        saved, where = self._find(name)
        if expert is not None:
            where[0] = slice(expert, expert + 1)
        if split is not None:
            dim: int = weight.partition_dim  # pyright: ignore[reportAttributeAccessIssue]
            axis = dim + len(where) - weight.dim() if expert is None else len(where) - 1 - dim
            start, stop = where[axis].start, where[axis].stop
            size = -(-(stop - start) // split.size)
            first = min(start + split.rank * size, stop)
            where[axis] = slice(first, min(first + size, stop))
        part = saved[tuple(where)]
        return part.squeeze(0) if len(where) > weight.dim() else part

    def _find(self, name: str) -> tuple[Any, list[slice]]:
        """The saved tensor that contains `name`, and the slices of `name` in it.

        For `...experts.3.up_proj.weight` in a fused gate_up_proj [8, 128, 64]: slices 3:4, 64:128, 0:64.
        """
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
        raise CheckpointError(f"{self._checkpoint} has no tensor {name}, which config.json requires")
