"""Every objective against a plain implementation, one token after the other, in value and in gradient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.trainer.loss.losses import DecoupledPPO, TokenLogprobs, Trajectories, policy_loss
from async_rl.trainer.loss.ratios import second_moment_bound
from tests.helpers.losses import LOSSES, NAMES, OWN_FIELDS, make_loss

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SPREAD = {"gspo": 3.0}  # for means over trajectories to reach the bounds
SCORE = ("tis", "dis", "cispo", "sequence_tis", "sequence_mis")
LOW, HIGH, CAP, MASK_LOW, MASK_HIGH, DRIFT, MOMENT = 0.8, 1.28, 2.0, 0.5, 5.0, 0.5, 0.04


def plain_losses(name, current, behaviour, proximal, advantages, trajectory, *, frozen=None, dual_clip=None):
    """Loss of each token; what has no gradient is taken from `frozen` in place of `current`."""
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

    return [-token(t) for t in tokens]


def m2po_kept(behaviour, proximal):
    """Takes out the token of largest squared log ratio until the mean over the others is low enough."""
    kept = sorted(range(len(behaviour)), key=lambda t: (proximal[t] - behaviour[t]) ** 2)
    while kept and np.mean([(proximal[t] - behaviour[t]) ** 2 for t in kept]) > MOMENT:
        kept.pop()
    return kept


def example(seed, *, tokens=24, trajectories=4, spread=0.5):
    """Logprobs, advantages (one per trajectory) and trajectory of random tokens, some ratios in every region."""
    rng = np.random.default_rng(seed)
    current = -rng.gamma(2.0, 1.0, tokens)
    behaviour = current + rng.normal(0, spread, tokens)
    proximal = current + rng.normal(0, spread / 2, tokens)
    trajectory = np.arange(tokens) % trajectories
    advantages = np.array([1.5, -0.7, 0.0, -2.0])[:trajectories][trajectory]
    return current, behaviour, proximal, advantages, trajectory


def ours(name, current, behaviour, proximal, advantages, trajectory, **config):
    """[n] loss and what each filter touched; `current` may be a tensor."""
    tensor = lambda x: x if isinstance(x, torch.Tensor) else torch.tensor(np.array(x), dtype=torch.float64)  # noqa: E731
    config = make_loss(name, bounds={"clip_low": 0.2, "clip_high": 0.28}, **config)
    count = int(max(trajectory, default=-1)) + 1
    return policy_loss(
        TokenLogprobs(current=tensor(current), behaviour=tensor(behaviour), proximal=tensor(proximal)),
        advantages=tensor(advantages),
        entropy=torch.zeros(len(trajectory), dtype=torch.float64),
        config=config,
        trajectories=Trajectories(index=torch.tensor(np.array(trajectory, np.int64)), count=count),
        surrogate=config.surrogate_of_update(tensor(proximal) - tensor(behaviour)),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_each_token_has_the_loss_of_its_equation(name, seed):
    given = example(seed, spread=SPREAD.get(name, 0.5))
    assert ours(name, *given)[0].tolist() == pytest.approx(plain_losses(name, *given), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_the_plain_loss_with_its_weights_held(name):
    current, *others = example(7)
    x = torch.tensor(current, requires_grad=True)
    ours(name, x, *others)[0].sum().backward()
    step = 1e-6
    for t in range(len(current)):
        ends = []
        for sign in (1, -1):
            moved = current.copy()
            moved[t] += sign * step
            ends.append(sum(plain_losses(name, moved, *others, frozen=current)))
        assert x.grad[t].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_the_derivative(name):
    current, behaviour, *others = example(11)
    start = torch.tensor(current)

    def loss(x):
        # A score function's weight has no gradient: the behaviour moves along, so that it stays where it is.
        shift = x.detach() - start if name in SCORE else 0.0
        return ours(name, x, torch.tensor(behaviour) + shift, *others)[0].sum()

    assert torch.autograd.gradcheck(loss, (start.clone().requires_grad_(),))


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_weight_is_one_and_nothing_is_touched(name):
    current, _, _, advantages, trajectory = example(3)
    x = torch.tensor(current, requires_grad=True)
    loss, touched = ours(name, x, current, current, advantages, trajectory)
    expected = advantages * current if name in SCORE else advantages
    assert loss.tolist() == pytest.approx((-expected).tolist())
    loss.sum().backward()
    assert x.grad.tolist() == pytest.approx((-advantages).tolist())
    assert not any(t.any() for t in touched.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token_are_batches_too(name, tokens):
    given = [part[:tokens] for part in example(5)]
    loss, touched = ours(name, *given)
    assert loss.shape == (tokens,)
    assert all(t.shape == (tokens,) for t in touched.values())
    assert loss.tolist() == pytest.approx(plain_losses(name, *given))


@pytest.mark.parametrize("name", ["icepop", "dis", "sequence_mis", "m2po", "sequence_mask"])
def test_with_every_token_masked_the_loss_and_its_gradient_are_zero(name):
    current = np.full(6, -1.0)
    far = current + (9.0 if name == "sequence_mask" else -9.0)  # less likely now, or far more
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


def test_the_default_loss_is_bit_for_bit_that_of_its_equation():
    g = torch.Generator().manual_seed(0)
    behaviour, proximal, start = (-torch.rand(4000, generator=g) * 3 for _ in range(3))
    advantages = torch.randn(4000, generator=g)

    def equation(current):
        ratio = torch.exp(current - proximal)
        smaller = torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages)
        return torch.exp(proximal - behaviour).clamp(max=2.0) * -smaller

    def default(current):
        given = TokenLogprobs(current=current, behaviour=behaviour, proximal=proximal)
        return policy_loss(given, advantages=advantages, entropy=torch.zeros(4000), config=DecoupledPPO())[0]

    losses, gradients = [], []
    for of in (equation, default):
        current = start.clone().requires_grad_()
        loss = of(current)
        (loss / 4000).sum().backward()
        losses.append(loss)
        gradients.append(current.grad)
    assert torch.equal(*losses)
    assert torch.equal(*gradients)


OTHER_VALUES = {
    "clip_low": 0.05,
    "clip_high": 0.05,
    "dual_clip": 1.5,
    "behaviour_weight_cap": 1.1,
    "mask_low": 0.9,
    "mask_high": 1.1,
    "max_sequence_drift": 0.01,
    "max_second_moment": 0.4,
}


@pytest.mark.parametrize(("name", "field"), [(n, field) for n, own in OWN_FIELDS.items() for field in own])
def test_a_field_that_an_objective_uses_changes_its_gradient(name, field):
    changed = []
    for seed in range(20):  # few tokens lie between the two values, so one batch may have none
        current, *others = example(seed, spread=1.0)
        gradients = []
        for config in ({}, {field: OTHER_VALUES[field]}):
            x = torch.tensor(current, requires_grad=True)
            ours(name, x, *others, **config)[0].sum().backward()
            gradients.append(x.grad)
        changed.append(not torch.allclose(*gradients))
    assert any(changed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"entropy_coefficient": 0.1}),
        ({}, {"kl_coefficient": 0.1}),
        ({"kl_coefficient": 0.1}, {"kl_coefficient": 0.1, "kl_estimator": "k1"}),
        ({"kl_coefficient": 0.1}, {"kl_coefficient": 0.1, "kl_estimator": "k2"}),
        ({"kl_coefficient": 0.1}, {"kl_coefficient": 0.1, "kl_weight_cap": 0.5}),
    ],
    ids=lambda config: "-".join(map(str, config.values())) or "none",
)
def test_kl_and_entropy_change_the_gradient_of_every_objective(name, before, after):
    current, behaviour, proximal, advantages, trajectory = (torch.tensor(part) for part in example(2))
    gradients = []
    for config in (before, after):
        x = current.clone().requires_grad_()
        loss, _ = policy_loss(
            TokenLogprobs(current=x, behaviour=behaviour, proximal=proximal, reference=behaviour - 0.3),
            advantages=advantages,
            entropy=-x.exp() * x,
            config=LOSSES[name](**config),
            trajectories=Trajectories(index=trajectory, count=4),
        )
        loss.sum().backward()
        gradients.append(x.grad)
    assert not torch.allclose(*gradients)


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely():
    given = example(2, spread=2.0)
    plain = plain_losses("ppo_clip", *given, dual_clip=3.0)
    assert plain != plain_losses("ppo_clip", *given)
    assert ours("ppo_clip", *given, dual_clip=3.0)[0].tolist() == pytest.approx(plain)


def test_filters_report_the_tokens_they_changed_and_no_others():
    for name in NAMES:
        given = example(9, spread=SPREAD.get(name, 0.5))
        _, touched = ours(name, *given)
        assert tuple(touched) == tuple(reversed(LOSSES[name]().filters))
        wide = {"clip_low": 1.0, "clip_high": 1e9, "behaviour_weight_cap": 1e9, "mask_low": 0.0, "mask_high": 1e9,
                "max_sequence_drift": 1e3}  # fmt: skip
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


def test_a_loss_over_trajectories_must_be_told_them():
    logprobs = TokenLogprobs(current=torch.zeros(2), behaviour=torch.zeros(2), proximal=torch.zeros(2))
    for name in NAMES:
        config = LOSSES[name]()
        arguments = {"advantages": torch.ones(2), "entropy": torch.zeros(2), "config": config}
        if config.needs_whole_trajectories:
            with pytest.raises(ValueError, match="`trajectories`"):
                policy_loss(logprobs, **arguments)
        else:
            policy_loss(logprobs, **arguments)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-3, 3).map(lambda x: round(x, 2)), max_size=30), st.sampled_from([0.01, 0.04, 0.5]))
def test_m2po_keeps_as_many_tokens_as_the_second_moment_allows(log_ratios, limit):
    x = torch.tensor(log_ratios, dtype=torch.float64)
    kept = x.abs() <= second_moment_bound(x, limit=limit)
    assert not kept.any() or (x[kept] ** 2).mean() <= limit * (1 + 1e-9)
    if not kept.all():
        least = x[~kept].abs().min()
        with_more = kept | (x.abs() <= least)
        assert (x[with_more] ** 2).mean() > limit * (1 - 1e-9)
