"""The terms around the objective: KL, entropy, aggregation; and what a configuration refuses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.trainer.loss.losses import (
    DecoupledPPO,
    TokenLogprobs,
    kl_estimate,
    kl_term,
    policy_loss,
    token_weights,
)
from tests.helpers import numerics
from tests.helpers.losses import LOSSES, NAMES, OWN_FIELDS

pytestmark = pytest.mark.numerics

POSITIVE = ("behaviour_weight_cap", "max_sequence_drift", "max_second_moment")


def logprobs(current, behaviour, proximal=None, reference=None):
    as_tensor = lambda x: None if x is None else torch.tensor(x, dtype=torch.float64)  # noqa: E731
    return TokenLogprobs(
        current=as_tensor(current).requires_grad_(),
        behaviour=as_tensor(behaviour),
        proximal=as_tensor(current if proximal is None else proximal),
        reference=as_tensor(reference),
    )


def loss_of(given, advantages, name="decoupled_ppo", **config):
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return policy_loss(given, advantages=advantages, entropy=torch.ones_like(advantages), config=LOSSES[name](**config))


def test_ppo_clip_is_the_smaller_of_free_and_clipped_ratio():
    ratio = torch.tensor([0.5, 1.0, 1.5, 0.5, 1.5], dtype=torch.float64)
    given = logprobs(ratio.log().tolist(), [0.0] * 5)
    loss, clipped = loss_of(given, [1.0, 1.0, 1.0, -1.0, -1.0], name="ppo_clip", clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-0.5, -1.0, -1.28, 0.8, 1.5])
    assert clipped["clip"].tolist() == [False, False, True, True, False]


def test_a_clipped_token_has_no_gradient():
    given = logprobs([0.5, 0.1], [0.0, 0.0])
    loss, _ = loss_of(given, [1.0, 1.0], name="ppo_clip")
    loss.sum().backward()
    assert given.current.grad[0] == 0
    assert given.current.grad[1] != 0


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_the_behaviour_policy():
    given = logprobs([-1.0, -1.0], [-1.5, -3.0], proximal=[-1.0, -1.0])
    loss, touched = loss_of(given, [1.0, -1.0], behaviour_weight_cap=2.0)
    assert loss.tolist() == pytest.approx([-torch.tensor(0.5).exp().item(), 2.0])  # exp(2) is capped
    assert not touched["clip"].any()
    assert touched["truncate"].tolist() == [False, True]


def test_decoupled_ppo_equals_ppo_clip_where_behaviour_is_the_proximal_policy():
    given = logprobs([-1.0, -2.0, -0.5], [-1.2, -1.0, -0.5], proximal=[-1.2, -1.0, -0.5])
    ours, _ = loss_of(given, [1.0, -0.5, 2.0])
    theirs, _ = loss_of(given, [1.0, -0.5, 2.0], name="ppo_clip")
    assert torch.allclose(ours, theirs)


def test_the_weight_of_decoupled_ppo_has_no_gradient():
    given = logprobs([-1.0], [-1.2], proximal=[-1.0])
    loss, _ = loss_of(given, [1.0])
    loss.sum().backward()
    assert given.current.grad.item() == pytest.approx(-torch.tensor(0.2).exp().item())  # -w A r, r = 1


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
    advantages = [0.0, 0.0]
    loss, _ = loss_of(given, advantages, kl_coefficient=1.0, kl_estimator="k2", kl_weight_cap=3.0)
    weights = torch.tensor([math.exp(0.5), 3.0], dtype=torch.float64)  # exp(3) is cut
    assert loss.tolist() == pytest.approx((weights * 0.5).tolist())
    loss.sum().backward()
    assert given.current.grad.tolist() == pytest.approx(weights.tolist())  # none through the weight


@given(st.integers(0, 2**32 - 1))
def test_kl_of_stale_samples_is_that_of_the_current_policy(seed):
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    current, behaviour, reference = logits.log_softmax(-1)
    everything = TokenLogprobs(current=current, behaviour=behaviour, proximal=current, reference=reference)
    expected = (current.exp() * (current - reference)).sum().item()
    for estimator in ("k1", "k3"):
        mean = (behaviour.exp() * kl_term(everything, estimator, cap=1e6)).sum().item()
        assert mean == pytest.approx(expected, rel=1e-9, abs=1e-12)


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
    with pytest.raises(ValueError, match="no reference_logprobs"):
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


def test_group_mean_weighs_prompt_groups_the_same_and_the_tokens_of_a_group_the_same():
    weights = token_weights(torch.tensor([2, 6, 4]), aggregation="group_mean", group=torch.tensor([7, 7, 9]))
    assert weights.tolist() == pytest.approx([1 / 16, 1 / 16, 1 / 8])


def test_group_mean_without_groups_is_refused():
    with pytest.raises(ValueError, match="no key `group`"):
        token_weights(torch.tensor([2]), aggregation="group_mean")


def test_fixed_length_weighs_tokens_by_a_length_that_is_not_their_own():
    weights = token_weights(
        torch.tensor([2, 6, 4, 0]),
        aggregation="fixed_length",
        trajectory=torch.tensor([0, 0, 1, 2]),
        fixed_length=10,
    )
    assert weights.tolist() == pytest.approx([1 / 20] * 4)


def test_sequence_mean_weighs_short_and_long_sequences_the_same():
    weights = token_weights(torch.tensor([2, 8, 0]), aggregation="sequence_mean")
    assert weights[:2].tolist() == pytest.approx([0.25, 0.0625])


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *((name, "aggregation", "sum") for name in NAMES),
        *((name, "clip_low", value) for name in ("ppo_clip", "dis", "cispo") for value in (0.0, 1.1)),
        *((name, "clip_high", -1.0) for name in ("ppo_clip", "dis", "cispo")),
        *((name, field, 0.0) for name, own in OWN_FIELDS.items() for field in own if field in POSITIVE),
        ("decoupled_ppo", "kl_estimator", "k4"),
        ("decoupled_ppo", "count", "some"),
        ("decoupled_ppo", "kl_coefficient", -0.1),
        ("decoupled_ppo", "kl_weight_cap", 0.0),
        ("decoupled_ppo", "entropy_coefficient", -0.1),
        ("decoupled_ppo", "temperature", 0.0),
        ("decoupled_ppo", "dual_clip", 1.1),
        ("decoupled_ppo", "fixed_length", 8),
        ("gspo", "dual_clip", 1.0),
        ("icepop", "clip_low", 0.0),
        ("icepop", "mask_low", 1.0),
        ("icepop", "mask_high", 1.0),
        ("sequence_mask", "clip_low", 0.0),
    ],
)
def test_a_bad_value_is_refused_by_name(name, field, value):
    with pytest.raises(ValueError, match=rf"loss\.{field}( is |={value})"):
        LOSSES[name](**{field: value})


def test_fixed_length_needs_its_length():
    with pytest.raises(ValueError, match=r"loss\.aggregation is fixed_length with loss\.fixed_length=None"):
        DecoupledPPO(aggregation="fixed_length")
    with pytest.raises(ValueError, match=r"loss\.fixed_length is 0"):
        DecoupledPPO(aggregation="fixed_length", fixed_length=0)


@pytest.mark.parametrize(("field", "value"), [("kl_estimator", "k1"), ("kl_weight_cap", 4.0)])
def test_a_setting_of_the_kl_term_is_refused_without_one(field, value):
    assert getattr(DecoupledPPO(kl_coefficient=0.1, **{field: value}), field) == value
    with pytest.raises(ValueError, match=rf"loss\.{field} is {value}"):
        DecoupledPPO(**{field: value})
