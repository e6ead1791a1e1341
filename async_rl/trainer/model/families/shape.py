"""Properties of a model from its Hugging Face config."""

from __future__ import annotations

from async_rl.trainer.model.families.family import Family, HFConfig, ModelShape, UnbuiltFeature, refuse_unless
from async_rl.trainer.model.families.rope import read_rope
from async_rl.weights.model_info import VISION_CONFIG, quantization_problem

# Fields that vLLM reads, and transformers in none of these families -> the value that changes nothing.
_READ_BY_ENGINES = {
    **{"dual_chunk_attention_config": None, "index_topk": None, "llama_4_scaling": None},
    **{"bias": False, "is_causal": True, "logit_scale": 1.0, "qk_norm": False},
}


def shape_of(config: HFConfig, family: Family) -> ModelShape:
    """Properties of a model of a family.

    Raises:
        UnbuiltFeature: the trainer does not build a value in the config.
        KeyError: the config lacks a field.
    """
    _refuse_common(config, family)
    megatron = family.megatron(config)
    return ModelShape(
        family=family,
        megatron=megatron,
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        rope=read_rope(
            config,
            head_dim=megatron.get("qk_pos_emb_head_dim") or megatron["kv_channels"],
            kinds=family.rope_types,
            partial_rotary=family.partial_rotary,
        ),
        tied=bool(config.get("tie_word_embeddings", False)),
        num_carried_layers=config.get("num_nextn_predict_layers") or 0,
        has_vision=config.get(VISION_CONFIG) is not None,
    )


def _refuse_common(config: HFConfig, family: Family) -> None:
    """Refuse features that the trainer supports in no family, and kinds of layers that this family does not have."""
    if problem := quantization_problem(config):
        raise UnbuiltFeature(*problem)
    refuse_unless(config, "hidden_act", ("silu",), "the trainer builds gated SiLU layers")
    refuse_unless(config, "mlp_bias", (False, None), "the trainer builds MLPs without bias")
    refuse_unless(config, "use_sliding_window", (False, None), "the trainer attends to the whole sequence")
    for field, neutral in _READ_BY_ENGINES.items():
        refuse_unless(config, field, (neutral, None), "engines read it, but transformers and the trainer do not")
    if other := sorted(set(config.get("layer_types") or ()) - {*family.layer_types}):
        raise UnbuiltFeature("layer_types", other, f"the trainer builds {', '.join(family.layer_types)} in this family")
