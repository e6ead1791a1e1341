"""Rotary embeddings of a Hugging Face config: which channels turn, how fast, and what YaRN changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_rl.train.families.checks import UnbuiltFeature


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071): slow channels are interpolated by `factor`, fast ones are left as they are.

    original_length: positions of pre-training. beta_fast, beta_slow: turns over it between which channels are mixed.
    truncate: whether the channels at which mixing begins and ends are rounded outwards.
    amplitude: of cosine and sine.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    amplitude: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """dim: channels of a head that turn, its first ones. base: theta."""

    dim: int
    base: float
    yarn: Yarn | None = None

    @property
    def amplitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0 if self.yarn is None else self.yarn.amplitude

    def frequencies(self) -> Tensor:
        """float32 [dim / 2]: radians per position of each pair of channels."""
        powers = self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        if self.yarn is None:
            return 1.0 / powers
        first, last = (self._channel(turns) for turns in (self.yarn.beta_fast, self.yarn.beta_slow))
        if self.yarn.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        width = last - first or 0.001  # one channel: a step instead of a ramp
        interpolated = ((torch.arange(self.dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
        kept = 1 - interpolated
        return 1.0 / (self.yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept

    def _channel(self, turns: float) -> float:
        """The channel pair that makes `turns` turns over the original length."""
        assert self.yarn is not None
        return self.dim * math.log(self.yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def read_rope(config: dict[str, Any], *, head_dim: int, partial_rotary: float | None = None) -> Rope:
    """The rotary embedding of a model.

    Args:
        head_dim: channels of a head that the rotary embedding is defined on.
        partial_rotary: share of them that turns where the config does not say; None for a family whose heads turn
            whole.

    Raises:
        UnbuiltFeature: another kind than plain and YaRN, or a share that the family does not have.
    """
    kind, fields = _kind_and_fields(config)
    share = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", partial_rotary or 1.0))
    if partial_rotary is None and share != 1.0:
        raise UnbuiltFeature("partial_rotary_factor", share, "the trainer turns whole heads in this family")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise UnbuiltFeature(
            "partial_rotary_factor", share, f"it turns {dim} of {head_dim} channels; need an even number"
        )
    base = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    match kind:
        case "default":
            return Rope(dim=dim, base=base)
        case "yarn":
            return Rope(dim=dim, base=base, yarn=_yarn(fields, config))
        case _:
            raise UnbuiltFeature("rope_type", kind, "the trainer builds plain and yarn rotary embeddings")


def attention_gain(config: dict[str, Any]) -> float:
    """What DeepSeek multiplies attention scores by under YaRN, besides 1 / sqrt(head size)."""
    kind, fields = _kind_and_fields(config)
    whole = fields.get("mscale_all_dim")
    return _mscale(_yarn(fields, config).factor, whole) ** 2 if kind == "yarn" and whole else 1.0


def _kind_and_fields(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What transformers 5 calls rope_parameters, and older configs rope_scaling."""
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


def _mscale(factor: float, scale: float) -> float:
    """1 + 0.1 scale ln(factor), section 3.4 of the YaRN paper."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
