"""What a config asks for and the trainer does not build."""

from __future__ import annotations

from typing import Any


class UnbuiltFeature(ValueError):
    """A field of a model config whose value the trainer does not build; the reader of the config names the file."""

    def __init__(self, field: str, value: Any, why: str) -> None:
        super().__init__(f"sets {field}={value!r}: {why}")


def refuse_unless(config: dict[str, Any], field: str, allowed: tuple[Any, ...], why: str) -> None:
    """Refuse a value of `field` outside `allowed`; a field that is absent says nothing.

    Raises:
        UnbuiltFeature: naming field, value and `why`.
    """
    if field in config and config[field] not in allowed:
        raise UnbuiltFeature(field, config[field], why)


def refuse_common(config: dict[str, Any]) -> None:
    """Refuse what no family is built with.

    Raises:
        UnbuiltFeature: see above.
    """
    if config.get("quantization_config"):
        raise UnbuiltFeature(
            "quantization_config",
            config["quantization_config"].get("quant_method"),
            "the trainer reads plain weights; convert the checkpoint to bfloat16",
        )
    refuse_unless(config, "hidden_act", ("silu",), "the trainer builds gated SiLU layers")
    refuse_unless(config, "mlp_bias", (False, None), "the trainer builds MLPs without bias")
    if config.get("use_sliding_window"):
        raise UnbuiltFeature("use_sliding_window", True, "the trainer attends to the whole sequence")
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise UnbuiltFeature("layer_types", other, "the trainer attends to the whole sequence in every layer")
