"""Policy losses: one class for each objective, with its fields and its equation over named logprobs (`ratios`).

In the equations, r = current / behaviour, A is the advantage, clip(r) is r within [1 - clip_low, 1 + clip_high], and
sg() stops the gradient. `proximal` is the trainer's policy before the first optimizer step of the batch, `behaviour`
the engine's policy. Papers without a separate engine call both "old policy". `old` is the trainer's policy with the
weights of the version that sampled the token.

With `ratio=separated` an equation is over `old`: it takes the place of proximal, or of behaviour if the equation has no
proximal; a factor min(old / behaviour, 2) then corrects for the engine. A stale token's ratio to behaviour is
(current / old) x (old / behaviour): the first factor is the movement of the weights alone, the second the numerics of
the engine alone (the split of arXiv 2605.12070).

A new objective is a new class here, listed in `LossConfig`, or a class of a user's file: `loss.name=FILE.py:CLASS` or
`loss.name=MODULE:CLASS`. All tensors have one entry per token in the loss.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from agent_loop.bounds import Count, bounded
from async_rl.files.user_code import or_user_class
from async_rl.trainer.loss.ratios import (
    ANY,
    BEHAVIOUR,
    CURRENT,
    OLD,
    PROXIMAL,
    BehaviourRank,
    FilterName,
    Interval,
    Ratio,
    Source,
    TokenLogprobs,
    Trajectories,
    Weight,
    binary_kl,
    clip,
    keep,
    mask,
    pessimistic_clip,
    second_moment_bound,
    sources_of,
    total_variation,
    truncate,
    unbounded,
)

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "fixed_length"]
KLEstimator = Literal["k1", "k2", "k3"]
CountedGroups = Literal["all", "informative"]
KLPlace = Literal["loss", "reward"]
PolicyRatio = Literal["combined", "separated"]

_LARGEST_KL_RATIO = 3.0  # nat
_ENGINE_WEIGHT_CAP = 2.0


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
                touched[weight.filter] = touched.get(weight.filter, False) | changed
        return -value, touched


@bounded("loss")
class PolicyLoss(ABC):
    """Base of the objectives, with the fields that apply to all.

    Raises:
        ValueError: a value is out of range or has no effect; the message names the field.
    """

    needs_proximal_pass: ClassVar[bool] = False
    """Whether the loss of a token depends on the proximal logprobs of all tokens of the update."""

    name: str = ""
    """Name of the objective, or FILE.py:CLASS or MODULE:CLASS of a user's one."""
    ratio: PolicyRatio = "combined"
    """`separated` puts `old` into the equation, so that the engine and the movement of the weights are two ratios; see
    the top of this module. It costs about a forward pass of the batch."""
    aggregation: Aggregation = "token_mean"
    """Mean over all tokens, mean over trajectories of the mean of each, mean over prompt groups of the mean of each, or
    (`fixed_length`) sum over tokens / (trajectories x fixed_length); see `token_weights`."""
    fixed_length: Count | None = None
    """Tokens; only for aggregation=fixed_length."""
    count: CountedGroups = "all"
    """Groups in these means. `all` includes groups with equal rewards, as in the papers; `informative` leaves them out
    of the loss, as if they had not been sampled."""
    negative_token_share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the tokens of a trajectory with negative advantage that are trained: those that its engine found least
    likely (negative token filtering, Wu et al. 2026, arXiv 2606.17250). The others count in the aggregation."""
    kl_coefficient: Annotated[float, Ge(0)] = 0.0
    """Factor of the KL to the reference; 0 for none."""
    kl_in: KLPlace = "loss"
    """`loss` adds `kl_term` to the loss. `reward` subtracts log(proximal / reference) of the tokens from the reward, as
    `BatchRewards.with_kl` describes."""
    kl_estimator: KLEstimator = "k3"
    """See `kl_estimate`."""
    kl_weight_cap: Annotated[float, Gt(0)] = 2.0
    """Upper bound on the importance weight of the KL term; see `kl_term`."""
    entropy_coefficient: Annotated[float, Ge(0)] = 0.0
    """Factor of the entropy that is subtracted from the loss."""

    def __post_init__(self) -> None:
        if (self.aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"loss.aggregation is {self.aggregation} with loss.fixed_length={self.fixed_length}; set a length "
                "(such as rollout.limits.max_tokens) with aggregation=fixed_length, and null with any other"
            )
        if self.kl_coefficient == 0:
            self._refuse_changed("kl_in", "kl_estimator", "kl_weight_cap", other="kl_coefficient=0")
        elif self.kl_in == "reward":
            # Rewards are penalised by k1. With this penalty the rewards of hardly any group are equal.
            self._refuse_changed("kl_estimator", "kl_weight_cap", "count", other="kl_in=reward")

    def _refuse_changed(self, *names: str, other: str) -> None:
        """Refuse values of the fields `names` other than their defaults, because they have no effect with `other`."""
        for name in names:
            value, default = getattr(self, name), self.__dataclass_fields__[name].default
            if value != default:
                raise ValueError(
                    f"loss.{name} is {value} with loss.{other}, so it has no effect; change "
                    f"loss.{other.partition('=')[0]}, or leave it at {default}"
                )

    @abstractmethod
    def surrogate(self) -> Surrogate:
        """The equation of the objective."""

    @property
    def _behaviour(self) -> Source:
        """Denominator of an equation without proximal; `_engine` are the weights that correct for it."""
        return OLD if self.ratio == "separated" else BEHAVIOUR

    @property
    def _engine(self) -> tuple[Weight, ...]:
        return (truncate(OLD / BEHAVIOUR, cap=_ENGINE_WEIGHT_CAP),) if self.ratio == "separated" else ()

    @property
    def _proximal(self) -> Source:
        """The middle of behaviour / middle / current."""
        return OLD if self.ratio == "separated" else PROXIMAL

    def surrogate_of_update(self, log_ratios: Tensor) -> Surrogate:
        """The equation in an update whose tokens have these log(proximal / behaviour) [N], on all ranks; with
        `ratio=separated` they are log(proximal / old)."""
        return self.surrogate()

    def equation(self, log_ratios: Tensor | None = None) -> Surrogate:
        """`surrogate`, or `surrogate_of_update` with `log_ratios`, behind the gates that all objectives have."""
        found = self.surrogate() if log_ratios is None else self.surrogate_of_update(log_ratios)
        if self.negative_token_share == 1.0:
            return found
        # The first ceil(share x tokens) ranks, which are multiples of 1 / tokens, are below the share.
        least = Interval(high=math.nextafter(self.negative_token_share, 0.0))
        return replace(found, weights=(keep(BehaviourRank(), positive=ANY, negative=least), *found.weights))

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens of groups with equal rewards have a gradient, from KL (also in the reward) or entropy."""
        return self.count == "all" and (self.kl_coefficient > 0 or self.entropy_coefficient > 0)

    @property
    def penalises_rewards(self) -> bool:
        """Whether the KL is subtracted from the rewards."""
        return self.kl_coefficient > 0 and self.kl_in == "reward"

    @property
    def needs_old_policy(self) -> bool:
        """Whether the equation has old logprobs."""
        return self.ratio == "separated" or any(OLD in sources_of(w.statistic) for w in self.surrogate().weights)

    @property
    def needs_whole_trajectories(self) -> bool:
        """Whether all tokens of a trajectory must be in one micro-batch."""
        return any(w.statistic.level != "token" for w in self.equation().weights)

    @property
    def filters(self) -> tuple[FilterName, ...]:
        """Names of the filters of the objective, in the order of `Surrogate.weights`."""
        return tuple(dict.fromkeys(w.filter for w in self.equation().weights if w.filter is not None))


@bounded("loss")
class ClippedLoss(PolicyLoss):
    """Base of the objectives with PPO's clip: min(r A, clip(r) A) of some ratio r."""

    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Gt(0)] = 0.28
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: float | None = None
    """Upper bound on the ratio of tokens with negative advantage. PPO has no such bound; None for none. Ye et
    al. 2020, arXiv 1912.09729."""

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if self.dual_clip is not None and not self.dual_clip > (least := 1 + self.clip_high):
            raise ValueError(f"loss.dual_clip is {self.dual_clip}; must be > 1 + loss.clip_high = {least}")

    def clipped(self, ratio: Ratio) -> Weight:
        """The weight with PPO's clip of `ratio`."""
        return pessimistic_clip(ratio, low=1 - self.clip_low, high=1 + self.clip_high, ceiling=self.dual_clip)


@bounded("loss")
class PPOClip(ClippedLoss):
    """min(r A, clip(r) A). Schulman et al. 2017, arXiv 1707.06347, eq. 7.

    Unequal bounds ("clip-higher") are from DAPO, arXiv 2503.14476.
    """

    name: Literal["ppo_clip"] = "ppo_clip"
    """Name of the objective."""

    def surrogate(self) -> Surrogate:
        return Surrogate((*self._engine, self.clipped(CURRENT / self._behaviour)))


@bounded("loss")
class DecoupledPPO(ClippedLoss):
    """min(proximal / behaviour, cap) min(r' A, clip(r') A), r' = current / proximal. Hilton et al. 2022, arXiv
    2110.00641, without the cap; the cap is from `TIS`.

    AReaL (arXiv 2505.24298) drops the tokens above its cap; use `IcePop` with mask_low=0 and mask_high=cap for that.
    """

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Name of the objective."""
    behaviour_weight_cap: Annotated[float, Gt(0)] = 2.0
    """Upper bound on proximal / behaviour."""

    def surrogate(self) -> Surrogate:
        correction = truncate(self._proximal / BEHAVIOUR, cap=self.behaviour_weight_cap)
        return Surrogate((correction, self.clipped(CURRENT / self._proximal)))


@bounded("loss")
class TIS(PolicyLoss):
    """sg(min(r, cap)) A log current (truncated importance sampling). Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training".

    The variant with PPO's clip is `DecoupledPPO`.
    """

    name: Literal["tis"] = "tis"
    """Name of the objective."""
    behaviour_weight_cap: Annotated[float, Gt(0)] = 2.0
    """Upper bound on current / behaviour."""

    def surrogate(self) -> Surrogate:
        weight = truncate(CURRENT / self._behaviour, cap=self.behaviour_weight_cap)
        return Surrogate((*self._engine, weight), score=True)


@bounded("loss")
class IcePop(ClippedLoss):
    """k 1[mask_low <= k <= mask_high] min(r' A, clip(r') A), k = proximal / behaviour, r' = current / proximal (masked
    importance sampling). Ling team 2025, "Every Step Evolves" (Ring-1T), arXiv 2510.18855.
    """

    name: Literal["icepop"] = "icepop"
    """Name of the objective."""
    mask_low: Annotated[float, Ge(0), Lt(1)] = 0.5
    """Tokens whose proximal / behaviour is below this are dropped."""
    mask_high: Annotated[float, Gt(1)] = 5.0
    """Tokens whose proximal / behaviour is above this are dropped."""

    def surrogate(self) -> Surrogate:
        calibration = mask(self._proximal / BEHAVIOUR, low=self.mask_low, high=self.mask_high)
        return Surrogate((calibration, self.clipped(CURRENT / self._proximal)))


@bounded("loss")
class DIS(PolicyLoss):
    """sg(r 1[1 - clip_low <= r <= 1 + clip_high]) A log current (double-sided importance sampling). GLM-5, arXiv
    2602.15763, section 4.
    """

    name: Literal["dis"] = "dis"
    """Name of the objective."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 0.2
    """Tokens with a ratio below 1 - clip_low are dropped."""
    clip_high: Annotated[float, Gt(0)] = 0.28
    """Tokens with a ratio above 1 + clip_high are dropped."""

    def surrogate(self) -> Surrogate:
        weight = mask(CURRENT / self._behaviour, low=1 - self.clip_low, high=1 + self.clip_high)
        return Surrogate((*self._engine, weight), score=True)


@bounded("loss")
class CISPO(PolicyLoss):
    """sg(clip(r)) A log current. MiniMax-M1, arXiv 2506.13585. The defaults clip only above."""

    name: Literal["cispo"] = "cispo"
    """Name of the objective."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 1.0
    """Ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Gt(0)] = 1.0
    """Ratios above 1 + clip_high are clipped."""

    def surrogate(self) -> Surrogate:
        weight = clip(CURRENT / self._behaviour, low=1 - self.clip_low, high=1 + self.clip_high)
        return Surrogate((*self._engine, weight), score=True)


@bounded("loss")
class M2PO(PolicyLoss):
    """M r A, M = 0 for the tokens with the largest |log(proximal / behaviour)| in the update: the fewest such that its
    mean square over the remaining tokens is at most max_second_moment. Zheng et al. 2025, arXiv 2510.01161.
    """

    needs_proximal_pass: ClassVar[bool] = True

    name: Literal["m2po"] = "m2po"
    """Name of the objective."""
    max_second_moment: Annotated[float, Gt(0)] = 0.04
    """Largest mean of the squared log ratios of the remaining tokens, in nat^2."""

    def surrogate(self) -> Surrogate:
        """The equation above with M = 1."""
        import torch

        return self.surrogate_of_update(torch.empty(0))

    def surrogate_of_update(self, log_ratios: Tensor) -> Surrogate:
        bound = second_moment_bound(log_ratios, limit=self.max_second_moment)
        near = Interval(math.exp(-bound), math.exp(min(bound, 700.0)))
        moved = keep(PROXIMAL / self._behaviour, positive=near, negative=near)
        return Surrogate((*self._engine, moved, unbounded(CURRENT / self._behaviour)))


@bounded("loss")
class GSPO(ClippedLoss):
    """min(b, cap) min(s A, clip(s) A), s = geometric mean of current / proximal over the trajectory. Zheng et al. 2025,
    arXiv 2507.18071.

    The clip range is a few 1e-4 wide, so s is relative to the trainer's policy, without the rounding differences of an
    engine. b = geometric mean of proximal / behaviour, without gradient, is not in the paper: as in `DecoupledPPO`, it
    corrects from the engine's policy to the trainer's.
    """

    name: Literal["gspo"] = "gspo"
    """Name of the objective."""
    clip_low: Annotated[float, Gt(0), Le(1)] = 3e-4
    """Means below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Gt(0)] = 4e-4
    """Means above 1 + clip_high are clipped."""
    behaviour_weight_cap: Annotated[float, Gt(0)] = 2.0
    """Upper bound on the geometric mean of proximal / behaviour."""
    aggregation: Aggregation = "sequence_mean"
    """See `PolicyLoss`; the paper has the mean over trajectories."""

    def surrogate(self) -> Surrogate:
        correction = truncate((self._proximal / BEHAVIOUR).geometric, cap=self.behaviour_weight_cap)
        return Surrogate((correction, self.clipped((CURRENT / self._proximal).geometric)))


@bounded("loss")
class SequenceTIS(PolicyLoss):
    """sg(min(P, cap)) A log current, P = product of r over the trajectory. Liu et al. 2025, "When Speed Kills
    Stability".

    The old policy is the engine's. In the article both policies have the same weights; here P also includes further
    optimizer steps and staleness. log P accumulates the rounding of all tokens of a trajectory.
    """

    name: Literal["sequence_tis"] = "sequence_tis"
    """Name of the objective."""
    behaviour_weight_cap: Annotated[float, Gt(0)] = 2.0
    """Upper bound on the product of current / behaviour."""
    aggregation: Aggregation = "sequence_mean"
    """See `PolicyLoss`."""

    def surrogate(self) -> Surrogate:
        weight = truncate((CURRENT / self._behaviour).product, cap=self.behaviour_weight_cap)
        return Surrogate((*self._engine, weight), score=True)


@bounded("loss")
class SequenceMIS(PolicyLoss):
    """sg(P 1[P <= cap]) A log current, P and source as in `SequenceTIS`."""

    name: Literal["sequence_mis"] = "sequence_mis"
    """Name of the objective."""
    behaviour_weight_cap: Annotated[float, Gt(0)] = 2.0
    """Trajectories whose product of current / behaviour is above this are dropped."""
    aggregation: Aggregation = "sequence_mean"
    """See `PolicyLoss`."""

    def surrogate(self) -> Surrogate:
        weight = mask((CURRENT / self._behaviour).product, high=self.behaviour_weight_cap)
        return Surrogate((*self._engine, weight), score=True)


@bounded("loss")
class SequenceMask(ClippedLoss):
    """M min(r A, clip(r) A), M = 0 if A < 0 and the mean of log(behaviour / current) over the trajectory exceeds
    max_sequence_drift. DeepSeek-V3.2 (arXiv 2512.02556) also uses the engine's policy as the old policy.
    """

    name: Literal["sequence_mask"] = "sequence_mask"
    """Name of the objective."""
    max_sequence_drift: Annotated[float, Gt(0)] = 0.5
    """Largest mean of log(behaviour / current) of a trajectory with negative advantage, in nat per token."""
    aggregation: Aggregation = "sequence_mean"
    """See `PolicyLoss`."""

    def surrogate(self) -> Surrogate:
        r, near = CURRENT / self._behaviour, Interval(low=math.exp(-self.max_sequence_drift))
        return Surrogate((*self._engine, keep(r.geometric, positive=ANY, negative=near), self.clipped(r)))


@bounded("loss")
class DPPO(PolicyLoss):
    """M r A, M = 0 if A > 0 and the token has become more likely, or A < 0 and less likely, by more than max_divergence
    (divergence proximal policy optimization). Qi et al. 2026, arXiv 2602.04879, the binary variants.
    """

    name: Literal["dppo"] = "dppo"
    """Name of the objective."""
    divergence: Literal["binary_kl", "total_variation"] = "binary_kl"
    """KL(behaviour || current) or total variation of the token against all others."""
    max_divergence: Annotated[float, Gt(0)] = 0.05
    """Largest divergence of a token with gradient, in nat for binary_kl."""

    def surrogate(self) -> Surrogate:
        moved = (binary_kl if self.divergence == "binary_kl" else total_variation)(self._behaviour, CURRENT)
        rising, falling = Interval(-math.inf, self.max_divergence), Interval(-self.max_divergence)
        near = keep(replace(moved, signed=True), positive=rising, negative=falling)
        return Surrogate((*self._engine, near, unbounded(CURRENT / self._behaviour)))


@bounded("loss")
class KPop(ClippedLoss):
    """k M min(r' A, clip(r') A), k and r' as in `IcePop`, M = 0 if KL(behaviour || proximal) of the token against all
    others exceeds max_kl. The mask of Guo et al. 2026, "KPop" (Ring-2.6-1T), in the place of IcePop's.
    """

    name: Literal["kpop"] = "kpop"
    """Name of the objective."""
    max_kl: Annotated[float, Gt(0)] = 0.01
    """Largest KL of a token with gradient, in nat."""

    def surrogate(self) -> Surrogate:
        near = Interval(high=self.max_kl)
        calibration = keep(binary_kl(BEHAVIOUR, self._proximal), positive=near, negative=near)
        correction = unbounded(self._proximal / BEHAVIOUR, gradient=False)
        return Surrogate((calibration, correction, self.clipped(CURRENT / self._proximal)))


@bounded("loss")
class FlashREINFORCE(PolicyLoss):
    """sg(M r) A log current, M = 0 if the mean over the trajectory of KL(behaviour || current), of each token against
    all others, exceeds max_kl. "FlashREINFORCE" (2026), as in OpenRLHF; its advantage is `batch_mean`.
    """

    name: Literal["flash_reinforce"] = "flash_reinforce"
    """Name of the objective."""
    max_kl: Annotated[float, Gt(0)] = 3e-3
    """Largest mean KL of a trajectory with gradient, in nat per token."""
    aggregation: Aggregation = "sequence_mean"
    """See `PolicyLoss`; the paper has the mean over trajectories."""

    def surrogate(self) -> Surrogate:
        near = Interval(high=self.max_kl)
        trusted = keep(binary_kl(self._behaviour, CURRENT).mean, positive=near, negative=near)
        return Surrogate((*self._engine, trusted, unbounded(CURRENT / self._behaviour, gradient=False)), score=True)


def _problem_of(loss: PolicyLoss) -> str:
    """What is wrong with the equation of a user's loss; "" for nothing."""
    found: Any = loss.surrogate()
    weights: tuple[Any, ...] = found.weights if isinstance(found, Surrogate) else (None,)
    whole = all(isinstance(weight, Weight) for weight in weights)
    return "" if whole else f"whose method surrogate returns {found!r}; return a Surrogate of Weights, such as clip()"


LossConfig = Annotated[
    Annotated[
        PPOClip
        | DecoupledPPO
        | TIS
        | IcePop
        | DIS
        | CISPO
        | M2PO
        | GSPO
        | SequenceTIS
        | SequenceMIS
        | SequenceMask
        | DPPO
        | KPop
        | FlashREINFORCE,
        Field(discriminator="name"),
    ],
    or_user_class(PolicyLoss, key="loss", problem_of=_problem_of),
]


def policy_loss(
    logprobs: TokenLogprobs,
    *,
    advantages: Tensor,
    entropy: Tensor,
    config: LossConfig,
    trajectories: Trajectories | None = None,
    surrogate: Surrogate | None = None,
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
        surrogate: equation of `config` in this update; None for `config.equation()`.

    Raises:
        ValueError: there is a KL term, but no reference logprobs.
    """
    objective = surrogate or config.equation()
    loss, touched = objective(logprobs, advantages=advantages, trajectories=trajectories)
    if config.kl_coefficient > 0 and not config.penalises_rewards:
        if logprobs.reference is None:
            raise ValueError(
                f"loss.kl_coefficient is {config.kl_coefficient}, but the batch has no reference_logprobs; "
                "add them to the batch or set loss.kl_coefficient=0"
            )
        loss = loss + config.kl_coefficient * kl_term(logprobs, config.kl_estimator, cap=config.kl_weight_cap)
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * entropy
    return loss, touched


def kl_term(logprobs: TokenLogprobs, estimator: KLEstimator, *, cap: float) -> Tensor:
    """sg(min(current / behaviour, cap)) x `kl_estimate` [n]: KL(current || reference) from samples of the engine.

    The importance weight corrects each token from the behaviour policy to the current policy, up to the cap. It has no
    gradient, so that each estimator has the gradient described at `kl_estimate`. DeepSeek-V3.2 (arXiv 2512.02556) uses
    this weight for k3, without a cap and with a gradient.
    """
    import torch

    assert logprobs.reference is not None
    weight, _ = truncate(CURRENT / BEHAVIOUR, cap=cap)(logprobs, advantages=torch.zeros_like(logprobs.current))
    return weight * kl_estimate(logprobs.current, logprobs.reference, estimator)


def kl_estimate(current: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(current || reference) in nat at each token (Schulman 2020, "Approximating KL divergence").

    current = -1, reference = -1.5: k1 = 0.5, k2 = 0.125, k3 = 0.107.

    On samples of the current policy, the gradient of k2 is the gradient of KL(current || reference), the gradient of k3
    is the gradient of KL(reference || current), and the gradient of k1 is zero in expectation.

    k3 clamps log(reference / current) to 3 nat, so that a token counts at most 16.1 nat and has a gradient of at most
    19. Without the clamp one token of 20 nat would count 4.9e8 nat. Tokens above 3 nat have no gradient. verl cuts k3
    at 10 nat, a log ratio of 2.6.
    """
    import torch

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
    All given sequences count, also with advantage zero (see `PolicyLoss.count`). Tokens outside the loss mask (too old
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
    import torch

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
