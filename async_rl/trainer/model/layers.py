"""Megatron's layer specs with the attention of this package (see attention.py).

There are two specs: local, and Transformer Engine. The latter fuses a norm into the following linear layer and has a
parameter for each expert, so that the names of weights differ. `local_name` maps them to the names of the local spec,
and the rest of the package uses these. The experts of the local spec are one parameter per linear layer; `each_expert`
gives their weights one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_te_version, is_te_min_version
from torch import Tensor

from async_rl.trainer.model.attention import AllHeadsNorm, RMSNorm, RowAttention
from async_rl.trainer.model.delta_net import SPLIT_VECTORS, GatedAttention, GatedDeltaNet
from async_rl.trainer.model.experts import GROUPED
from async_rl.trainer.model.fused_attention import FusedRowAttention
from async_rl.trainer.model.latent_attention import LatentAttention
from async_rl.trainer.model.model import TrainerConfig

# Attention of older versions supports neither a scale of the scores nor values with another size than keys, and
# megatron then ignores these settings silently.
_OLDEST_TE = "1.10.0"
_REPLACED: dict[Any, Any] = {
    WrappedTorchNorm: RMSNorm,
    DotProductAttention: RowAttention,
    MLASelfAttention: LatentAttention,
}


def uses_transformer_engine(config: TrainerConfig, *, device: torch.device) -> bool:
    """Whether `trainer.layer_spec` selects Transformer Engine on this rank.

    Raises:
        ValueError: Transformer Engine is required, but it cannot be used on this rank.
    """
    if config.layer_spec == "local":
        return False
    if device.type != "cuda":
        lacking = f"this rank computes on {device.type}; give it a GPU"
    elif not gpt_layer_specs.HAVE_TE:
        lacking = "transformer_engine cannot be imported; install transformer-engine[pytorch]"
    elif not is_te_min_version(_OLDEST_TE):
        lacking = f"transformer_engine is {get_te_version()}; install {_OLDEST_TE} or later"
    else:
        lacking = ""
    if config.layer_spec == "auto":
        return not lacking and not config.lora.rank and config.dtype == "bfloat16"
    if lacking:
        raise ValueError(f"trainer.layer_spec is transformer_engine, but {lacking}, or use layer_spec=auto or local")
    return True


def layer_specs(
    config: TransformerConfig, *, stage: int | None, transformer_engine: bool = False, norms_all_heads: bool = False
) -> Any:
    """Spec of the layers of this rank for GPTModel.

    Args:
        config: megatron's config.
        stage: virtual pipeline stage; None without a virtual pipeline.
        transformer_engine: whether the spec is that of Transformer Engine, not the local one.
        norms_all_heads: see Family.
    """
    described = copy(config)
    described.moe_grouped_gemm = transformer_engine  # without it, GROUPED takes the place of megatron's loop
    specs = gpt_layer_specs.get_gpt_decoder_block_spec(
        described, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=stage
    )
    specs = _with_row_attention(specs) if transformer_engine else replace_modules(specs)
    if norms_all_heads:
        for layer in specs.layer_specs:
            parts = layer.submodules.self_attention.submodules
            parts.q_layernorm = ModuleSpec(AllHeadsNorm, params={"heads": config.num_attention_heads})
            parts.k_layernorm = ModuleSpec(AllHeadsNorm, params={"heads": config.num_query_groups})
    if config.linear_attention_freq is not None:
        _mix_attention(specs, config, stage=stage)
    return specs


def _mix_attention(specs: Any, config: TransformerConfig, *, stage: int | None) -> None:
    """Put gated delta nets into the layers that `linear_attention_freq` marks, and gated attention into the others."""
    pattern = cast(list[int], config.linear_attention_freq)
    first = get_transformer_layer_offset(config, vp_stage=stage)
    for place, layer in enumerate(specs.layer_specs):
        attention, parts = layer.submodules.self_attention, layer.submodules.self_attention.submodules
        if pattern[first + place]:
            linears = GatedDeltaNetSubmodules(in_proj=parts.linear_qkv, out_proj=parts.linear_proj)
            mixer = ModuleSpec(GatedDeltaNet, submodules=cast(Any, linears))
        else:
            mixer = replace(attention, module=GatedAttention)
        specs.layer_specs[place] = replace(layer, submodules=replace(layer.submodules, self_attention=mixer))


def replace_modules(spec: Any) -> Any:
    """Replace megatron's modules in a spec (block, layer or module) by the modules of this package."""
    if isinstance(spec, type):
        return _REPLACED.get(spec, spec)
    if isinstance(spec, list):
        return [replace_modules(part) for part in cast(list[Any], spec)]
    if isinstance(spec, ModuleSpec):
        if spec.module is SequentialMLP:
            return GROUPED
        spec.module = _REPLACED.get(spec.module, spec.module)
        spec.submodules = replace_modules(spec.submodules)
    elif hasattr(spec, "__dataclass_fields__"):
        for name in spec.__dataclass_fields__:
            setattr(spec, name, replace_modules(getattr(spec, name)))
    return spec


def _with_row_attention(specs: Any) -> Any:
    """Wrap the attention of Transformer Engine's spec in FusedRowAttention."""
    for layer in {id(layer): layer for layer in specs.layer_specs}.values():  # layers of one kind share a spec
        attention = layer.submodules.self_attention
        attention.module = _REPLACED.get(attention.module, attention.module)
        parts = attention.submodules
        parts.core_attention = partial(FusedRowAttention, kernel=parts.core_attention)
    return specs


# ---- names and roles of weights

_LOCAL_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"), r"self_attention.\1_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\..+)")
_SPLIT_ROWS = (
    *("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1"),
    *("in_proj_qkvz", "in_proj_ba"),
)
_SPLIT_COLUMNS = ("linear_proj", "linear_fc2", "out_proj")
_OUTER = ("word_embeddings", "output_layer")
_SPLIT_VECTORS = ("softmax_offset", *SPLIT_VECTORS)  # of each head


def local_name(name: str) -> str:
    """Name of a weight in the local spec, from its name in either spec. Layer and expert numbers do not change.

    `mlp.experts.linear_fc1.weight5` -> `mlp.experts.local_experts.5.linear_fc1.weight`, and
    `mlp.experts.linear_fc1.weight`, of all experts of a rank, does not change.
    """
    for pattern, replacement in _LOCAL_NAMES:
        name, found = pattern.subn(replacement, name)
        if found:
            break
    return name


def is_expert(name: str) -> bool:
    """Whether a weight with this local name belongs to an expert, or to all of a rank."""
    return ".experts." in name


def is_grouped(name: str) -> bool:
    """Whether a weight with this local name has those of all experts of a rank, along a first dimension."""
    return _GROUPED.search(name) is not None


def each_expert(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (local name, weight) of each expert in a grouped weight, else the weight itself.

    `mlp.experts.linear_fc1.weight` [8, 128, 64] gives `mlp.experts.local_experts.5.linear_fc1.weight` [128, 64] as the
    sixth. Each shares its memory with the whole, and has the attributes `whole` and `expert`, here 5.
    """
    if not is_grouped(name):
        yield name, weight
        return
    for number, row in enumerate(weight.detach()):
        part = cast(Any, row)
        part.whole, part.expert = weight, number
        part.partition_dim = max(-1, cast(Any, weight).partition_dim - 1)
        yield _GROUPED.sub(rf"mlp.experts.local_experts.{number}.\1", name), part


def split_dimension(name: str, weight: Tensor) -> int | None:
    """The dimension of a weight that tensor parallelism splits; None if each rank has the complete weight.

    Args:
        name: local name.
        weight: the weight or this rank's part.
    """
    module, _, kind = name.rpartition(".")
    of, first = module.rpartition(".")[2], int(is_grouped(name))
    if kind in _SPLIT_VECTORS or (of in (*_SPLIT_ROWS, *_OUTER) and kind in ("weight", "bias")):
        return first
    return first + 1 if of in _SPLIT_COLUMNS and kind == "weight" else None
