"""Every objective on the real trainer: loss, gradient and metrics, for every division of the work."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from async_rl.metrics.registry import LAGS, metric_of
from async_rl.trainer.batch.training_batch import BatchError
from async_rl.trainer.loss.logprobs import logprobs_and_entropy
from async_rl.trainer.loss.losses import DecoupledPPO
from tests.helpers import numerics
from tests.helpers.losses import ADVANTAGES, LOSSES, NAMES, make_loss
from tests.parallel.support import (
    MARKS,
    assert_equal_gradients,
    assert_equal_metrics,
    assert_trains_as,
    expected_step,
    gradients,
    make_batch,
    start_trainer,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]

TRAJECTORY = tuple(name for name, kind in LOSSES.items() if kind().needs_whole_trajectories)


@pytest.fixture(scope="module")
def batch(owner):
    """Engine logprobs near the trainer's, of all lags, so that each filter touches some tokens and not all."""
    batch = make_batch()
    g = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(batch["token_ids"].shape, generator=g)
    batch["behaviour_logprobs"] = (owner.logprobs(batch) + noise).clamp(max=0.0)
    batch["lag"] = torch.where(batch["loss_mask"], torch.randint(0, 5, noise.shape, generator=g), -1).int()
    batch["pure_lag0"] = batch["lag"] == 0
    return batch


def loss_config(name, **changes):
    """With bounds that the batch reaches."""
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "behaviour_weight_cap": 1.2}
    bounds |= {"max_sequence_drift": 0.02, "mask_low": 0.7, "mask_high": 1.4}
    bounds |= {"max_kl": 1e-4, "max_divergence": 1e-4}
    if name == "gspo":
        bounds |= {"clip_low": 0.02, "clip_high": 0.03, "behaviour_weight_cap": 1.02}
    return make_loss(name, bounds=bounds, **({"aggregation": "token_mean"} | changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"aggregation": "sequence_mean"}) for name in NAMES),
        ("decoupled_ppo", {"aggregation": "fixed_length", "fixed_length": 10}),
        ("tis", {"negative_token_share": 0.3}),
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_transformers_with_the_same_objective(checkpoint, batch, name, changes):
    config = loss_config(name, **changes)
    trainer = start_trainer(checkpoint, loss=config, micro_batch_tokens=40)
    metrics = assert_trains_as(trainer, batch, expected_step(checkpoint, batch, config))
    touched = [metrics[f"{kind}/fraction"] for kind in config.filters]
    assert any(0 < share < 1 for share in touched), touched
    assert_filters_are_reported(metrics, config.filters)


def assert_filters_are_reported(metrics, filters):
    """Each filter of the objective by sign and lag, and no other filter."""
    assert all(metric_of(key) is not None for key in metrics), metrics.keys()
    for kind in filters:
        total = metrics[f"{kind}/fraction"] * metrics["tokens"]
        by_lag = [metrics[f"{kind}/fraction_{lag}"] * metrics[f"tokens/{lag}"] for lag in LAGS if lag != "lag0_mixed"]
        by_sign = [metrics[f"{kind}/fraction_{s}"] * metrics[f"tokens/{s}"] for s in ("positive", "negative")]
        assert sum(by_lag) == pytest.approx(total)
        assert sum(by_sign) == pytest.approx(total)
    assert {kind for kind in ("clip", "truncate", "mask") if f"{kind}/fraction" in metrics} <= {*filters}


def in_two(batch):
    """Every sequence twice over the same rows, each time with half of its tokens in the loss."""
    mask = batch["loss_mask"]
    first = mask & (mask.cumsum(1) <= mask.sum(1, keepdim=True) // 2)
    made = TensorDict({name: torch.cat([v, v]) for name, v in batch.items()}, batch_size=[2 * len(batch)])
    made["loss_mask"] = torch.cat([first, mask & ~first])
    made["trajectory"] = torch.arange(len(batch)).repeat(2)
    return made


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        *((name, "group_mean") for name in (*TRAJECTORY, "m2po")),
        *(("decoupled_ppo", aggregation) for aggregation in ("token_mean", "sequence_mean")),
    ],
)
def test_a_trajectory_in_several_sequences_has_one_weight(checkpoint, batch, name, aggregation):
    config = loss_config(name, aggregation=aggregation)
    whole, split = (start_trainer(checkpoint, loss=config, micro_batch_tokens=1) for _ in range(2))
    expected, found = whole.train(batch), split.train(in_two(batch))
    reference = expected_step(checkpoint, batch, config)
    kept = [
        {k: v for k, v in metrics.items() if not k.startswith(("routing", "tree"))} for metrics in (found, expected)
    ]
    assert_equal_metrics(*kept, reference)
    assert_equal_gradients(gradients(split), reference, gradients(whole))


def test_mismatch_is_that_of_the_tokens_of_each_lag(checkpoint, batch, owner):
    mask = batch["loss_mask"]
    d = (owner.logprobs(batch) - batch["behaviour_logprobs"])[mask].double().numpy()
    lag = batch["lag"][mask].numpy()
    metrics = start_trainer(checkpoint).train(batch)
    drift = 2 * expected_step(checkpoint, batch).logprob_bound
    for suffix, kept in (("", lag >= 0), ("_lag0", lag == 0), ("_lag1", lag == 1), ("_lag3", lag >= 3)):
        steepness = abs(np.exp(d) - 1)[kept].max()
        k3 = (np.exp(d) - 1 - d)[kept].mean()
        numerics.assert_within(abs(metrics[f"mismatch/k3{suffix}"] - k3), 2 * steepness * drift)
        assert metrics[f"mismatch/f2{suffix}"] == pytest.approx((abs(d) > math.log(2))[kept].mean())
        p99 = np.quantile(abs(d[kept]), 0.99, method="inverted_cdf")
        # The metric is the upper edge of a bin of the histogram, which has 8 for every power of two.
        assert p99 - drift <= metrics[f"mismatch/abs_p99{suffix}"] <= (p99 + drift) * 2 ** (1 / 8)


def test_the_distance_to_the_reference_is_reported_with_a_kl_term(checkpoint, batch, owner):
    current = owner.logprobs(batch)
    given = batch.clone().set("reference_logprobs", current - 0.5).set("behaviour_logprobs", current)
    drift = 2 * expected_step(checkpoint, batch).logprob_bound
    for estimator in ("k1", "k2", "k3"):
        loss = DecoupledPPO(kl_coefficient=0.1, kl_estimator=estimator)
        metrics = start_trainer(checkpoint, loss=loss).train(given.clone())
        # k3 of 0.5 is exp(-0.5) - 1 + 0.5, less steep than 1.
        numerics.assert_within(abs(metrics["kl/reference"] - (math.exp(-0.5) - 0.5)), drift)


def with_kl_in_reward(batch, owner):
    """The batch with a reference that is 0.2 nat away at most tokens, and a loss that penalises the rewards by it."""
    g = torch.Generator().manual_seed(7)
    reference = owner.logprobs(batch) + 0.2 * torch.randn(batch["token_ids"].shape, generator=g)
    loss = loss_config("decoupled_ppo", aggregation="sequence_mean", kl_coefficient=0.3, kl_in="reward")
    return batch.clone().set("reference_logprobs", reference), loss


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"gae", "spo"}))
def test_the_kl_in_the_reward_gives_the_step_of_transformers(checkpoint, batch, owner, name):
    given, loss = with_kl_in_reward(batch, owner)
    trainer = start_trainer(checkpoint, loss=loss, micro_batch_tokens=40)
    terms = {"reference": lambda _: given["reference_logprobs"], "advantage": name}
    expected = expected_step(checkpoint, given, loss, **terms)
    metrics = assert_trains_as(trainer, given, expected, advantage=name)
    mask = given["loss_mask"]
    kl = (expected.logprobs - given["reference_logprobs"])[mask]
    assert kl.abs().mean() > 0.1
    numerics.assert_within(abs(metrics["kl/proximal"] - kl.mean().item()), expected.logprob_bound)
    penalty, bound = 0.3 * kl.sum().item() / len(given), 0.3 * len(kl) / len(given) * expected.logprob_bound
    numerics.assert_within(abs(metrics["kl/penalty"] - penalty), bound)


def test_the_kl_in_the_reward_is_refused_without_rewards(checkpoint, batch, owner):
    given, loss = with_kl_in_reward(batch, owner)
    del given["rewards"]
    with pytest.raises(BatchError, match=r"loss\.kl_in"):
        start_trainer(checkpoint, loss=loss).train(given)


def test_a_float32_head_takes_the_rounding_off_the_logits_of_bfloat16(checkpoint, batch, monkeypatch):
    errors, bounds = {}, {}
    for fp32 in (False, True):
        seen = []

        def noted(hidden, targets, *, layer, seen=seen, **settings):
            found = logprobs_and_entropy(hidden, targets, layer=layer, **settings)
            seen.append((hidden.double(), targets, layer.weight.detach().double(), found[0]))
            return found

        monkeypatch.setattr("async_rl.trainer.step.logprobs_and_entropy", noted)
        start_trainer(checkpoint, dtype="bfloat16", fp32_lm_head=fp32).logprobs(batch)
        of_each = []
        for hidden, targets, weight, found in seen:
            exact = (hidden @ weight.T).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            # Twice that of a float32 dot product: the error of the logit and that of the normalisation.
            bound = 2 * numerics.rounding(weight.shape[1]) * (hidden.abs() @ weight.abs().T).max()
            of_each.append(((found - exact).abs().max().item(), bound.item()))
        errors[fp32], bounds[fp32] = (max(column) for column in zip(*of_each, strict=True))
    numerics.assert_within(errors[True], bounds[True])
    assert errors[False] > bounds[False]
