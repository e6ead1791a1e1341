"""Model families: conversion of Hugging Face configs to megatron's config, and of weight names.

A module of this package with a dictionary FAMILIES adds families, under the `model_type` of their configs, which is
also ModelInfo.family (docs/guides/family.md). Layers for multi-token prediction (num_nextn_predict_layers) are not
trained; see `is_carried`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from async_rl.trainer.model.families.family import Family, Kind, ModelShape, UnbuiltFeature, WeightNames
from async_rl.trainer.model.families.nearest import nearest_family
from async_rl.trainer.model.families.shape import shape_of
from async_rl.trainer.model.families.weights import weight_names
from async_rl.weights.model_info import CheckpointError, read_config

__all__ = ["FAMILIES", "Family", "Kind", "ModelShape", "WeightNames", "read_shape", "weight_names"]

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
FAMILIES: dict[str, Family] = {
    name: family for module in _MODULES for name, family in getattr(module, "FAMILIES", {}).items()
}


def read_shape(checkpoint: Path) -> ModelShape:
    """Read config.json of a Hugging Face checkpoint folder.

    Raises:
        CheckpointError: the config cannot be read, or the family or a feature is not supported.
    """
    path, config = checkpoint / "config.json", read_config(checkpoint)
    name = config.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(
            f"{path} has model_type {name!r}, which is none of {', '.join(FAMILIES)}; "
            f"{nearest_family(checkpoint, config, FAMILIES)}; use another model, or add a family "
            "(docs/guides/family.md)"
        )
    try:
        shape = shape_of(config, FAMILIES[name])
    except UnbuiltFeature as error:
        raise CheckpointError(f"{path} {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} has no field {error.args[0]!r}, which {name} needs; complete it") from error
    if shape.has_vision and not shape.family.takes_vision:
        raise CheckpointError(
            f"{path} has a vision_config and text of {name}, which the trainer builds without a vision tower only; "
            "save the text part as a checkpoint"
        )
    return shape
