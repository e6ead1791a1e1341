"""The rotary embedding of a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_rl.trainer.model.families.family import HFConfig, UnbuiltFeature

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071), or the scaling of Llama 3.1: slow channels are interpolated, fast ones are unchanged.

    Channels with `slow` to `fast` rotations over `original_length` positions are mixed linearly.
    """

    factor: float
    """Interpolation of slow channels."""
    original_length: int
    """Context length of pre-training, in positions."""
    fast: float
    """Channels with more rotations are unchanged."""
    slow: float
    """Channels with fewer rotations are interpolated."""
    by_rotations: bool
    """Whether the mix is linear in the number of rotations (Llama 3.1), not in the number of the channel (YaRN)."""
    truncate: bool = True
    """Whether the range of mixed channels is rounded outwards to integers (YaRN)."""
    amplitude: float = 1.0
    """Factor of cosine and sine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of a head."""

    dim: int
    """Number of rotated channels, the first of the head."""
    base: float
    """Theta."""
    scaling: RopeScaling | None = None
    """None without scaling."""

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0 if self.scaling is None else self.scaling.amplitude

    def frequencies(self) -> Tensor:
        """Radians per position of each pair of channels, float32 [dim / 2].

        dim=4 and base=10000: (1, 0.01).
        """
        import torch  # a configuration does without it

        powers = self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if (scaling := self.scaling) is None:
            return 1.0 / powers
        if scaling.by_rotations:
            turns = scaling.original_length / (2 * math.pi * powers)
            kept = ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
        else:
            first, last = (self._channel(turns, scaling) for turns in (scaling.fast, scaling.slow))
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, self.dim - 1)
            width = last - first or 0.001  # avoids a division by 0; a step in place of a ramp
            kept = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        return (1 - kept) / (scaling.factor * powers) + kept / powers

    def _channel(self, turns: float, scaling: RopeScaling) -> float:
        """The channel pair (fractional) with `turns` rotations over the original length."""
        return self.dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def read_rope(config: HFConfig, *, head_dim: int, kinds: Collection[str], partial_rotary: float | None = None) -> Rope:
    """Read the rotary embedding of a Hugging Face config.

    Args:
        config: the config.
        head_dim: channels of a head.
        kinds: rope types that the family may have.
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
    if kind not in kinds:
        raise UnbuiltFeature("rope_type", kind, f"the trainer builds {', '.join(kinds)} in this family")
    scaling = {"yarn": _yarn, "llama3": _llama3}.get(kind)
    return Rope(dim=dim, base=base, scaling=scaling and scaling(fields, config))


def attention_gain(config: HFConfig) -> float:
    """Additional factor of the attention scores in DeepSeek models with YaRN; 1 without YaRN."""
    kind, fields = _kind_and_fields(config)
    whole = fields.get("mscale_all_dim")
    return _mscale(_yarn(fields, config).factor, whole) ** 2 if kind == "yarn" and whole else 1.0


def _kind_and_fields(config: HFConfig) -> tuple[str, dict[str, Any]]:
    """(rope type, fields) from `rope_parameters` of transformers 5 or `rope_scaling` of older configs."""
    fields: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return fields.get("rope_type") or fields.get("type") or "default", fields


def _yarn(fields: dict[str, Any], config: HFConfig) -> RopeScaling:
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
    return RopeScaling(
        factor=factor,
        original_length=int(original),
        fast=float(fields.get("beta_fast") or 32),
        slow=float(fields.get("beta_slow") or 1),
        by_rotations=False,
        truncate=bool(fields.get("truncate", True)),
        amplitude=float(amplitude),
    )


def _llama3(fields: dict[str, Any], config: HFConfig) -> RopeScaling:
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    if high <= low:
        raise UnbuiltFeature("high_freq_factor", high, f"it must be more than low_freq_factor={low}")
    return RopeScaling(
        factor=float(fields["factor"]),
        original_length=int(fields.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        slow=low,
        fast=high,
        by_rotations=True,
    )


def _mscale(factor: float, scale: float) -> float:
    """1 + 0.1 scale ln(factor), section 3.4 of the YaRN paper."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
