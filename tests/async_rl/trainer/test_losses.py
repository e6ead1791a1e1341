"""Every objective against a plain implementation, one token after the other, in value and in gradient; then the terms
around it: KL, entropy, aggregation; and refusals of a configuration.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from async_rl.trainer.loss.losses import (
    DecoupledPPO,
    kl_estimate,
    kl_term,
    policy_loss,
    token_weights,
)
from async_rl.trainer.loss.ratios import (
    BEHAVIOUR,
    CURRENT,
    TokenLogprobs,
    Trajectories,
    binary_kl,
    second_moment_bound,
    total_variation,
)
from async_rl.trainer.step import ranks_within
from tests.helpers import numerics
from tests.helpers.losses import LOSSES, NAMES, OWN_FIELDS, make_loss

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SOURCES = ("current", "behaviour", "proximal")
SPREAD = {"gspo": 3.0}  # for means over trajectories to reach the bounds
POSITIVE = ("behaviour_weight_cap", "max_sequence_drift", "max_second_moment", "max_kl", "max_divergence")
LOW, HIGH, CAP, MASK_LOW, MASK_HIGH, DRIFT, MOMENT, MAX_KL = 0.8, 1.28, 2.0, 0.5, 5.0, 0.5, 0.04, 0.02


def plain_losses(name, current, behaviour, proximal, advantages, trajectory, *, frozen=None, dual_clip=None):
    """Loss of each token; factors without gradient are computed from `frozen` in place of `current`."""
    tokens = range(len(current))
    fixed = current if frozen is None else frozen
    of = {i: [t for t in tokens if trajectory[t] == i] for i in set(trajectory)}

    def clipped(ratio, advantage):
        bounded = min(ratio * advantage, min(max(ratio, LOW), HIGH) * advantage)
        return max(bounded, dual_clip * advantage) if dual_clip and advantage < 0 else bounded

    def drift(t, source):
        return [source[u] - behaviour[u] for u in of[trajectory[t]]]

    def token(t):
        a, ratio, held = advantages[t], math.exp(current[t] - behaviour[t]), math.exp(fixed[t] - behaviour[t])
        near, correction = math.exp(current[t] - proximal[t]), math.exp(proximal[t] - behaviour[t])
        product = math.exp(sum(drift(t, fixed)))
        match name:
            case "ppo_clip":
                return clipped(ratio, a)
            case "decoupled_ppo":
                return min(correction, CAP) * clipped(near, a)
            case "icepop":
                return (correction if MASK_LOW <= correction <= MASK_HIGH else 0.0) * clipped(near, a)
            case "tis":
                return min(held, CAP) * a * current[t]
            case "dis":
                return (held if LOW <= held <= HIGH else 0.0) * a * current[t]
            case "cispo":
                return min(max(held, LOW), HIGH) * a * current[t]
            case "gspo":
                correction = math.exp(np.mean(drift(t, proximal)))
                return min(correction, CAP) * clipped(
                    math.exp(np.mean(drift(t, current)) - np.mean(drift(t, proximal))), a
                )
            case "sequence_tis":
                return min(product, CAP) * a * current[t]
            case "sequence_mis":
                return (product if product <= CAP else 0.0) * a * current[t]
            case "sequence_mask":
                dropped = a < 0 and -np.mean(drift(t, fixed)) > DRIFT
                return 0.0 if dropped else clipped(ratio, a)
            case "m2po":
                return ratio * a if t in m2po_kept(behaviour, proximal) else 0.0
            case "dppo":
                moved = (fixed[t] > behaviour[t]) if a > 0 else (fixed[t] < behaviour[t])
                return 0.0 if moved and plain_kl(behaviour[t], fixed[t]) > MAX_KL else ratio * a
            case "kpop":
                near_enough = plain_kl(behaviour[t], proximal[t]) <= MAX_KL
                return (correction if near_enough else 0.0) * clipped(near, a)
            case "flash_reinforce":
                mean = np.mean([plain_kl(behaviour[u], fixed[u]) for u in of[trajectory[t]]])
                return (held if mean <= MAX_KL else 0.0) * a * current[t]

    return [-token(t) for t in tokens]


def plain_kl(p, q):
    """KL of two logprobs as of two outcomes; of a probability near 1 the other outcome keeps 1e-7."""
    p, q = (math.exp(min(x, -1e-7)) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def m2po_kept(behaviour, proximal):
    """Takes out the token of largest squared log ratio until the mean over the others is low enough."""
    kept = sorted(range(len(behaviour)), key=lambda t: (proximal[t] - behaviour[t]) ** 2)
    while kept and np.mean([(proximal[t] - behaviour[t]) ** 2 for t in kept]) > MOMENT:
        kept.pop()
    return kept


def drawn_tokens(seed, *, tokens=24, trajectories=4, spread=0.5):
    """Logprobs, advantages (one per trajectory) and trajectory of random tokens, some ratios in every region."""
    rng = np.random.default_rng(seed)
    current = -rng.gamma(2.0, 1.0, tokens)
    behaviour = current + rng.normal(0, spread, tokens)
    proximal = current + rng.normal(0, spread / 2, tokens)
    trajectory = np.arange(tokens) % trajectories
    advantages = np.array([1.5, -0.7, 0.0, -2.0])[:trajectories][trajectory]
    return current, behaviour, proximal, advantages, trajectory


def ours(name, current, behaviour, proximal, advantages, trajectory, *, old=None, **config):
    """Loss [n] and, for each filter, the tokens that it changed; `current` may be a tensor."""
    tensor = lambda x: x if isinstance(x, torch.Tensor) else torch.tensor(np.array(x), dtype=torch.float64)  # noqa: E731
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "max_kl": MAX_KL, "max_divergence": MAX_KL}
    config = make_loss(name, bounds=bounds, **config)
    count = int(max(trajectory, default=-1)) + 1
    return policy_loss(
        TokenLogprobs(
            current=tensor(current),
            behaviour=tensor(behaviour),
            proximal=tensor(proximal),
            old=None if old is None else tensor(old),
        ),
        advantages=tensor(advantages),
        entropy=torch.zeros(len(trajectory), dtype=torch.float64),
        config=config,
        trajectories=Trajectories(index=torch.tensor(np.array(trajectory, np.int64)), count=count),
        surrogate=config.equation(tensor(proximal) - tensor(behaviour if old is None else old)),
    )


@pytest.mark.parametrize(("seed", "tokens"), [(0, 24), (1, 24), (2, 24), (5, 1), (5, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_each_token_has_the_loss_of_its_equation(name, seed, tokens):
    given = [part[:tokens] for part in drawn_tokens(seed, spread=SPREAD.get(name, 0.5))]
    loss, touched = ours(name, *given)
    assert loss.tolist() == pytest.approx(plain_losses(name, *given), rel=1e-12)
    assert all(t.shape == (tokens,) for t in touched.values())


WITH_PROXIMAL = ("decoupled_ppo", "icepop", "gspo", "kpop")


def assert_gradient(gradient, current, equation, *, step=1e-6):
    """The gradient is that of the sum of `equation`, by differences."""
    for t, found in enumerate(gradient.tolist()):
        ends = []
        for sign in (1, -1):
            moved = current.copy()
            moved[t] += sign * step
            ends.append(sum(equation(moved)))
        assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


def separated_losses(name, current, advantages, trajectory, *, behaviour, old, proximal, **given):
    """The equation over old in place of proximal, or of behaviour with a cut weight old / behaviour."""
    if name in WITH_PROXIMAL:
        return plain_losses(name, current, behaviour, old, advantages, trajectory, **given)
    losses = plain_losses(name, current, old, proximal, advantages, trajectory, **given)
    return [min(math.exp(o - b), 2.0) * loss for o, b, loss in zip(old, behaviour, losses, strict=True)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_a_separated_ratio_corrects_the_engine_and_bounds_the_movement(name, seed):
    current, behaviour, proximal, *others = drawn_tokens(seed, spread=SPREAD.get(name, 0.5))
    old = behaviour + np.random.default_rng(seed).normal(0, 0.6, len(behaviour))
    x = torch.tensor(current, requires_grad=True)
    loss, touched = ours(name, x, behaviour, proximal, *others, old=old, ratio="separated")
    equation = partial(separated_losses, name, behaviour=behaviour, old=old, proximal=proximal)
    assert loss.tolist() == pytest.approx(equation(current, *others), rel=1e-12)
    assert set(touched) == set(make_loss(name, ratio="separated").filters)
    cut = (np.exp(old - behaviour) > 2) & (others[0] != 0)
    if name not in WITH_PROXIMAL:
        _, of_movement = ours(name, current, old, proximal, *others)
        assert touched["truncate"].numpy()[cut].all(), "by the weight of the engine"
        assert all(touched[each][changed].all() for each, changed in of_movement.items()), (
            "by the bound of the movement"
        )
    loss.sum().backward()
    assert_gradient(x.grad, current, lambda moved: equation(moved, *others, frozen=current))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_equation_with_constant_weights(name):
    current, *others = drawn_tokens(7)
    x = torch.tensor(current, requires_grad=True)
    ours(name, x, *others)[0].sum().backward()
    assert_gradient(x.grad, current, lambda moved: plain_losses(name, moved, *others, frozen=current))


@pytest.mark.parametrize(
    "name", ["icepop", "dis", "sequence_mis", "m2po", "sequence_mask", "dppo", "kpop", "flash_reinforce"]
)
def test_with_every_token_masked_the_loss_and_its_gradient_are_zero(name):
    current = np.full(6, -1.0)
    far = current + (0.9 if name in ("sequence_mask", "dppo") else -9.0)  # less likely now, or far more
    x = torch.tensor(current, requires_grad=True)
    advantages = np.full(6, -1.0)
    loss, touched = ours(name, x, far, current, advantages, np.zeros(6, int))
    loss.sum().backward()
    assert not loss.any() and not x.grad.any()
    assert touched["mask"].all()


@pytest.mark.parametrize("name", NAMES)
def test_ratios_beyond_all_bounds_stay_finite(name):
    current = np.array([-1.0, -1.0, -200.0, -200.0])
    behaviour = np.array([-200.0, -200.0, -1.0, -1.0])
    x = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    config = {"dual_clip": 3.0} if "dual_clip" in OWN_FIELDS[name] else {}
    parts = [torch.tensor(part, dtype=torch.float32) for part in (behaviour, behaviour, [1.0, -1.0, 1.0, -1.0])]
    loss, _ = ours(name, x, *parts, np.arange(4), **config)
    loss.sum().backward()
    assert loss.isfinite().all() and x.grad.isfinite().all()


OTHER_VALUES = {
    "clip_low": 0.05,
    "clip_high": 0.05,
    "dual_clip": 1.5,
    "behaviour_weight_cap": 1.1,
    "mask_low": 0.9,
    "mask_high": 1.1,
    "max_sequence_drift": 0.01,
    "max_second_moment": 0.4,
    "max_kl": 0.1,
    "max_divergence": 0.2,
    "divergence": "total_variation",
}


@pytest.mark.parametrize(("name", "field"), [(n, field) for n, own in OWN_FIELDS.items() for field in own])
def test_a_field_that_an_objective_uses_changes_its_gradient(name, field):
    changed = []
    for seed in range(20):  # few tokens lie between the two values, so one batch may have none
        current, *others = drawn_tokens(seed, spread=1.0)
        gradients = []
        for config in ({}, {field: OTHER_VALUES[field]}):
            x = torch.tensor(current, requires_grad=True)
            ours(name, x, *others, **config)[0].sum().backward()
            gradients.append(x.grad)
        changed.append(not torch.allclose(*gradients))
    assert any(changed)


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    given = drawn_tokens(2, spread=2.0)
    plain = plain_losses("ppo_clip", *given, dual_clip=3.0)
    assert plain != plain_losses("ppo_clip", *given)
    assert ours("ppo_clip", *given, dual_clip=3.0)[0].tolist() == pytest.approx(plain)


def test_filters_report_the_tokens_they_changed_and_no_others():
    for name in NAMES:
        given = drawn_tokens(9, spread=SPREAD.get(name, 0.5))
        _, touched = ours(name, *given)
        assert tuple(touched) == tuple(reversed(LOSSES[name]().filters))
        wide = {"clip_low": 1.0, "clip_high": 1e9, "behaviour_weight_cap": 1e9, "mask_low": 0.0, "mask_high": 1e9,
                "max_sequence_drift": 1e3, "max_kl": 1e3, "max_divergence": 1e3}  # fmt: skip
        free = make_loss(name, bounds=wide).surrogate()
        tensors = [torch.tensor(part) for part in given]
        without, _ = free(
            TokenLogprobs(current=tensors[0], behaviour=tensors[1], proximal=tensors[2]),
            advantages=tensors[3],
            trajectories=Trajectories(index=tensors[4], count=4),
        )
        changed = ~torch.isclose(ours(name, *given)[0], without, rtol=1e-12)
        assert torch.equal(changed, torch.stack(list(touched.values())).any(0)), name
        assert changed.any(), name


def test_a_loss_over_trajectories_is_refused_without_them():
    logprobs = TokenLogprobs(current=torch.zeros(2), behaviour=torch.zeros(2), proximal=torch.zeros(2))
    for name in NAMES:
        config = LOSSES[name]()
        arguments = {"advantages": torch.ones(2), "entropy": torch.zeros(2), "config": config}
        if config.needs_whole_trajectories:
            with pytest.raises(ValueError, match="`trajectories`"):
                policy_loss(logprobs, **arguments)
        else:
            policy_loss(logprobs, **arguments)


@given(st.floats(-40, 0), st.floats(-40, 0), st.sampled_from([torch.float32, torch.float64]))
@example(-1.0, -1.0 + 1e-9, torch.float64)  # its terms cancel to less than 0
def test_divergences_of_a_token_are_those_of_two_outcomes_and_never_negative(p, q, dtype):
    given = TokenLogprobs(**{n: torch.tensor([v], dtype=dtype) for n, v in zip(SOURCES, (q, p, p), strict=True)})
    exact = [min(float(x), -1e-7) for x in (given.behaviour, given.current)]
    (kl,), (variation,) = (of(BEHAVIOUR, CURRENT).value(given, None).tolist() for of in (binary_kl, total_variation))
    assert variation == pytest.approx(abs(math.exp(exact[0]) - math.exp(exact[1])), abs=1e-15)
    # Pinsker, and the KL of the outcome "this token" and of the outcome "another", each with its own rounding.
    assert kl >= 0 and kl + 1e-15 >= 2 * variation**2 * (1 - 1e-6) and math.isfinite(kl)
    here, other = (math.exp(exact[0]), -math.expm1(exact[0])), (math.exp(exact[1]), -math.expm1(exact[1]))
    terms = [x * math.log(x / y) for x, y in zip(here, other, strict=True)]
    assert kl == pytest.approx(sum(terms), rel=1e-9, abs=1e-15 + 1e-15 * max(map(abs, terms)))
    (signed,) = replace(binary_kl(BEHAVIOUR, CURRENT), signed=True).value(given, None).tolist()
    assert abs(signed) == kl and (signed <= 0 or exact[1] >= exact[0])


@given(
    st.lists(st.tuples(st.floats(-9, 0), st.integers(0, 2)), min_size=1, max_size=20),
    st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0]),
    st.sampled_from(["ppo_clip", "gspo", "flash_reinforce"]),
)
def test_a_share_of_the_tokens_of_negative_trajectories_is_trained_the_least_likely_ones(tokens, share, name):
    behaviour, of = (np.array(column) for column in zip(*tokens, strict=True))
    advantages = np.array([1.0, -1.0, -0.5])[of]
    given = TokenLogprobs(
        current=torch.tensor(behaviour),
        behaviour=torch.tensor(behaviour),
        proximal=torch.tensor(behaviour),
        behaviour_rank=torch.from_numpy(ranks_within(behaviour.astype(np.float32), of=of)),
    )
    whole, cut = (
        policy_loss(
            given,
            advantages=torch.tensor(advantages),
            entropy=torch.zeros(len(of)),
            config=make_loss(name, negative_token_share=value),
            trajectories=Trajectories(index=torch.tensor(of), count=3),
        )
        for value in (1.0, share)
    )
    kept = np.zeros(len(of), bool)
    for number in set(of):
        own = np.flatnonzero(of == number)
        least = sorted(own, key=lambda t: (np.float32(behaviour[t]), t))
        kept[least[: math.ceil(share * len(own))] if number else own] = True
    assert torch.equal(cut[0], torch.where(torch.from_numpy(kept), whole[0], 0.0))
    masked = cut[1].get("mask", torch.zeros(len(of), dtype=torch.bool))
    assert masked.tolist() == (~kept).tolist()
    assert make_loss(name, negative_token_share=share).needs_whole_trajectories == (share < 1 or name != "ppo_clip")


@given(st.lists(st.floats(-3, 3).map(lambda x: round(x, 2)), max_size=30), st.sampled_from([0.01, 0.04, 0.5]))
def test_m2po_keeps_as_many_tokens_as_the_second_moment_allows(log_ratios, limit):
    x = torch.tensor(log_ratios, dtype=torch.float64)
    kept = x.abs() <= second_moment_bound(x, limit=limit)
    assert not kept.any() or (x[kept] ** 2).mean() <= limit * (1 + 1e-9)
    if not kept.all():
        least = x[~kept].abs().min()
        with_more = kept | (x.abs() <= least)
        assert (x[with_more] ** 2).mean() > limit * (1 - 1e-9)


# ---- KL, entropy and aggregation


def logprobs(current, behaviour, reference=None):
    current = torch.tensor(current, dtype=torch.float64)
    return TokenLogprobs(
        current=current.clone().requires_grad_(),
        behaviour=torch.tensor(behaviour, dtype=torch.float64),
        proximal=current,
        reference=None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )


def loss_of(given, advantages, name="decoupled_ppo", **config):
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return policy_loss(given, advantages=advantages, entropy=torch.ones_like(advantages), config=LOSSES[name](**config))


@given(st.floats(-3, 0), st.floats(-3, 0))
def test_kl_estimates_are_their_formulas(current, reference):
    c, r = torch.tensor(current, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    assert kl_estimate(c, r, "k1") == pytest.approx(current - reference)
    assert kl_estimate(c, r, "k2") == pytest.approx((current - reference) ** 2 / 2)
    assert kl_estimate(c, r, "k3") == pytest.approx((r - c).exp().item() - 1 - (reference - current), abs=1e-12)
    assert kl_estimate(c, r, "k3") >= -1e-12


def test_kl_and_entropy_are_added_with_their_coefficients():
    given = logprobs([-1.0], [-1.0], reference=[-1.5])
    plain, _ = loss_of(given, [1.0])
    full, _ = loss_of(given, [1.0], kl_coefficient=0.1, kl_estimator="k1", entropy_coefficient=0.01)
    assert (full - plain).item() == pytest.approx(0.1 * 0.5 - 0.01)


def test_kl_of_stale_samples_is_weighted_with_current_over_behaviour():
    given = logprobs([-1.0, -1.0], [-1.5, -4.0], reference=[-2.0, -2.0])
    loss, _ = loss_of(given, [0.0, 0.0], kl_coefficient=1.0, kl_estimator="k2", kl_weight_cap=3.0)
    weights = torch.tensor([math.exp(0.5), 3.0], dtype=torch.float64)  # exp(3) is cut
    assert loss.tolist() == pytest.approx((weights * 0.5).tolist())
    loss.sum().backward()
    assert given.current.grad.tolist() == pytest.approx(weights.tolist())  # none through the weight


@pytest.mark.parametrize("gap", [3.1, 20.0, 800.0])
def test_one_token_far_from_the_reference_does_not_decide_k3_or_its_gradient(gap):
    given = logprobs([-1.0 - gap, *[-1.0] * 99], [-1.0 - gap, *[-1.0] * 99], reference=[-1.0, *[-1.1] * 99])
    kl = kl_term(given, "k3", cap=2.0)
    assert kl[0] <= math.exp(3) - 4 + 1e-9
    kl.mean().backward()
    assert given.current.grad.abs().max() < 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [19.0, 88.0, 90.0, 800.0])
def test_kl_is_finite_in_float32_however_far_the_reference(estimator, gap):
    current = torch.tensor([-gap - 1.0], requires_grad=True)
    given = TokenLogprobs(
        current=current, behaviour=torch.tensor([-1.0]), proximal=current.detach(), reference=torch.tensor([-1.0])
    )
    kl_term(given, estimator, cap=2.0).sum().backward()
    assert current.grad.isfinite().all()


def test_a_kl_term_without_reference_logprobs_is_refused():
    with pytest.raises(ValueError, match="reference_logprobs"):
        loss_of(logprobs([-1.0], [-1.0]), [1.0], kl_coefficient=0.1)


def test_the_kl_of_tokens_that_a_mask_drops_stays_in_the_loss():
    given = logprobs([-1.0], [-9.0], reference=[-1.5])
    loss, touched = loss_of(given, [1.0], name="dis", kl_coefficient=0.1, kl_estimator="k2")
    assert touched["mask"].all()
    assert loss.item() == pytest.approx(0.1 * 2.0 * 0.5 * 0.25)  # the weight of the KL is cut at 2


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), min_size=1, max_size=20),
    st.sampled_from(["token_mean", "sequence_mean", "group_mean"]),
)
def test_token_weights_of_a_batch_sum_to_one(sequences, aggregation):
    counts, group = torch.tensor(sequences).T
    total = (token_weights(counts, aggregation=aggregation, group=group) * counts).sum().item()
    # Each weight is rounded a few times, and each term of the float32 sum once.
    assert total == pytest.approx(1.0 if counts.any() else 0.0, abs=numerics.rounding(4 + len(sequences)))


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("sequence_mean", [1 / 6, 1 / 18, 1 / 12]),
        ("group_mean", [1 / 16, 1 / 16, 1 / 8]),
        ("fixed_length", [1 / 20, 1 / 20, 1 / 20]),  # two trajectories
    ],
)
def test_token_weights_are_those_of_their_aggregation(aggregation, weights):
    found = token_weights(
        torch.tensor([2, 6, 4, 0]),
        aggregation=aggregation,
        group=torch.tensor([7, 7, 9, 9]),
        trajectory=torch.tensor([0, 0, 1, 2]) if aggregation == "fixed_length" else None,
        fixed_length=10 if aggregation == "fixed_length" else None,
    )
    assert found[:3].tolist() == pytest.approx(weights)


def test_token_weights_of_groups_are_refused_without_groups():
    with pytest.raises(ValueError, match="`group`"):
        token_weights(torch.tensor([2]), aggregation="group_mean")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *((name, "aggregation", "sum") for name in NAMES),
        *((name, "clip_low", value) for name in ("ppo_clip", "dis", "cispo") for value in (0.0, 1.1)),
        *((name, "clip_high", -1.0) for name in ("ppo_clip", "dis", "cispo")),
        *((name, field, 0.0) for name, own in OWN_FIELDS.items() for field in own if field in POSITIVE),
        ("decoupled_ppo", "kl_estimator", "k4"),
        ("decoupled_ppo", "kl_in", "advantage"),
        ("decoupled_ppo", "count", "some"),
        ("decoupled_ppo", "kl_coefficient", -0.1),
        ("decoupled_ppo", "kl_weight_cap", 0.0),
        ("decoupled_ppo", "entropy_coefficient", -0.1),
        ("decoupled_ppo", "dual_clip", 1.1),
        ("decoupled_ppo", "fixed_length", 8),
        ("decoupled_ppo", "aggregation", "fixed_length"),
        ("gspo", "dual_clip", 1.0),
        ("icepop", "clip_low", 0.0),
        ("icepop", "mask_low", 1.0),
        ("icepop", "mask_high", 1.0),
        ("sequence_mask", "clip_low", 0.0),
    ],
)
def test_a_bad_value_of_a_loss_is_refused_by_field(name, field, value):
    with pytest.raises(ValueError, match=rf"loss\.{field}( is |={value})"):
        LOSSES[name](**{field: value})


def test_a_fixed_length_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"loss\.fixed_length is 0"):
        DecoupledPPO(aggregation="fixed_length", fixed_length=0)


@pytest.mark.parametrize(
    ("field", "value", "without", "with_effect"),
    [
        *(("kl_estimator", "k1", {}, {}), ("kl_weight_cap", 4.0, {}, {}), ("kl_in", "reward", {}, {})),
        *(
            (field, value, {"kl_coefficient": 0.1, "kl_in": "reward"}, {"kl_in": "loss"})
            for field, value in (("kl_estimator", "k1"), ("kl_weight_cap", 4.0), ("count", "informative"))
        ),
    ],
)
def test_a_setting_that_has_no_effect_is_refused(field, value, without, with_effect):
    other = "kl_in=reward" if without else "kl_coefficient=0"
    with pytest.raises(ValueError, match=rf"loss\.{field} is {value} with loss\.{other}"):
        DecoupledPPO(**without, **{field: value})
    assert getattr(DecoupledPPO(**{"kl_coefficient": 0.1, **with_effect, field: value}), field) == value


def test_the_kl_in_the_reward_is_no_term_of_the_loss():
    given = logprobs([-1.0, -2.0], [-1.0, -2.0])
    with_kl, without = (
        loss_of(given, [1.0, -1.0], **changes)[0] for changes in ({"kl_coefficient": 0.1, "kl_in": "reward"}, {})
    )
    assert torch.equal(with_kl, without)
    assert DecoupledPPO(kl_coefficient=0.1, kl_in="reward").needs_every_token
