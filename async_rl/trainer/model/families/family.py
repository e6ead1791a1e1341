"""What a model family consists of, and how it refuses a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from async_rl.trainer.model.families.rope import Rope

HFConfig = dict[str, Any]
Kind = Literal[
    "direct",
    "vocabulary",
    "qkv",
    "gated_qkv",
    "delta_conv",
    "delta_qkvz",
    "delta_ba",
    "gate_up",
    "stacked",
    "stacked_gate_up",
]


class UnbuiltFeature(ValueError):
    """The trainer does not support a value in a model config. The caller adds the name of the file."""

    def __init__(self, field: str, value: Any, why: str, *, instead: Any = None) -> None:
        super().__init__(f"sets {field}={value!r}: {why}")
        self.field, self.value = field, value
        self.instead = instead
        """A value that is supported; None if no value is."""


def refuse_unless(config: HFConfig, field: str, allowed: tuple[Any, ...], why: str) -> None:
    """Refuse a value of `field` that is not in `allowed`; the field may be missing.

    Raises:
        UnbuiltFeature: the message has field, value and `why`.
    """
    if field in config and config[field] not in allowed:
        raise UnbuiltFeature(field, config[field], why, instead=allowed[0])


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The Hugging Face tensors that form one megatron tensor."""

    kind: Kind
    """direct: unchanged. vocabulary: with rows padded for tensor parallelism. qkv: interleaved by key-value head.
    gated_qkv: the same, and in the checkpoint each query head stands before its gate. delta_conv, delta_qkvz and
    delta_ba: rows of gated delta nets, interleaved by key head. gate_up: concatenated, gate first. stacked: one tensor
    of all experts, matrices transposed. stacked_gate_up: the same, with gate and up in turns."""
    names: tuple[str, ...]
    """Names; in a Table with the placeholders {layer} and {expert}."""


Table = dict[str, WeightNames]
"""Name in megatron's local spec -> tensors of a Hugging Face checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family."""

    megatron: Callable[[HFConfig], dict[str, Any]]
    """Hugging Face config -> keyword arguments of megatron's TransformerConfig."""
    layer_weights: Table
    """Weights of one layer except its experts, of layers of every kind."""
    expert_weights: Table = field(default_factory=Table)
    """Weights of one expert."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """Kinds of layers that a config may name."""
    rope_types: tuple[str, ...] = ("default", "yarn")
    """Kinds of rotary embedding that a config may name."""
    partial_rotary: float | None = None
    """Default share of a head's channels with rotary embedding; None if the family always rotates whole heads."""
    norms_all_heads: bool = False
    """Whether the norms of queries and of keys are over all heads together, not over each head."""
    local_only: bool = False
    """Whether the family is built with megatron's local spec only."""
    takes_vision: bool = False
    """Whether a checkpoint may have a vision tower, which is not trained."""

    @property
    def patterns(self) -> set[str]:
        """Hugging Face names of the weights of layers, with {layer} and {expert}."""
        tables = (self.layer_weights, self.expert_weights)
        return {name for table in tables for weight in table.values() for name in weight.names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Properties of a model from its Hugging Face config."""

    family: Family
    """The model family."""
    megatron: dict[str, Any]
    """Keyword arguments of megatron's TransformerConfig."""
    vocab_size: int
    """Token ids, without padding."""
    context_length: int
    """Longest sequence in tokens."""
    rope: Rope
    """Rotary embedding."""
    tied: bool
    """Whether the output layer uses the weight of the embedding."""
    num_carried_layers: int = 0
    """Layers for multi-token prediction, numbered after the others; see `is_carried`."""
    has_vision: bool = False
    """Whether the checkpoint also has a vision tower, and the names of weights are those of its text part."""

    @property
    def convolved_rows(self) -> int | None:
        """Rows before each that the convolutions of recurrent layers read; None for a model without such layers."""
        return self.megatron["linear_conv_kernel_dim"] - 1 if self.megatron.get("linear_attention_freq") else None
