"""Policy losses as equations: an advantage times bounded ratios of named logprobs (`train.ratios`).

All tensors have one entry per token in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from async_rl.trainer.loss.ratios import (
    ANY,
    BEHAVIOUR,
    CURRENT,
    PROXIMAL,
    FilterName,
    Interval,
    Ratio,
    TokenLogprobs,
    Trajectories,
    Weight,
    clip,
    keep,
    mask,
    pessimistic_clip,
    truncate,
    unbounded,
)

__all__ = [
    "OBJECTIVE_FIELDS",
    "LossConfig",
    "Surrogate",
    "TokenLogprobs",
    "Trajectories",
    "kl_estimate",
    "kl_term",
    "policy_loss",
    "surrogate",
    "token_weights",
]

TokenLossName = Literal["decoupled_ppo", "ppo_clip", "tis", "icepop", "dis", "cispo", "m2po"]
TrajectoryLossName = Literal["gspo", "sequence_tis", "sequence_mis", "sequence_mask"]
LossName = Literal[TokenLossName, TrajectoryLossName]
Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "fixed_length"]
KLEstimator = Literal["k1", "k2", "k3"]
Count = Literal["all", "informative"]

_LARGEST_KL_RATIO = 20.0  # nat; as in verl

_CLIP = ("clip_low", "clip_high")
_TRUST_REGION = (*_CLIP, "dual_clip")
OBJECTIVE_FIELDS: Mapping[LossName, tuple[str, ...]] = {
    "ppo_clip": _TRUST_REGION,
    "decoupled_ppo": (*_TRUST_REGION, "behaviour_weight_cap"),
    "tis": ("behaviour_weight_cap",),
    "icepop": (*_TRUST_REGION, "mask_low", "mask_high"),
    "dis": _CLIP,
    "cispo": _CLIP,
    "m2po": ("max_second_moment",),
    "gspo": (*_TRUST_REGION, "behaviour_weight_cap"),
    "sequence_tis": ("behaviour_weight_cap",),
    "sequence_mis": ("behaviour_weight_cap",),
    "sequence_mask": (*_TRUST_REGION, "max_sequence_drift"),
}
"""Fields of LossConfig that each objective uses. Fields that are in no row apply to all objectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The policy loss. A field that the objective does not use must keep its default.

    Raises:
        ValueError: a value is out of range, or the objective does not use it; the message names the field.
    """

    name: LossName = "decoupled_ppo"
    """The objective; `surrogate` and `trajectory_surrogate` have the equations."""
    clip_low: float = 0.2
    """Ratios below 1 - clip_low are clipped (dis: dropped)."""
    clip_high: float = 0.28
    """Ratios above 1 + clip_high are clipped (dis: dropped)."""
    dual_clip: float | None = None
    """Upper bound on the ratio of tokens with negative advantage, which PPO does not bound; None for no bound."""
    behaviour_weight_cap: float = 2.0
    """Upper bound on the ratio to the behaviour policy (decoupled_ppo, tis, gspo, sequence_tis, sequence_mis), and on
    the importance weight of the KL term of every objective."""
    mask_low: float = 0.5
    """icepop drops tokens whose proximal / behaviour is below this."""
    mask_high: float = 5.0
    """icepop drops tokens whose proximal / behaviour is above this."""
    max_sequence_drift: float = 0.5
    """sequence_mask drops a trajectory with negative advantage whose mean log(behaviour / current) is above this, in
    nat per token."""
    max_second_moment: float = 0.04
    """m2po drops tokens until the mean of the squared log ratios is at most this, in nat^2."""
    aggregation: Aggregation = "token_mean"
    """Mean over all tokens, mean over trajectories of the mean of each, mean over prompt groups of the mean of each, or
    (`fixed_length`) sum over tokens / (trajectories x fixed_length); see `token_weights`."""
    fixed_length: int | None = None
    """Tokens; only for aggregation=fixed_length."""
    count: Count = "all"
    """Groups in these means. `all` includes groups with equal rewards, as in the papers; `informative` leaves them out
    of the loss, as if they had not been sampled."""
    kl_coefficient: float = 0.0
    """Factor of the KL term; 0 for no KL term."""
    kl_estimator: KLEstimator = "k3"
    """See `kl_estimate`."""
    entropy_coefficient: float = 0.0
    """Factor of the entropy, which is subtracted from the loss."""
    temperature: float = 1.0
    """Sampling temperature of the engine; logits are divided by it."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("name", LossName),
            ("aggregation", Aggregation),
            ("count", Count),
            ("kl_estimator", KLEstimator),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"loss.{name} is {getattr(self, name)!r}; use {' or '.join(get_args(allowed))}")
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"loss.clip_low is {self.clip_low}; must be in (0, 1]")
        if not 0 <= self.mask_low < 1 < self.mask_high:
            raise ValueError(
                f"loss.mask_low is {self.mask_low} with loss.mask_high={self.mask_high}; need 0 <= mask_low < 1 < "
                "mask_high"
            )
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ValueError(f"loss.dual_clip is {self.dual_clip}; must be > 1 + clip_high = {1 + self.clip_high}")
        for name in ("clip_high", "behaviour_weight_cap", "max_sequence_drift", "max_second_moment", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"loss.{name} is {getattr(self, name)}; must be > 0")
        for name in ("kl_coefficient", "entropy_coefficient"):
            if getattr(self, name) < 0:
                raise ValueError(f"loss.{name} is {getattr(self, name)}; must be >= 0")
        if (self.aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"loss.aggregation is {self.aggregation} with loss.fixed_length={self.fixed_length}; set a length "
                "(such as rollout.limits.max_tokens) with aggregation=fixed_length, and null with any other"
            )
        if self.fixed_length is not None and self.fixed_length < 1:
            raise ValueError(f"loss.fixed_length is {self.fixed_length}; must be >= 1")
        self._check_unused()

    def _check_unused(self) -> None:
        """Refuse a value that has no effect."""
        for field in fields(self):
            value, names = getattr(self, field.name), [n for n, used in OBJECTIVE_FIELDS.items() if field.name in used]
            if field.name == "behaviour_weight_cap" and self.kl_coefficient > 0:
                continue
            if names and self.name not in names and value != field.default:
                raise ValueError(
                    f"loss.{field.name} is {value}, which loss.name={self.name} does not use; leave it at "
                    f"{field.default}, or use loss.name={' or '.join(names)}"
                )
        if self.kl_estimator != "k3" and self.kl_coefficient == 0:
            raise ValueError(
                f"loss.kl_estimator is {self.kl_estimator} with loss.kl_coefficient=0, so it has no effect; "
                "set loss.kl_coefficient, or leave it at k3"
            )

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens of groups with equal rewards have a gradient, from KL or entropy."""
        return self.count == "all" and (self.kl_coefficient > 0 or self.entropy_coefficient > 0)

    @property
    def needs_whole_trajectories(self) -> bool:
        """Whether all tokens of a trajectory must be in one micro-batch."""
        return any(w.ratio.level != "token" for w in surrogate(self).weights)

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether the loss of a token depends on the proximal logprobs of all tokens."""
        return self.name == "m2po"

    @property
    def filters(self) -> tuple[FilterName, ...]:
        """Names of the filters of the objective, in the order of `Surrogate.weights`."""
        return tuple(w.filter for w in surrogate(self).weights if w.filter is not None)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Loss of a token: -A x product of the weights, and x log current if `score`."""

    weights: tuple[Weight, ...]
    """Bounded ratios."""
    score: bool = False
    """Whether the gradient comes from a factor log current; the weights then have none."""

    def __call__(
        self, logprobs: TokenLogprobs, *, advantages: Tensor, trajectories: Trajectories | None
    ) -> tuple[Tensor, dict[FilterName, Tensor]]:
        """Loss [n] of each token, and filter -> bool [n], whether the filter changed the token's weight."""
        value = advantages * logprobs.current if self.score else advantages
        touched: dict[FilterName, Tensor] = {}
        for weight in reversed(self.weights):
            factor, changed = weight(logprobs, advantages=advantages, trajectories=trajectories)
            value = factor * value
            if weight.filter is not None:
                touched[weight.filter] = changed
        return -value, touched


def surrogate(config: LossConfig, *, log_ratio_bound: float = math.inf) -> Surrogate:
    """The objective of `config.name`. The objectives below weight each token separately; `trajectory_surrogate` has
    the objectives that weight whole trajectories.

    r = current / behaviour, A is the advantage, sg() stops the gradient. `proximal` is the trainer's policy before the
    first optimizer step of the batch, `behaviour` the engine's policy. Papers without a separate engine call both "old
    policy".

    ppo_clip       min(r A, clip(r) A). Schulman et al. 2017, arXiv 1707.06347, eq. 7; unequal bounds ("clip-higher"):
                   DAPO, arXiv 2503.14476; dual_clip: Ye et al. 2020, arXiv 1912.09729.
    decoupled_ppo  min(proximal / behaviour, cap) min(r' A, clip(r') A), r' = current / proximal. Hilton et al. 2022,
                   arXiv 2110.00641, without the cap, which is from tis. AReaL (arXiv 2505.24298) drops the tokens
                   above its cap; use icepop with mask_low=0 and mask_high=cap for that.
    tis            sg(min(r, cap)) A log current. Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
                   Off-Policy RL Training". The variant with PPO's clip is decoupled_ppo.
    icepop         k 1[mask_low <= k <= mask_high] min(r' A, clip(r') A), k = proximal / behaviour (masked importance
                   sampling). Ling team 2025, "Every Step Evolves" (Ring-1T), arXiv 2510.18855.
    dis            sg(r 1[1 - clip_low <= r <= 1 + clip_high]) A log current (double-sided importance sampling). GLM-5,
                   arXiv 2602.15763, section 4.
    cispo          sg(clip(r)) A log current. MiniMax-M1, arXiv 2506.13585.
    m2po           M r A, M = 0 for the tokens with the largest |log(proximal / behaviour)| in the update: the fewest
                   such that its mean square over the remaining tokens is at most max_second_moment. Zheng et al. 2025,
                   arXiv 2510.01161.

    Args:
        config: names the objective and its bounds.
        log_ratio_bound: for m2po, the largest |log(proximal / behaviour)| with M = 1 (`ratios.second_moment_bound`).
    """
    low, high, cap = 1 - config.clip_low, 1 + config.clip_high, config.behaviour_weight_cap
    r = CURRENT / BEHAVIOUR
    match config.name:
        case "ppo_clip":
            return Surrogate((_trust_region(r, config),))
        case "decoupled_ppo":
            return Surrogate((truncate(PROXIMAL / BEHAVIOUR, cap=cap), _trust_region(CURRENT / PROXIMAL, config)))
        case "tis":
            return Surrogate((truncate(r, cap=cap),), score=True)
        case "icepop":
            calibration = mask(PROXIMAL / BEHAVIOUR, low=config.mask_low, high=config.mask_high)
            return Surrogate((calibration, _trust_region(CURRENT / PROXIMAL, config)))
        case "dis":
            return Surrogate((mask(r, low=low, high=high),), score=True)
        case "cispo":
            return Surrogate((clip(r, low=low, high=high),), score=True)
        case "m2po":
            near = Interval(math.exp(-log_ratio_bound), math.exp(min(log_ratio_bound, 700.0)))
            return Surrogate((keep(PROXIMAL / BEHAVIOUR, positive=near, negative=near), unbounded(r)))
        case "gspo" | "sequence_tis" | "sequence_mis" | "sequence_mask":
            return trajectory_surrogate(config, config.name)


def trajectory_surrogate(config: LossConfig, name: TrajectoryLossName) -> Surrogate:
    """The objectives that weight the tokens of a trajectory together; notation as in `surrogate`.

    gspo           min(b, cap) min(s A, clip(s) A), s = geometric mean of current / proximal over the trajectory.
                   Zheng et al. 2025, arXiv 2507.18071; use aggregation=sequence_mean. The clip range is a few 1e-4
                   wide, so s is relative to the trainer's policy, without the rounding differences of an engine.
                   b = geometric mean of proximal / behaviour, without gradient, is not in the paper: as in
                   decoupled_ppo, it corrects from the engine's policy to the trainer's.
    sequence_tis   sg(min(P, cap)) A log current, P = product of r over the trajectory, and
    sequence_mis   sg(P 1[P <= cap]) A log current. Liu et al. 2025, "When Speed Kills Stability". The old policy is the
                   engine's. In the article both policies have the same weights; here P also includes further optimizer
                   steps and staleness. log P accumulates the rounding of all tokens of a trajectory.
    sequence_mask  M min(r A, clip(r) A), M = 0 if A < 0 and the mean of log(behaviour / current) over the trajectory
                   exceeds max_sequence_drift. DeepSeek-V3.2, arXiv 2512.02556, which also uses the engine's policy as
                   the old policy.
    """
    r, cap = CURRENT / BEHAVIOUR, config.behaviour_weight_cap
    match name:
        case "gspo":
            correction = truncate((PROXIMAL / BEHAVIOUR).geometric, cap=cap)
            return Surrogate((correction, _trust_region((CURRENT / PROXIMAL).geometric, config)))
        case "sequence_tis":
            return Surrogate((truncate(r.product, cap=cap),), score=True)
        case "sequence_mis":
            return Surrogate((mask(r.product, high=cap),), score=True)
        case "sequence_mask":
            near = Interval(low=math.exp(-config.max_sequence_drift))
            return Surrogate((keep(r.geometric, positive=ANY, negative=near), _trust_region(r, config)))


def _trust_region(ratio: Ratio, config: LossConfig) -> Weight:
    return pessimistic_clip(ratio, low=1 - config.clip_low, high=1 + config.clip_high, ceiling=config.dual_clip)


def policy_loss(
    logprobs: TokenLogprobs,
    *,
    advantages: Tensor,
    entropy: Tensor,
    config: LossConfig,
    trajectories: Trajectories | None = None,
    log_ratio_bound: float = math.inf,
) -> tuple[Tensor, dict[FilterName, Tensor]]:
    """Loss [n] of each token, and filter -> bool [n], whether the filter changed the token's weight.

    Tokens that a filter dropped keep their KL and entropy terms. The entropy term is not importance-weighted, as in
    verl.

    Args:
        logprobs: [n] each.
        advantages: [n].
        entropy: [n], nat, of the current policy.
        config: the loss.
        trajectories: trajectory of each token; None if the objective weights tokens separately.
        log_ratio_bound: for m2po; see `surrogate`.

    Raises:
        ValueError: there is a KL term, but no reference logprobs.
    """
    objective = surrogate(config, log_ratio_bound=log_ratio_bound)
    loss, touched = objective(logprobs, advantages=advantages, trajectories=trajectories)
    if config.kl_coefficient > 0:
        if logprobs.reference is None:
            raise ValueError(
                f"loss.kl_coefficient is {config.kl_coefficient}, but the batch has no reference_logprobs; "
                "add them to the batch or set loss.kl_coefficient=0"
            )
        loss = loss + config.kl_coefficient * kl_term(logprobs, config.kl_estimator, cap=config.behaviour_weight_cap)
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * entropy
    return loss, touched


def kl_term(logprobs: TokenLogprobs, estimator: KLEstimator, *, cap: float) -> Tensor:
    """sg(min(current / behaviour, cap)) x `kl_estimate` [n]: KL(current || reference) from samples of the engine.

    The importance weight corrects each token from the behaviour policy to the current policy, up to the cap. It has no
    gradient, so that each estimator has the gradient described at `kl_estimate`. DeepSeek-V3.2 (arXiv 2512.02556) uses
    this weight for k3, without a cap and with a gradient.
    """
    assert logprobs.reference is not None
    weight, _ = truncate(CURRENT / BEHAVIOUR, cap=cap)(logprobs, advantages=torch.zeros_like(logprobs.current))
    return weight * kl_estimate(logprobs.current, logprobs.reference, estimator)


def kl_estimate(current: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(current || reference) in nat at each token (Schulman 2020, "Approximating KL divergence").

    current = -1, reference = -1.5: k1 = 0.5, k2 = 0.125, k3 = 0.107.

    On samples of the current policy, the gradient of k2 is the gradient of KL(current || reference), the gradient of k3
    is the gradient of KL(reference || current), and the gradient of k1 is zero in expectation.

    k3 clamps log(reference / current) to 20 nat, as verl does, because its exponential overflows float32 at 89 nat.
    Tokens above 20 nat have no gradient.
    """
    log_ratio = reference - current
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            log_ratio = log_ratio.clamp(max=_LARGEST_KL_RATIO)
            return torch.exp(log_ratio) - 1 - log_ratio


def token_weights(
    num_tokens: Tensor,
    *,
    aggregation: Aggregation,
    trajectory: Tensor | None = None,
    group: Tensor | None = None,
    fixed_length: int | None = None,
) -> Tensor:
    """Weight of the tokens of each sequence, float32 [S]: the loss of a mini-batch is sum(weight * token loss).

    The weights are computed for the whole mini-batch, so that the loss does not depend on the split into micro-batches.
    All given sequences count, also with advantage zero (see `LossConfig.count`). Tokens outside the loss mask (too old
    with staleness.policy=mask) do not count, nor do trajectories and groups without tokens in the loss.

    token_mean     1 / tokens of the mini-batch (DAPO, arXiv 2503.14476)
    sequence_mean  1 / (trajectories x tokens of the trajectory) (GRPO, arXiv 2402.03300)
    group_mean     1 / (groups x tokens of the group) (prompt-level mean; ScaleRL, arXiv 2510.13786)
    fixed_length   1 / (trajectories x fixed_length) (Dr. GRPO, arXiv 2503.20783)

    Three sequences with (2, 2, 1) tokens, the first two from one trajectory, all from one group: token_mean and
    group_mean (0.2, 0.2, 0.2), sequence_mean (0.125, 0.125, 0.5), fixed_length=10 (0.05, 0.05, 0.05).

    Args:
        num_tokens: int64 [S], tokens of each sequence in the loss.
        aggregation: one of the names above.
        trajectory: int64 [S], trajectory of each sequence; None if every sequence is a trajectory.
        group: int64 [S], prompt group of each sequence; required for group_mean.
        fixed_length: tokens; required for fixed_length.

    Raises:
        ValueError: `group` is missing.
    """
    if aggregation == "token_mean":
        return torch.full(num_tokens.shape, 1.0 / max(1, int(num_tokens.sum())))
    unit = group if aggregation == "group_mean" else trajectory
    if aggregation == "group_mean" and group is None:
        raise ValueError("loss.aggregation is group_mean, but the batch has no key `group`; add it")
    of = torch.arange(len(num_tokens)) if unit is None else unit.unique(return_inverse=True)[1]
    tokens = torch.zeros(len(num_tokens), dtype=num_tokens.dtype).index_add(0, of, num_tokens)
    trained = max(1, int((tokens > 0).sum()))
    if aggregation == "fixed_length":
        assert fixed_length is not None
        return torch.full(num_tokens.shape, 1.0 / (trained * fixed_length))
    return 1.0 / (tokens[of].clamp(min=1) * trained)
