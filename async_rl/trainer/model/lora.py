"""Low-rank adapters (LoRA, arXiv 2106.09685) that are merged into the weights in every forward pass.

An adapted layer computes with the merged weight W + alpha / rank * B A, rounded to the dtype of W, instead of adding a
low-rank path to its output:

- The engines serve the merged weight. The trainer uses the same numbers, also in bfloat16, so that a ratio of trainer
  and engine compares the same distribution.
- The gradients of A and B follow from the gradient that megatron computes for the merged weight in every parallel
  layout. Only their sum over the ranks that split the weight is added here.

Merging multiplies rank x the size of the weight in the forward and also in the backward pass of a micro-batch: a share
of rank / tokens of the layer's own multiplications. The merged weight and its gradient exist for one layer at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from async_rl.trainer.model.convert import LORA, Split, join_names, named_tensors, num_query_groups, numbered
from async_rl.trainer.model.families import Kind, ModelShape, WeightNames, weight_names
from async_rl.trainer.model.layers import is_expert
from async_rl.trainer.model.layout import module_name
from async_rl.trainer.model.model import LoraConfig


class Adapter(nn.Module):
    """The matrices of one projection: B A has the shape of its weight.

    Args:
        a: float32 [rank, inputs], this rank's part; [experts, rank, inputs] of all experts of a rank.
        outputs: rows of the projection on this rank.
    """

    def __init__(self, a: Tensor, *, outputs: int) -> None:
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(a.new_zeros(*a.shape[:-2], outputs, a.shape[-2]))


class LayerAdapters(nn.ModuleDict):
    """Adapters of one linear layer with one or several projections (q, k and v; gate and up), by Hugging Face name.

    There are none if none of the layer's projections is a target.

    Args:
        name: local name of the weight of the layer, or of all experts of a rank.
        weight: this rank's part of it.
        config: rank, scale and layers.
        shape: properties of the model.
        seed: number that fixes the initial values.
        megatron: megatron's config.
    """

    def __init__(
        self, name: str, weight: Any, *, config: LoraConfig, shape: ModelShape, seed: int, megatron: Any
    ) -> None:
        super().__init__()
        expert, outer = is_expert(name), weight.dim() - 2
        names = [weight_names(shape, local) for local, _ in numbered(name, weight, config=megatron)]
        # The dimension that is split; None if each rank has the complete weight for some of the tokens.
        dimension = None if weight.partition_dim < 0 else weight.partition_dim - outer
        split = Split.of(name)
        groups = num_query_groups(megatron, split if dimension == 0 else None)
        outputs = _outputs(names[0].kind, weight.shape[-2], key_rows=groups * megatron.kv_channels)
        for fulls, rows in zip(zip(*(n.names for n in names), strict=True), outputs, strict=True):
            if config.target_modules and module_name(fulls[0]) not in config.target_modules:
                continue
            inputs = weight.shape[-1] * (split.size if dimension == 1 else 1)
            parts = [_initial(full, rank=config.rank, inputs=inputs, seed=seed) for full in fulls]
            a = torch.stack(parts) if outer else parts[0]
            if dimension == 1:
                a = a.chunk(split.size, dim=-1)[split.rank].contiguous()
            adapter = self[module_name(fulls[0])] = Adapter(a.to(weight.device), outputs=rows)
            _mark(adapter.a, dimension=outer + 1 if dimension == 1 else None, split=split, expert=expert)
            _mark(adapter.b, dimension=outer if dimension == 0 else None, split=split, expert=expert)
        self._names, self._outputs, self._query_groups, self._config = names[0], outputs, groups, megatron
        self._scale, self._split, self._dimension = config.alpha / config.rank, split, dimension

    def merge(self, weight: Tensor, *, expert: int | None = None) -> Tensor:
        """The weight that the layer uses, in the shape and dtype of `weight`.

        Args:
            expert: number of the expert that `weight` is of; None for the whole layer.
        """
        products: list[Tensor] = []
        for name, rows in zip(self._names.names, self._outputs, strict=True):
            if module_name(name) in self:
                products.append(self._product(cast(Adapter, self[module_name(name)]), expert))
            else:
                shape = (*weight.shape[:-2], rows, weight.shape[-1])
                products.append(weight.new_zeros(shape, dtype=torch.float32))
        if weight.dim() == 3:
            product = torch.cat(products, dim=1)  # one projection, or gate and up
        else:
            product = join_names(self._names, products, config=self._config, query_groups=self._query_groups)
        return product.mul_(self._scale).add_(weight).to(weight.dtype)  # in place, because it is large

    def _product(self, adapter: Adapter, expert: int | None) -> Tensor:
        """B A of this rank. A matrix that is equal on the ranks of the split gets the sum of their gradients."""
        a = adapter.a if self._dimension == 1 else _summed(adapter.a, self._split)
        b = adapter.b if self._dimension == 0 else _summed(adapter.b, self._split)
        return b @ a if expert is None else b[expert] @ a[expert]


def add_adapters(chunks: Sequence[GPTModel], *, config: LoraConfig, shape: ModelShape, seed: int) -> None:
    """Freeze all weights and add adapters to linear layers. Call this before gradient buffers are made.

    Args:
        chunks: model chunks of this rank.
        config: rank, scale and layers.
        shape: properties of the model.
        seed: number that fixes the initial values; they are the same in every parallel layout.
    """
    layers: dict[int, Any] = {
        id(module.weight): module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if name.rpartition(".")[2].startswith("linear_")
    }
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            # A recomputed layer whose input needs no gradient would give none to its adapters.
            chunk.embedding.register_forward_hook(
                lambda _module, _inputs, output: output.requires_grad_(torch.is_grad_enabled())
            )
    for name, weight in list(named_tensors(chunks)):
        if (layer := layers.get(id(weight))) is None:
            continue
        adapters = LayerAdapters(name, weight, config=config, shape=shape, seed=seed, megatron=chunks[0].config)
        if len(adapters):
            layer.lora = cast(Any, weight).lora = adapters  # of the weight for exported_value
            layer._forward_impl = _merging(layer._forward_impl, adapters)


def adapter_names(shape: ModelShape, name: str) -> WeightNames:
    """Name of an adapter's matrix in PEFT, without its prefix, as `weight_names` for the weights.

    `decoder.layers.2.self_attention.linear_qkv.lora.q_proj.a` is `model.layers.2.self_attn.q_proj.lora_A.weight`.
    """
    layer, _, rest = name.partition(LORA)
    projection, _, matrix = rest.rpartition(".")
    (found,) = [n for n in weight_names(shape, f"{layer}.weight").names if module_name(n) == projection]
    return WeightNames("direct", (f"{found.removesuffix('.weight')}.lora_{matrix.upper()}.weight",))


def _outputs(kind: Kind, rows: int, *, key_rows: int) -> list[int]:
    """Rows of each Hugging Face tensor in a weight with `rows` rows; `key_rows` are keys (only for qkv).

    qkv with 4 query heads and 2 key-value heads of size 32, 256 rows: 128, 64, 64.
    """
    match kind:
        case "qkv":
            return [rows - 2 * key_rows, key_rows, key_rows]
        case "gate_up":
            return [rows // 2, rows // 2]
        case "direct" | "vocabulary":
            return [rows]
        case "stacked" | "stacked_gate_up":
            raise AssertionError(f"{kind}: `layout_problems` refuses LoRA for experts in one tensor")
        case "gated_qkv" | "delta_conv" | "delta_qkvz" | "delta_ba":
            raise AssertionError(f"{kind}: `layout_problems` refuses LoRA for gated delta nets")


def _initial(name: str, *, rank: int, inputs: int, seed: int) -> Tensor:
    """A as in PEFT: uniform with bound 1 / sqrt(inputs). It depends on the name and the seed, not on the layout."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return (torch.rand(rank, inputs, generator=generator) * 2 - 1) / inputs**0.5


def _mark(parameter: Any, *, dimension: int | None, split: Split, expert: bool) -> None:
    """Set megatron's marks, so that the gradient norm counts every entry once.

    Megatron counts a parameter without `tensor_model_parallel` on the first tensor-parallel rank only. The ranks of an
    expert are other ones, so that its duplicates are marked as shared instead.
    """
    parameter.partition_dim, parameter.partition_stride = -1 if dimension is None else dimension, 1
    parameter.tensor_model_parallel = expert or dimension is not None
    if expert:
        parameter.allreduce = False
        parameter.shared = dimension is None and split.rank > 0


class _Merged(NamedTuple):
    """Stands for a tensor in the memory of the merged weight; the backward pass repeats the merge."""

    size: torch.Size
    """Of the tensor."""
    stride: tuple[int, ...]
    """Of the tensor."""
    offset: int
    """Of the tensor in the memory."""


def _merging(multiply: Callable[..., Tensor], adapters: LayerAdapters) -> Callable[..., Tensor]:
    """The product of a layer with its merged weight; that weight is not kept until the backward pass."""

    def merged(*, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        whole = adapters.merge(weight)
        memory = whole.untyped_storage().data_ptr()

        def pack(saved: Tensor) -> Tensor | _Merged:
            if saved.untyped_storage().data_ptr() != memory:
                return saved
            return _Merged(saved.size(), saved.stride(), int(saved.storage_offset()))

        @torch.no_grad()
        def unpack(saved: Tensor | _Merged) -> Tensor:
            return adapters.merge(weight).as_strided(*saved) if isinstance(saved, _Merged) else saved

        with saved_tensors_hooks(pack, unpack):
            return multiply(input=input, weight=whole, **settings)

    return merged


def _summed(matrix: Tensor, split: Split) -> Tensor:
    """The matrix; its gradient is summed over the ranks of the split.

    Megatron's own function for it loses the sum if the gradient is not contiguous.
    """

    def over_ranks(gradient: Tensor) -> Tensor:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=split.group)
        return summed

    shared = matrix.view_as(matrix)
    if split.size > 1 and shared.requires_grad:
        shared.register_hook(over_ranks)
    return shared
