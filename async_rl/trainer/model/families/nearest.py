"""What separates a checkpoint of an unknown architecture from the nearest family, by names of weights and by fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from async_rl.trainer.model.families.family import Family, HFConfig, ModelShape, UnbuiltFeature
from async_rl.trainer.model.families.shape import shape_of
from async_rl.trainer.model.families.weights import compare_weights, expected_weights, grouped, listed, pattern

_INDEX = "model.safetensors.index.json"
# For fields that a config lacks; 2 for all others is valid as a size and as a count.
_STAND_INS = {"first_k_dense_replace": 0, "hidden_size": 1 << 14}
# Fields that do not change what a layer computes; those that end with one of _NO_EFFECT_ENDS do not either.
_NO_EFFECT = {
    *("architectures", "auto_map", "chunk_size_feed_forward", "dtype", "ep_size", "id2label", "initializer_range"),
    *("label2id", "max_position_embeddings", "max_window_layers", "model_type", "pretraining_tp", "rope_theta"),
    *("is_encoder_decoder", "output_attentions", "output_hidden_states", "output_router_logits", "problem_type"),
    *("return_dict", "router_jitter_noise", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache"),
}
_NO_EFFECT_ENDS = ("_token_id", "dropout", "_pdrop", "_coef", "_implementation", "name_or_path")


class RecordedFields(HFConfig):
    """A config that remembers which fields are read."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__(config)
        self.read = set[str]()

    def __getitem__(self, field: str) -> Any:
        self.read.add(field)
        return super().__getitem__(field)

    def get(self, field: str, default: Any = None) -> Any:
        """As of a dictionary."""
        self.read.add(field)
        return super().get(field, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What separates a checkpoint from a family."""

    family: str
    """The family."""
    share: float
    """Patterns of weight names that both have, as a share of those that one of them has; 0 without weights."""
    unknown: set[str]
    """Weights that the family does not have."""
    missing: set[str]
    """Weights of the family that the checkpoint does not have."""
    refused: list[str]
    """Fields and values that the family refuses."""
    absent: list[str]
    """Fields that the family needs and the config does not have."""
    unread: list[str]
    """Fields and values that the family does not read."""

    def __str__(self) -> str:
        kinds = {
            f"weights that {self.family} does not have": grouped(self.unknown),
            f"weights of {self.family} that the checkpoint does not have": grouped(self.missing),
            f"values that {self.family} refuses": listed(self.refused),
            f"fields that {self.family} needs and config.json does not have": listed(self.absent),
            f"fields that {self.family} does not read": listed(self.unread),
            "weights": "" if self.share else "the folder has no safetensors file with weights of any family",
        }
        shown = [f"{kind}: {text}" for kind, text in kinds.items() if text]
        same = "names of weights and fields are the same, which do not show what a layer computes"
        return f"the nearest is {self.family}; {'; '.join(shown or [same])}"


def nearest_family(checkpoint: Path, config: HFConfig, families: Mapping[str, Family]) -> Difference:
    """The nearest family by names of weights, then by fields.

    Args:
        checkpoint: folder with an index or safetensors files, of which only names are read; it may have none.
        config: the config of the checkpoint.
        families: families to choose from.
    """
    names = _tensor_names(checkpoint)
    found = [_difference(config, names, family, name) for name, family in families.items()]
    return max(found, key=lambda each: (each.share, -len(each.refused) - len(each.absent) - len(each.unread)))


def _difference(config: HFConfig, names: set[str], family: Family, name: str) -> Difference:
    fields, refused, absent = RecordedFields(config), dict[str, str](), list[str]()
    shape = _lenient_shape(fields, family, refused=refused, absent=absent)
    found = {pattern(each) for each in names}
    missing, unknown, share = set[str](), set[str](), 0.0
    if names and shape is not None:
        missing, unknown = compare_weights(shape, names)
        expected = {pattern(each) for each in expected_weights(shape)}
        share = len(found & expected) / len(found | expected)
        gone, known = expected - found, expected
        if absent:  # numbers of layers of a kind are unknown, and so are optional weights
            known = expected | family.patterns
            missing = {each for each in missing if pattern(each) in gone}
        # The number of experts is compared by fields, whose names this family may not know.
        missing = {each for each in missing if pattern(each) in gone or ".experts." not in each}
        unknown = {each for each in unknown if pattern(each) not in known}
    unread = [
        f"{field}={_short(value)}"
        for field, value in config.items()
        if field not in fields.read and not _has_no_effect(config, field, value)
    ]
    return Difference(
        family=name,
        share=share,
        unknown=unknown,
        missing=missing,
        refused=[*refused.values()],
        absent=absent,
        unread=unread,
    )


def _lenient_shape(
    fields: RecordedFields, family: Family, *, refused: dict[str, str], absent: list[str]
) -> ModelShape | None:
    """The shape with other values for fields that are refused or absent, which are added to the arguments.

    None if the config cannot be read even so.
    """
    while True:
        try:
            return shape_of(fields, family)
        except UnbuiltFeature as error:
            if error.field in refused:
                return None
            refused[error.field] = f"{error.field}={_short(error.value)}"
            _replace(fields, error)
        except KeyError as error:
            field = error.args[0]
            if field in fields:
                return None
            if field not in refused:
                absent.append(field)
            fields[field] = _STAND_INS.get(field, 2)
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            return None


def _replace(fields: RecordedFields, error: UnbuiltFeature) -> None:
    """Remove a refused field, also from the fields of the rotary embedding, or give it a value that is supported."""
    names = {"rope_type": ("rope_type", "type")}.get(error.field, (error.field.partition(".")[0],))
    for name in names:
        fields.pop(name, None)
        for rope in ("rope_parameters", "rope_scaling"):
            if isinstance(inner := dict.get(fields, rope), dict):
                fields[rope] = {key: value for key, value in inner.items() if key != name}
    if error.instead is not None:
        fields[error.field] = error.instead


def _has_no_effect(config: HFConfig, field: str, value: Any) -> bool:
    """Whether a field that no family reads changes nothing: by its name, or because it is off or a factor of 1.0."""
    return has_no_effect(config, field) or not value or (isinstance(value, float) and value == 1.0)


def has_no_effect(config: HFConfig, field: str) -> bool:
    """Whether no value of a field that no family reads changes anything."""
    if field == "sliding_window" and "use_sliding_window" in config:
        return True  # only that field turns the window on
    return field in _NO_EFFECT or field.endswith(_NO_EFFECT_ENDS) or field.startswith("_")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensor_names(checkpoint: Path) -> set[str]:
    """Names of the tensors of a checkpoint folder, from its index or the headers of its files; plain if quantized."""
    from async_rl.weights.quantized import plain_names  # imports torch; a configuration does without

    try:
        if (checkpoint / _INDEX).is_file():
            return {*plain_names(json.loads((checkpoint / _INDEX).read_text())["weight_map"])}
        names = list[str]()
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, "np") as file:
                names += file.keys()
        return {*plain_names(names)}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return set()
