"""Checks for features of a Hugging Face config that the trainer does not support."""

from __future__ import annotations

from typing import Any

from async_rl.weights.model_info import quantization_problem


class UnbuiltFeature(ValueError):
    """The trainer does not support a value in a model config. The caller adds the name of the file."""

    def __init__(self, field: str, value: Any, why: str) -> None:
        super().__init__(f"sets {field}={value!r}: {why}")


def refuse_unless(config: dict[str, Any], field: str, allowed: tuple[Any, ...], why: str) -> None:
    """Refuse a value of `field` that is not in `allowed`; the field may be missing.

    Raises:
        UnbuiltFeature: the message has field, value and `why`.
    """
    if field in config and config[field] not in allowed:
        raise UnbuiltFeature(field, config[field], why)


def refuse_common(config: dict[str, Any]) -> None:
    """Refuse features that the trainer supports in no family.

    Raises:
        UnbuiltFeature: the config has such a feature.
    """
    if problem := quantization_problem(config):
        raise UnbuiltFeature(*problem)
    refuse_unless(config, "hidden_act", ("silu",), "the trainer builds gated SiLU layers")
    refuse_unless(config, "mlp_bias", (False, None), "the trainer builds MLPs without bias")
    if config.get("use_sliding_window"):
        raise UnbuiltFeature("use_sliding_window", True, "the trainer attends to the whole sequence")
    built = {"full_attention", *(("sliding_attention",) if config.get("model_type") == "gpt_oss" else ())}
    if other := sorted(set(config.get("layer_types") or ()) - built):
        raise UnbuiltFeature("layer_types", other, "the trainer attends to the whole sequence in every layer")
