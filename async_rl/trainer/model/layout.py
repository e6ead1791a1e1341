"""Whether a model and its files suit the parallel layout of the trainer. This module must not import megatron."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from async_rl.trainer.model.families import ModelShape
from async_rl.trainer.model.families.weights import compare_weights, grouped
from async_rl.trainer.model.model import TrainerConfig
from async_rl.weights.model_info import layer_of


def layout_problems(shape: ModelShape, config: TrainerConfig) -> Iterator[str]:
    """Sizes of the layout that the model cannot be split into, and replay of a model without routers."""
    parallel, model = config.parallel, shape.megatron
    heads, groups = model["num_attention_heads"], model["num_query_groups"]
    experts = model.get("num_moe_experts") or 0
    expert_tensor = parallel.expert_tensor_size if experts else 1
    shared = model.get("moe_shared_expert_intermediate_size")
    rows = (heads * (2 if model.get("attention_output_gate") else 1) + 2 * groups) * model["kv_channels"]
    for field, size, what, amount in (
        ("tensor", parallel.tensor, "attention heads", heads),
        ("tensor", parallel.tensor, "rows of queries, keys and values", rows),
        ("tensor", parallel.tensor, "intermediate columns", model["ffn_hidden_size"]),
        *((("tensor", parallel.tensor, "columns of shared experts", shared),) if shared else ()),
        ("expert", parallel.expert, "experts", experts),
        ("expert_tensor", expert_tensor, "expert columns", model.get("moe_ffn_hidden_size", 0)),
    ):
        if amount % size or (size > 1 and not amount):
            yield (
                f"trainer.parallel.{field} is {size}, which does not divide the model's {amount} {what}; use a divisor"
            )
    yield from _head_problems(shape, config)
    if shape.convolved_rows is not None:
        yield from _delta_net_problems(shape, config)
    if parallel.stages > model["num_layers"]:
        yield (
            f"trainer.parallel.pipeline x virtual_pipeline is {parallel.stages}, but the model has "
            f"{model['num_layers']} layers and each stage needs one; use at most {model['num_layers']} stages"
        )
    if shape.family.local_only and config.layer_spec == "transformer_engine":
        yield (
            "trainer.layer_spec is transformer_engine, and the model has attention sinks and experts with biases, "
            "which the trainer builds in the local layers only; use trainer.layer_spec=local"
        )
    if shape.family.local_only and config.lora.rank:
        yield (
            f"trainer.lora.rank is {config.lora.rank}, and the model's experts have biases, which LoRA does not adapt; "
            "use trainer.lora.rank=0"
        )
    known = adapted_modules(shape)
    if unknown := [name for name in config.lora.target_modules if name not in known]:
        yield (
            f"trainer.lora.target_modules has {', '.join(unknown)}, which the model does not have; use names of "
            f"{', '.join(known)}, or [] for all"
        )
    if not experts and config.router_replay != "none":
        yield f"trainer.router_replay is {config.router_replay}, but the model is dense; use trainer.router_replay=none"


def _head_problems(shape: ModelShape, config: TrainerConfig) -> Iterator[str]:
    """Tensor-parallel sizes that do not suit the attention heads, besides those that do not divide them."""
    tensor, groups = config.parallel.tensor, shape.megatron["num_query_groups"]
    if groups % tensor and tensor % groups:
        yield (
            f"trainer.parallel.tensor is {tensor}, neither a divisor nor a multiple of the model's {groups} "
            "key-value heads; use one of these"
        )
    if tensor > groups and config.lora.rank:
        yield (
            f"trainer.parallel.tensor is {tensor} with trainer.lora.rank={config.lora.rank}, but LoRA does not split "
            f"the model's {groups} key-value heads further; use trainer.parallel.tensor={groups} or less, or "
            "trainer.lora.rank=0"
        )
    if tensor > 1 and shape.family.norms_all_heads:
        yield (
            f"trainer.parallel.tensor is {tensor}, and the model normalises queries and keys over all heads, "
            "which the trainer does not split; use trainer.parallel.tensor=1 with expert, pipeline or context ranks"
        )


def _delta_net_problems(shape: ModelShape, config: TrainerConfig) -> Iterator[str]:
    """Layouts and layers that gated delta nets are not built for."""
    heads, tensor, context = shape.megatron["linear_num_key_heads"], config.parallel.tensor, config.parallel.context
    if heads % (tensor * context):
        yield (
            f"trainer.parallel.tensor x context is {tensor * context}, which does not divide the model's {heads} key "
            "heads of gated delta nets; use a divisor, with pipeline, expert or data ranks"
        )
    if config.layer_spec == "transformer_engine":
        yield (
            "trainer.layer_spec is transformer_engine, and the model has gated delta nets, which the trainer builds in "
            "the local layers only; use trainer.layer_spec=local"
        )
    if config.lora.rank:
        yield (
            f"trainer.lora.rank is {config.lora.rank}, and the model has gated delta nets, which LoRA does not adapt; "
            "use trainer.lora.rank=0"
        )


def adapted_modules(shape: ModelShape) -> list[str]:
    """Names of the linear layers that LoRA can adapt, as in trainer.lora.target_modules."""
    query = ("linear_q_proj",) if shape.megatron.get("q_lora_rank") else ("linear_q_down_proj", "linear_q_up_proj")
    tables = (shape.family.layer_weights, shape.family.expert_weights)
    weights = [
        entry
        for table in tables
        for layer, entry in table.items()
        if ".linear_" in f".{layer}" and module_name(layer) not in query
    ]
    return list(dict.fromkeys(module_name(name) for entry in weights for name in entry.names))


def module_name(weight: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `q_proj`."""
    return weight.split(".")[-2]


def weight_problems(shape: ModelShape, names: Collection[str]) -> Iterator[str]:
    """Tensors that the files of a checkpoint lack, or have too many: those would be neither trained nor exported.

    Args:
        names: of all plain tensors in the checkpoint's files.
    """
    missing, unknown = compare_weights(shape, names)
    if missing:
        yield f"its files have no tensors {grouped(missing)}, which config.json requires; copy the complete folder"
    number, carried = shape.megatron["num_layers"], shape.num_carried_layers
    if further := [name for name in names if (layer_of(name) or 0) >= number + carried]:
        yield (
            f"its files have {len(further)} tensors of further layers than num_hidden_layers={number} and "
            f"num_nextn_predict_layers={carried} say, the first {min(further)}; config.json and weights do not belong "
            "together"
        )
    if unknown:
        yield (
            f"its files have the tensors {grouped(unknown)}, which a model with this config.json does not have: "
            "they would be ignored; config.json and weights do not belong together, or the model needs a family "
            "(docs/guides/family.md)"
        )
