"""TrainerRank as a run uses it: warm start, RL steps, reference, and refusals."""

import math
from dataclasses import replace

import pytest
import torch

from async_rl.metrics.registry import LAGS
from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.model.model import ParallelConfig
from async_rl.trainer.rank import TrainerRank
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.helpers import numerics
from tests.parallel.support import (
    LAYERS,
    MARKS,
    NO_UPDATE,
    TRAINER,
    VOCAB,
    assert_equal_gradients,
    assert_equal_steps,
    assert_same,
    expected_step,
    exported,
    gradients,
    largest_difference,
    load_reference,
    make_batch,
    make_supervised_batch,
    reference_step,
    start_trainer,
    supervised_terms,
    training_batch_of,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]

KL = DecoupledPPO(kl_coefficient=0.5)
ADAM = OptimizerConfig(lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, warmup_steps=2)
BY_LAG = {
    *("clip/fraction", "truncate/fraction", "ess/token"),
    *(f"mismatch/{name}" for name in ("k1", "k3", "abs_mean", "abs_p99", "abs_max", "f2", "f5", "chi2")),
}
ROUTING = {f"routing/{name}" for name in ("overlap", "gate_mass", "refused_fraction", "fallback_fraction")}
METRICS = {
    *("loss", "grad_norm", "entropy", "lr", "tokens", "ess/sequence"),
    *BY_LAG,
    *(f"{key}_{lag}" for key in BY_LAG for lag in LAGS),
    *(f"tokens/{kind}" for kind in (*LAGS, "positive", "negative")),
    *(f"{name}/fraction_{sign}" for name in ("clip", "truncate") for sign in ("positive", "negative")),
    *("tree/tokens", "tree/unique_tokens", "tree/compression"),
    *ROUTING,
    *(f"{key}_layer{layer}" for key in ROUTING for layer in LAYERS),
}


def test_train_reports_every_metric_and_moves_the_weights(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    before = exported(trainer)
    metrics = trainer.train(make_batch())
    assert metrics.keys() == METRICS
    absent = {f"{key}_{lag}" for key in BY_LAG for lag in LAGS if lag != "lag0"}  # every token is of lag 0
    assert {key for key, value in metrics.items() if not math.isfinite(value)} == absent
    assert metrics["lr"] == pytest.approx(1.5e-3)
    after = exported(trainer)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_supervised_loss_is_the_mean_over_the_masked_tokens(checkpoint):
    batch = make_batch()
    trainer = start_trainer(checkpoint, router_replay="none", supervised_aux_loss_coefficient=0.0)
    expected = reference_step(load_reference(checkpoint), batch, supervised_terms, routed=False)
    metrics = trainer.train_supervised(make_supervised_batch())
    assert_equal_steps(metrics["loss"], gradients(trainer), expected)
    assert metrics["tokens"] == batch["loss_mask"].sum()


def test_the_balance_loss_acts_in_the_phase_it_is_set_for(checkpoint):
    plain = start_trainer(checkpoint, supervised_aux_loss_coefficient=0.0)
    balanced = start_trainer(checkpoint, supervised_aux_loss_coefficient=0.1)
    for trainer in (plain, balanced):
        trainer.train_supervised(make_supervised_batch())
    router = "model.layers.2.mlp.gate.weight"
    assert not torch.allclose(gradients(plain)[router], gradients(balanced)[router], rtol=1e-3)
    for trainer in (plain, balanced):
        trainer.train(make_batch())
    assert torch.equal(gradients(plain)[router], gradients(balanced)[router])


def test_the_balance_loss_does_not_see_padding(checkpoint):
    packed = start_trainer(checkpoint, micro_batch_tokens=4096)
    padded = start_trainer(checkpoint, micro_batch_tokens=4096, packing=False)
    for trainer in (packed, padded):
        trainer.train_supervised(make_supervised_batch())
    # The balance loss is not in the reference; its gradient, of one matmul, adds less rounding than is there.
    expected = reference_step(load_reference(checkpoint), make_batch(), supervised_terms, routed=False)
    assert_equal_gradients(gradients(padded), expected, gradients(packed))


def test_resetting_the_optimizer_forgets_moments_and_schedule(checkpoint, tmp_path):
    used, fresh = start_trainer(checkpoint, optimizer=ADAM), start_trainer(checkpoint, optimizer=ADAM)
    used.train(make_batch(seed=1))
    used.save(tmp_path / "state").result()
    fresh.restore(tmp_path / "state")
    other = OptimizerConfig(lr=1e-3)
    used.reset_optimizer(other)
    fresh.reset_optimizer(other)
    assert used.train(make_batch(seed=2)) == fresh.train(make_batch(seed=2))
    assert used.train(make_batch(seed=3))["lr"] == 1e-3


def test_groups_without_spread_are_left_out_of_the_forward_pass_and_count(checkpoint):
    batch = make_batch()
    kept = torch.tensor([0, 1, 4, 5])
    batch["informative"] = torch.isin(torch.arange(6), kept)
    trainer, smaller = start_trainer(checkpoint, loss=DecoupledPPO(count="informative")), start_trainer(checkpoint)
    alone = smaller.train(batch[kept])
    assert trainer.train(batch) == alone
    assert largest_difference(gradients(trainer), gradients(smaller)) == 0
    published = start_trainer(checkpoint).train(batch)
    share = int(batch["loss_mask"][kept].sum()) / int(batch["loss_mask"].sum())
    assert published["tokens"] == alone["tokens"]
    for key in ("loss", "grad_norm"):
        assert published[key] == pytest.approx(alone[key] * share, rel=1e-4)


def test_a_batch_without_any_spread_moves_nothing_but_the_schedule(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    before = exported(trainer)
    batch = make_batch()
    batch["informative"] = torch.zeros(6, dtype=torch.bool)
    metrics = trainer.train(batch)
    assert metrics.keys() == METRICS
    assert metrics["tokens"] == 0
    assert metrics["lr"] == pytest.approx(1.5e-3)
    assert_same(exported(trainer), before)
    assert trainer.train(make_batch())["lr"] == pytest.approx(3e-3)


def test_kl_uses_the_reference_logprobs_of_the_batch(checkpoint):
    trainer = start_trainer(checkpoint, loss=DecoupledPPO(kl_coefficient=0.1))
    batch = make_batch()
    batch["reference_logprobs"] = batch["behaviour_logprobs"] = trainer.logprobs(batch)
    same = trainer.train(batch)["loss"]
    batch["reference_logprobs"] = batch["reference_logprobs"] - 0.5
    other = trainer.train(batch)["loss"]
    expected = expected_step(checkpoint, batch)
    # k3 of the reference is at most as steep as 1 in a logprob.
    bound = 2 * expected.loss_bound + 0.1 * 2 * expected.logprob_bound
    numerics.assert_within(abs(other - same - 0.1 * (math.exp(-0.5) - 0.5)), bound)


def test_the_reference_of_kl_stays_at_the_start_until_the_optimizer_is_reset(checkpoint, tmp_path):
    loss = DecoupledPPO(kl_coefficient=10.0)
    adam = OptimizerConfig(lr=1e-2)
    trainer = start_trainer(checkpoint, loss=loss, optimizer=adam, router_replay="none")
    batch = make_batch()
    batch["advantages"] = torch.zeros(6)
    trainer.train_supervised(make_supervised_batch())
    away = trainer.train(batch)["loss"]
    trainer.save(tmp_path / "state").result()
    other = start_trainer(checkpoint, loss=loss, optimizer=adam, router_replay="none")
    other.restore(tmp_path / "state")
    assert other.train(batch) == trainer.train(batch)
    trainer.reset_optimizer(adam)
    expected = reference_step(load_reference(checkpoint), batch, supervised_terms, routed=False)
    # k3 of a logprob computed twice; float32 terms around 1 are rounded.
    bound = 10.0 * ((2 * expected.logprob_bound) ** 2 + numerics.FACTOR * numerics.EPSILON)
    numerics.assert_within(abs(trainer.train(batch)["loss"]), bound)
    assert away > 100 * bound


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    before = exported(trainer)
    batch = make_batch()
    batch["advantages"][1] = float("inf")
    with pytest.raises(FloatingPointError, match="update 0"):
        trainer.train(batch)
    assert_same(exported(trainer), before)


def test_a_trainer_of_another_world_size_is_refused(checkpoint):
    config = replace(TRAINER, ranks=2, parallel=ParallelConfig(tensor=2))
    options = {"config": config, "optimizer": NO_UPDATE, "loss": DecoupledPPO(), "checkpoint": checkpoint}
    with pytest.raises(RuntimeError, match="world_size"):
        TrainerRank(**options, rank=0, world_size=1)


def test_bfloat16_trains_with_float32_gradients(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM, dtype="bfloat16")
    losses = [trainer.train_supervised(make_supervised_batch())["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    assert {t.dtype for t in gradients(trainer).values()} == {torch.float32}


def test_the_reference_is_the_frozen_weights_of_the_start(checkpoint):
    frozen, given = (start_trainer(checkpoint, optimizer=ADAM, loss=KL) for _ in range(2))
    batches = [make_batch(seed=seed) for seed in (1, 2)]
    references = [start_trainer(checkpoint, router_replay="none").logprobs(batch) for batch in batches]
    for batch, reference in zip(batches, references, strict=True):
        frozen_metrics = frozen.train(batch.clone())
        given_metrics = given.train(batch.clone().set("reference_logprobs", reference))
        expected = expected_step(checkpoint, batch)
        # k3 of the reference is at most as steep as exp(0.5) in a logprob.
        bound = 2 * (expected.loss_bound + KL.kl_coefficient * math.exp(0.5) * expected.logprob_bound)
        numerics.assert_within(abs(frozen_metrics["loss"] - given_metrics["loss"]), bound)
    assert_equal_gradients(gradients(frozen), expected, gradients(given))


def test_logprobs_are_of_the_distribution_at_the_temperature_of_the_batch(checkpoint):
    trainer, batch = start_trainer(checkpoint), training_batch_of(make_batch(seed=1))
    usual, hot = (torch.cat(trainer.logprobs(replace(batch, temperature=t))) for t in (1.0, 1e6))
    assert usual.std() > 0.1 and (hot + math.log(VOCAB)).abs().max() < 1e-3, "all tokens are as likely"


def test_score_is_by_the_weights_of_the_last_snapshot_and_changes_none(checkpoint):
    trainer, batch = start_trainer(checkpoint, optimizer=ADAM), make_batch(seed=1)
    assert torch.equal(trainer.score(batch), trainer.logprobs(batch)), "of the current weights before any snapshot"
    for seed in (2, 3):
        trainer.snapshot_weights()
        held = trainer.logprobs(batch)
        trainer.train(make_batch(seed=seed))
        trained = trainer.logprobs(batch)
        assert not torch.equal(trained, held)
        assert torch.equal(trainer.score(batch), held)
        assert torch.equal(trainer.logprobs(batch), trained)
