"""Policy losses, written as their equations over named logprobs, all tensors of one entry per token.

behaviour  of the engine that sampled            (no gradient)
proximal   of the trainer before the batch       (no gradient)
current    of the weights being trained          (gradient)
reference  of a frozen model, for the KL term    (no gradient)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossName = Literal["decoupled_ppo", "ppo_clip"]
Aggregation = Literal["token_mean", "sequence_mean"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The policy loss.

    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    behaviour_weight_cap: bound on proximal / behaviour, the weight of decoupled PPO.
    aggregation: mean over all tokens of the batch, or over sequences of the mean of each.
    temperature: that the engine sampled with; logprobs are of the logits divided by it.
    """

    name: LossName = "decoupled_ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    behaviour_weight_cap: float = 2.0
    aggregation: Aggregation = "token_mean"
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("name", ("decoupled_ppo", "ppo_clip")),
            ("aggregation", ("token_mean", "sequence_mean")),
            ("kl_estimator", ("k1", "k2", "k3")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"loss.{name} is {getattr(self, name)!r}; use {' or '.join(allowed)}")
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"loss.clip_low is {self.clip_low}; must be in (0, 1]")
        for name in ("clip_high", "behaviour_weight_cap", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"loss.{name} is {getattr(self, name)}; must be > 0")
        for name in ("kl_coefficient", "entropy_coefficient"):
            if getattr(self, name) < 0:
                raise ValueError(f"loss.{name} is {getattr(self, name)}; must be >= 0")

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens with zero advantage have a gradient."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogprobs:
    """One entry per token, all of one shape. reference: None without a KL term."""

    current: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor | None = None


def policy_loss(
    logprobs: TokenLogprobs, *, advantages: Tensor, entropy: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and whether its ratio is clipped (its policy gradient is zero).

    Args:
        advantages, entropy: of the shape of the logprobs.
    """
    match config.name:
        case "ppo_clip":
            loss, clipped = ppo_clip(logprobs.current - logprobs.behaviour, advantages, config)
        case "decoupled_ppo":
            loss, clipped = ppo_clip(logprobs.current - logprobs.proximal, advantages, config)
            weight = torch.exp(logprobs.proximal - logprobs.behaviour).clamp(max=config.behaviour_weight_cap)
            loss = weight * loss
    if config.kl_coefficient > 0:
        if logprobs.reference is None:
            raise ValueError(
                f"loss.kl_coefficient is {config.kl_coefficient}, but the batch has no reference_logprobs; "
                "add them to the batch or set loss.kl_coefficient=0"
            )
        loss = loss + config.kl_coefficient * kl_estimate(logprobs.current, logprobs.reference, config.kl_estimator)
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * entropy
    return loss, clipped


def ppo_clip(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A), and where the second is the smaller (Schulman et al. 2017, eq. 7)."""
    ratio = torch.exp(log_ratio)
    free = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free


def kl_estimate(current: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(current || reference) of each token from its own sample (Schulman 2020, "Approximating KL divergence")."""
    log_ratio = reference - current
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            return torch.exp(log_ratio) - 1 - log_ratio


def token_weights(num_tokens: Tensor, *, aggregation: Aggregation) -> Tensor:
    """float32 [S]: what each token of a sequence weighs, so that the loss of a batch is sum(weight * token loss).

    The weights are fixed for the whole batch before it is split into micro-batches, which makes the sum exact
    however it is split.

    Args:
        num_tokens: int64 [S], tokens of each sequence that enter the loss.
    """
    if aggregation == "token_mean":
        return torch.full(num_tokens.shape, 1.0 / max(1, int(num_tokens.sum())))
    trained = max(1, int((num_tokens > 0).sum()))
    return 1.0 / (num_tokens.clamp(min=1) * trained)
