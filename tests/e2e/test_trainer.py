"""TrainerRank as a run uses it: warm start, RL steps, restart, and what it refuses."""

import math

import pytest
import torch

from async_rl.metrics.registry import LAGS
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.loss.losses import DecoupledPPO, PPOClip
from async_rl.trainer.model.model import ParallelConfig
from async_rl.trainer.state.checkpoint import TrainerCheckpointError
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.weights.transport import read_update
from tests.helpers import numerics
from tests.parallel.support import (
    LAYERS,
    assert_equal_gradients,
    assert_equal_weights,
    gradients,
    largest_difference,
    load_reference,
    make_batch,
    make_supervised_batch,
    policy_terms,
    reference_step,
    save_tiny_moe,
    start_trainer,
    supervised_terms,
    training_batch_of,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

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
    *ROUTING,
    *(f"{key}_layer{layer}" for key in ROUTING for layer in LAYERS),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture(scope="module", autouse=True)
def process_group(checkpoint):
    """Owns the process group of this module's trainers."""
    owner = start_trainer(checkpoint)
    yield
    owner.close()


def weights(trainer, folder):
    return dict(read_update(trainer.export(folder, version=0).path))


def test_train_reports_every_metric_and_moves_the_weights(checkpoint, tmp_path):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    before = weights(trainer, tmp_path)
    metrics = trainer.train(make_batch())
    assert metrics.keys() == METRICS
    absent = {f"{key}_{lag}" for key in BY_LAG for lag in LAGS if lag != "lag0"}  # every token is of lag 0
    assert {key for key, value in metrics.items() if not math.isfinite(value)} == absent
    assert metrics["lr"] == pytest.approx(1.5e-3)
    after = weights(trainer, tmp_path)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_supervised_steps_learn_the_batch_by_heart(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    batch = make_supervised_batch()
    losses = [trainer.train_supervised(batch)["loss"] for _ in range(25)]
    assert losses[-1] < 0.5 * losses[0]


def test_supervised_loss_is_the_mean_over_the_masked_tokens(checkpoint):
    batch = make_batch()
    trainer = start_trainer(checkpoint, router_replay="none")
    expected = reference_step(load_reference(checkpoint), batch, supervised_terms, routed=False)
    metrics = trainer.train_supervised(make_supervised_batch())
    numerics.assert_within(abs(metrics["loss"] - expected.loss), expected.loss_bound)
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


def test_a_restart_continues_bit_for_bit(checkpoint, tmp_path):
    first = start_trainer(checkpoint, optimizer=ADAM)
    first.train(make_batch(seed=1))
    first.train_supervised(make_supervised_batch(seed=2))
    first.save(tmp_path / "state")
    resuming = [first.train(make_batch(seed=s)) for s in (3, 4)]
    second = start_trainer(checkpoint, optimizer=ADAM)
    second.restore(tmp_path / "state")
    continued = [second.train(make_batch(seed=s)) for s in (3, 4)]
    assert continued == resuming
    ours, theirs = weights(second, tmp_path), weights(first, tmp_path)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_saving_again_replaces_the_folder_whole(checkpoint, tmp_path):
    trainer = start_trainer(checkpoint)
    (tmp_path / "state.partial").mkdir()
    (tmp_path / "state.partial" / "__7_0.distcp").write_text("left over")
    trainer.save(tmp_path / "state")
    trainer.save(tmp_path / "state")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    names = {"trainer.json", "metadata.json", ".metadata", "common.pt", "__0_0.distcp"}
    assert {p.name for p in (tmp_path / "state").iterdir()} == names


def test_restoring_what_is_no_trainer_state_is_refused(checkpoint, tmp_path):
    trainer = start_trainer(checkpoint)
    with pytest.raises(TrainerCheckpointError, match=r"has no readable trainer\.json"):
        trainer.restore(tmp_path)


def test_resetting_the_optimizer_forgets_moments_and_schedule(checkpoint, tmp_path):
    used, fresh = start_trainer(checkpoint, optimizer=ADAM), start_trainer(checkpoint, optimizer=ADAM)
    used.train(make_batch(seed=1))
    used.save(tmp_path / "state")
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


def test_a_batch_without_any_spread_moves_nothing_but_the_schedule(checkpoint, tmp_path):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    before = weights(trainer, tmp_path)
    batch = make_batch()
    batch["informative"] = torch.zeros(6, dtype=torch.bool)
    metrics = trainer.train(batch)
    assert metrics.keys() == METRICS
    assert metrics["tokens"] == 0
    assert metrics["lr"] == pytest.approx(1.5e-3)
    after = weights(trainer, tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.train(make_batch())["lr"] == pytest.approx(3e-3)


def test_no_token_at_lag_zero_gives_nan_for_its_mismatch(checkpoint):
    batch = make_batch()
    batch["pure_lag0"] = torch.zeros_like(batch["pure_lag0"])
    assert math.isnan(start_trainer(checkpoint).train(batch)["mismatch/k3_lag0"])


@pytest.mark.parametrize("replay", ["R2", "R3", "none"])
def test_several_updates_per_batch_keep_the_proximal_policy_of_its_start(checkpoint, replay):
    trainer = start_trainer(checkpoint, optimizer=OptimizerConfig(lr=1e-2), updates_per_batch=3, router_replay=replay)
    batch = make_batch()
    batch["behaviour_logprobs"] = trainer.logprobs(batch)
    batch["mini_batch"] = batch["group"]
    metrics = trainer.train(batch)
    assert metrics["mismatch/abs_max"] > 1e-3  # the later updates see weights that the first one moved
    assert metrics["lr"] == 1e-2


def test_updates_of_a_batch_are_those_of_its_groups_in_turn(checkpoint, tmp_path):
    loss = PPOClip()
    adam = OptimizerConfig(lr=1e-3, eps=1e-3)
    together = start_trainer(checkpoint, optimizer=adam, loss=loss, updates_per_batch=3)
    apart = start_trainer(checkpoint, optimizer=adam, loss=loss)
    batch = make_batch()
    together.train(batch.clone().set("mini_batch", batch["group"]))
    for group in range(3):
        apart.train(batch[batch["group"] == group])
    expected = reference_step(load_reference(checkpoint), batch, policy_terms(loss))
    ours, theirs = weights(together, tmp_path), weights(apart, tmp_path)
    assert_equal_weights(ours, theirs, expected, optimizer=adam, updates=3)


def test_kl_uses_the_reference_logprobs_of_the_batch(checkpoint):
    trainer = start_trainer(checkpoint, loss=DecoupledPPO(kl_coefficient=0.1))
    batch = make_batch()
    batch["reference_logprobs"] = batch["behaviour_logprobs"] = trainer.logprobs(batch)
    same = trainer.train(batch)["loss"]
    batch["reference_logprobs"] = batch["reference_logprobs"] - 0.5
    other = trainer.train(batch)["loss"]
    expected = reference_step(load_reference(checkpoint), batch, policy_terms(DecoupledPPO()))
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
    trainer.save(tmp_path / "state")
    other = start_trainer(checkpoint, loss=loss, optimizer=adam, router_replay="none")
    other.restore(tmp_path / "state")
    assert other.train(batch) == trainer.train(batch)
    trainer.reset_optimizer(adam)
    expected = reference_step(load_reference(checkpoint), batch, supervised_terms, routed=False)
    # k3 of a logprob computed twice; float32 terms around 1 are rounded.
    bound = 10.0 * ((2 * expected.logprob_bound) ** 2 + numerics.FACTOR * numerics.EPSILON)
    numerics.assert_within(abs(trainer.train(batch)["loss"]), bound)
    assert away > 100 * bound


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(checkpoint, tmp_path):
    trainer = start_trainer(checkpoint, optimizer=ADAM)
    before = weights(trainer, tmp_path)
    batch = make_batch()
    batch["advantages"][1] = float("inf")
    with pytest.raises(FloatingPointError, match="gradient norm of update 0 is"):
        trainer.train(batch)
    after = weights(trainer, tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 2, "parallel": ParallelConfig(tensor=2)}, "world_size is 1, but trainer.ranks is 2"),
    ],
)
def test_a_trainer_of_another_size_is_refused(checkpoint, changes, message):
    from dataclasses import replace

    from async_rl.trainer.rank import TrainerRank
    from tests.parallel.support import NO_UPDATE, TRAINER

    with pytest.raises(RuntimeError, match=message):
        TrainerRank(
            config=replace(TRAINER, **changes),
            optimizer=NO_UPDATE,
            loss=DecoupledPPO(),
            checkpoint=checkpoint,
            rank=0,
            world_size=1,
        )


def test_bfloat16_trains_with_float32_gradients(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM, dtype="bfloat16")
    losses = [trainer.train_supervised(make_supervised_batch())["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    assert {t.dtype for t in gradients(trainer).values()} == {torch.float32}


def test_a_training_batch_passes_through_pickle(checkpoint):
    import pickle

    batch: TrainingBatch = pickle.loads(pickle.dumps(training_batch_of(make_batch(support=True))))
    assert start_trainer(checkpoint).train(batch)["tokens"] > 0
