"""Rotary embeddings of a Hugging Face config: rotated channels, their frequencies, YaRN and Llama 3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_rl.trainer.model.families.checks import UnbuiltFeature

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071): slow channels are interpolated by `factor`, fast channels are unchanged.

    Channels with `beta_slow` to `beta_fast` rotations over `original_length` positions are mixed linearly.
    """

    factor: float
    """Interpolation of slow channels."""
    original_length: int
    """Context length of pre-training, in positions."""
    beta_fast: float
    """Channels with more rotations are unchanged."""
    beta_slow: float
    """Channels with fewer rotations are interpolated."""
    truncate: bool
    """Whether the range of mixed channels is rounded outwards to integers."""
    amplitude: float
    """Factor of cosine and sine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Scaling of Llama 3.1: slow channels are interpolated by `factor`, fast channels are unchanged.

    Channels with `low` to `high` rotations over `original_length` positions are mixed linearly.
    """

    factor: float
    """Interpolation of slow channels."""
    original_length: int
    """Context length of pre-training, in positions."""
    low: float
    """Channels with fewer rotations are interpolated."""
    high: float
    """Channels with more rotations are unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of a head."""

    dim: int
    """Number of rotated channels, the first of the head."""
    base: float
    """Theta."""
    yarn: Yarn | None = None
    """None without YaRN."""
    llama3: Llama3 | None = None
    """None without the scaling of Llama 3.1."""

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0 if self.yarn is None else self.yarn.amplitude

    def frequencies(self) -> Tensor:
        """Radians per position of each pair of channels, float32 [dim / 2].

        dim=4 and base=10000: (1, 0.01).
        """
        import torch  # a configuration does without it

        powers = self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.llama3 is not None:
            turns = self.llama3.original_length / (2 * math.pi * powers)
            kept = ((turns - self.llama3.low) / (self.llama3.high - self.llama3.low)).clamp(0, 1)
            return (1 - kept) / (self.llama3.factor * powers) + kept / powers
        if self.yarn is None:
            return 1.0 / powers
        first, last = (self._channel(turns, self.yarn) for turns in (self.yarn.beta_fast, self.yarn.beta_slow))
        if self.yarn.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        width = last - first or 0.001  # avoids a division by 0; a step in place of a ramp
        interpolated = ((torch.arange(self.dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        kept = 1 - interpolated
        return 1.0 / (self.yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _channel(self, turns: float, yarn: Yarn) -> float:
        """The channel pair (fractional) with `turns` rotations over the original length."""
        return self.dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def read_rope(config: dict[str, Any], *, head_dim: int, partial_rotary: float | None = None) -> Rope:
    """Read the rotary embedding of a Hugging Face config.

    Args:
        config: the config.
        head_dim: channels of a head.
        partial_rotary: default share of rotated channels; None if the family always rotates whole heads.

    Raises:
        UnbuiltFeature: the family does not have this kind, or the share is not supported.
    """
    kind, fields = _kind_and_fields(config)
    share = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", partial_rotary or 1.0))
    if partial_rotary is None and share != 1.0:
        raise UnbuiltFeature("partial_rotary_factor", share, "the trainer rotates whole heads in this family")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise UnbuiltFeature(
            "partial_rotary_factor", share, f"it rotates {dim} of {head_dim} channels; need an even number"
        )
    base = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    match kind:
        case "default":
            return Rope(dim=dim, base=base)
        case "yarn":
            return Rope(dim=dim, base=base, yarn=_yarn(fields, config))
        case "llama3" if config.get("model_type") == "llama":
            return Rope(dim=dim, base=base, llama3=_llama3(fields, config))
        case _:
            raise UnbuiltFeature("rope_type", kind, "the trainer builds plain and yarn, and llama3 in Llama only")


def attention_gain(config: dict[str, Any]) -> float:
    """Additional factor of the attention scores in DeepSeek models with YaRN; 1 without YaRN."""
    kind, fields = _kind_and_fields(config)
    whole = fields.get("mscale_all_dim")
    return _mscale(_yarn(fields, config).factor, whole) ** 2 if kind == "yarn" and whole else 1.0


def _kind_and_fields(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(rope type, fields) from `rope_parameters` of transformers 5 or `rope_scaling` of older configs."""
    fields: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return fields.get("rope_type") or fields.get("type") or "default", fields


def _yarn(fields: dict[str, Any], config: dict[str, Any]) -> Yarn:
    original = (
        fields.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )
    factor = float(fields.get("factor") or config["max_position_embeddings"] / original)
    amplitude = fields.get("attention_factor")
    if amplitude is None:
        part, whole = fields.get("mscale"), fields.get("mscale_all_dim")
        amplitude = _mscale(factor, part) / _mscale(factor, whole) if part and whole else _mscale(factor, 1.0)
    return Yarn(
        factor=factor,
        original_length=int(original),
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        truncate=bool(fields.get("truncate", True)),
        amplitude=float(amplitude),
    )


def _llama3(fields: dict[str, Any], config: dict[str, Any]) -> Llama3:
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    if high <= low:
        raise UnbuiltFeature("high_freq_factor", high, f"it must be more than low_freq_factor={low}")
    return Llama3(
        factor=float(fields["factor"]),
        original_length=int(fields.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        low=low,
        high=high,
    )


def _mscale(factor: float, scale: float) -> float:
    """1 + 0.1 scale ln(factor), section 3.4 of the YaRN paper."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
