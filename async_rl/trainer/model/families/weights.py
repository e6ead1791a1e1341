"""Names of the tensors of a model: one by one, and all that its checkpoint must have."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from async_rl.trainer.model.families.family import ModelShape, WeightNames
from async_rl.weights.model_info import is_carried


def weight_names(shape: ModelShape, name: str) -> WeightNames:
    """Hugging Face names of a megatron weight with global layer (from 0) and expert numbers.

    `decoder.layers.2.mlp.experts.local_experts.5.linear_fc2.weight` of qwen3_moe is
    `model.layers.2.mlp.experts.5.down_proj.weight`.

    Raises:
        KeyError: the family has no such weight.
    """
    found = _names(shape, name)
    return WeightNames(found.kind, tuple(_in_checkpoint(shape, each) for each in found.names))


def _names(shape: ModelShape, name: str) -> WeightNames:
    """As `weight_names`, in a checkpoint of the text part alone."""
    if name in _OUTER:
        return _OUTER[name]
    if name == "output_layer.weight":
        return WeightNames("vocabulary", ("model.embed_tokens.weight" if shape.tied else "lm_head.weight",))
    layer, rest = _LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    expert = _EXPERT.fullmatch(rest)
    found = shape.family.expert_weights[expert[2]] if expert else shape.family.layer_weights[rest]
    number = expert[1] if expert else ""
    return WeightNames(found.kind, tuple(n.format(layer=layer, expert=number) for n in found.names))


def _in_checkpoint(shape: ModelShape, name: str) -> str:
    """`model.norm.weight` -> `model.language_model.norm.weight`, in a checkpoint with a vision tower."""
    return re.sub(r"^model\.", "model.language_model.", name) if shape.has_vision else name


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_OUTER = {
    "embedding.word_embeddings.weight": WeightNames("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": WeightNames("direct", ("model.norm.weight",)),
}


# Weights of a table that not every model of a family has -> whether one with these settings has them.
_OPTIONAL: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "self_attention.linear_qkv.bias": lambda model: model.get("add_qkv_bias") or model.get("add_bias_linear"),
    "self_attention.q_layernorm.weight": lambda model: model.get("qk_layernorm") and model.get("q_lora_rank", True),
    "self_attention.k_layernorm.weight": lambda model: model.get("qk_layernorm"),
    "self_attention.linear_q_proj.weight": lambda model: not model.get("q_lora_rank"),
    "self_attention.linear_q_down_proj.weight": lambda model: model.get("q_lora_rank"),
    "self_attention.linear_q_up_proj.weight": lambda model: model.get("q_lora_rank"),
    "mlp.shared_experts.linear_fc1.weight": lambda model: model.get("moe_shared_expert_intermediate_size"),
    "mlp.shared_experts.linear_fc2.weight": lambda model: model.get("moe_shared_expert_intermediate_size"),
}
_FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")


def expected_weights(shape: ModelShape) -> set[str]:
    """Hugging Face names of all tensors of a model, without those that are carried."""
    model, family = shape.megatron, shape.family
    names = ["model.embed_tokens.weight", "model.norm.weight", *(() if shape.tied else ("lm_head.weight",))]
    for layer, routed in enumerate(model.get("moe_layer_freq") or [0] * model["num_layers"]):
        linear = bool(model.get("linear_attention_freq") and model["linear_attention_freq"][layer])
        for ours, weight in family.layer_weights.items():
            is_dense, is_delta_net = ours.startswith("mlp.linear_"), ".linear_attn." in weight.names[0]
            of_layer = linear == is_delta_net if ours.startswith("self_attention.") else True
            of_layer &= is_dense != bool(routed) if ours.startswith("mlp.") else True
            if of_layer and _OPTIONAL.get(ours, bool)(model):
                names += [name.format(layer=layer) for name in weight.names]
        for expert in range(model["num_moe_experts"] if routed else 0):
            names += [
                name.format(layer=layer, expert=expert)
                for weight in family.expert_weights.values()
                for name in weight.names
            ]
    return {_in_checkpoint(shape, name) for name in names}


def compare_weights(shape: ModelShape, names: Iterable[str]) -> tuple[set[str], set[str]]:
    """(tensors of the model that `names` lack, other tensors in `names`), by Hugging Face names.

    Experts may be in one tensor of each layer. Left out are tensors that change nothing: rotary frequencies, the output
    head of tied embeddings, and tensors that are carried; see `is_carried`.
    """
    expected = expected_weights(shape)
    found = {each for name in names for each in _single_experts(name, shape=shape, expected=expected)}
    known = expected | ({"lm_head.weight"} if shape.tied else set())
    unknown = {
        name
        for name in found - known
        if not (name.endswith(".rotary_emb.inv_freq") or is_carried(name, num_layers=shape.megatron["num_layers"]))
    }
    return expected - found, unknown


def _single_experts(name: str, *, shape: ModelShape, expected: Collection[str]) -> Iterator[str]:
    """The tensors in a tensor of all experts, and other tensors as they are.

    `...experts.down_proj` of 2 experts: `...experts.0.down_proj.weight` and `...experts.1.down_proj.weight`.
    """
    fused = None if name in expected else _FUSED.fullmatch(name)
    if fused is None:
        yield name
        return
    for expert in range(shape.megatron.get("num_moe_experts") or 1):
        yield from (f"{fused[1]}.{expert}.{projection}_proj.weight" for projection in fused[2].split("_"))


def pattern(name: str) -> str:
    """`model.layers.2.mlp.experts.5.w1.weight` -> `model.layers.{layer}.mlp.experts.{expert}.w1.weight`."""
    return re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", name))


def grouped(names: Iterable[str], *, most: int = 5) -> str:
    """Names without their numbers, at most `most`, each with the number of tensors: `a.layers.{layer}.b (12), c`."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(pattern(name), []).append(name)
    shown = [f"{group} ({len(each)})" if len(each) > 1 else each[0] for group, each in groups.items()]
    return listed(shown, most=most)


def listed(entries: list[str], *, most: int = 5) -> str:
    """The first entries and the number of the others: `a, b and 3 more`."""
    return ", ".join(entries[:most]) + (f" and {len(entries) - most} more" if len(entries) > most else "")
