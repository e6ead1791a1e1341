"""Megatron's local layer specs with the modules that see rows (see attention.py) in the place of its own."""

from __future__ import annotations

from typing import Any, cast

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from async_rl.train.attention import RMSNorm, RowAttention
from async_rl.train.latent_attention import LatentAttention

_REPLACED: dict[Any, Any] = {
    WrappedTorchNorm: RMSNorm,
    DotProductAttention: RowAttention,
    MLASelfAttention: LatentAttention,
}


def layer_specs(config: TransformerConfig, *, stage: int | None) -> Any:
    """The layers of this rank as GPTModel takes them; stage: of a virtual pipeline."""
    return replace_modules(
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    )


def replace_modules(spec: Any) -> Any:
    """The same spec (block, layer or module) with the modules of this package in the place of megatron's."""
    if isinstance(spec, type):
        return _REPLACED.get(spec, spec)
    if isinstance(spec, list):
        return [replace_modules(part) for part in cast(list[Any], spec)]
    if isinstance(spec, ModuleSpec):
        spec.module = _REPLACED.get(spec.module, spec.module)
        spec.submodules = replace_modules(spec.submodules)
    elif hasattr(spec, "__dataclass_fields__"):
        for name in spec.__dataclass_fields__:
            setattr(spec, name, replace_modules(getattr(spec, name)))
    return spec
