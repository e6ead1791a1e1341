"""The KL term against frozen weights, on the real trainer."""

import math

import pytest
import torch

from async_rl.trainer.loss.losses import DecoupledPPO
from async_rl.trainer.state.optimizer import OptimizerConfig
from tests.helpers import numerics
from tests.parallel.support import (
    assert_equal_gradients,
    gradients,
    load_reference,
    make_batch,
    policy_terms,
    reference_step,
    save_tiny_moe,
    start_trainer,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

KL = DecoupledPPO(kl_coefficient=0.5)
ADAM = OptimizerConfig(lr=3e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("reference") / "model")


@pytest.fixture(scope="module", autouse=True)
def process_group(checkpoint):
    """Owns the process group of this module's trainers."""
    owner = start_trainer(checkpoint)
    yield
    owner.close()


def test_the_reference_is_the_frozen_weights_whatever_is_trained_since(checkpoint):
    frozen = start_trainer(checkpoint, optimizer=ADAM, loss=KL)
    given = start_trainer(checkpoint, optimizer=ADAM, loss=KL)
    batches = [make_batch(seed=seed) for seed in (1, 2)]
    references = [start_trainer(checkpoint, router_replay="none").logprobs(batch) for batch in batches]
    for batch, reference in zip(batches, references, strict=True):
        frozen_metrics = frozen.train(batch.clone())
        given_metrics = given.train(batch.clone().set("reference_logprobs", reference))
        numerics.assert_within(abs(frozen_metrics["loss"] - given_metrics["loss"]), loss_bound(checkpoint, batch))
    expected = reference_step(load_reference(checkpoint), batches[-1], policy_terms(DecoupledPPO()))
    assert_equal_gradients(gradients(frozen), expected, gradients(given))


def loss_bound(checkpoint, batch, *, routed=True):
    """Of the loss of KL by two float32 trainers: k3 of the reference is at most as steep as exp(0.5) in a logprob."""
    expected = reference_step(load_reference(checkpoint), batch, policy_terms(DecoupledPPO()), routed=routed)
    return 2 * (expected.loss_bound + KL.kl_coefficient * math.exp(0.5) * expected.logprob_bound)


def test_the_reference_survives_a_restart(checkpoint, tmp_path):
    first = start_trainer(checkpoint, optimizer=ADAM, loss=KL)
    first.train(make_batch(seed=1))
    first.save(tmp_path / "state")
    second = start_trainer(checkpoint, optimizer=ADAM, loss=KL)
    second.restore(tmp_path / "state")
    assert second.train(make_batch(seed=2)) == first.train(make_batch(seed=2))


def test_after_a_warm_start_the_reference_is_what_it_gave(checkpoint):
    def loss_without_drift(trainer):
        batch = make_batch(seed=2)
        return trainer.train(batch.set("behaviour_logprobs", trainer.logprobs(batch)))["loss"]

    warm = start_trainer(checkpoint, optimizer=ADAM, loss=KL, router_replay="none")
    warm.train(make_batch(seed=1))
    warm.reset_optimizer(ADAM)
    fresh = start_trainer(checkpoint, optimizer=ADAM, loss=KL, router_replay="none")
    difference = abs(loss_without_drift(warm) - loss_without_drift(fresh))
    numerics.assert_within(difference, loss_bound(checkpoint, make_batch(seed=2), routed=False))


def test_looking_at_the_reference_leaves_the_trained_weights_as_they_are(checkpoint):
    trainer = start_trainer(checkpoint, optimizer=ADAM, loss=KL)
    trainer.train(make_batch(seed=1))
    chunk = trainer.model.chunks[0]
    before = [p.detach().clone() for p in chunk.parameters()]
    assert trainer._reference is not None
    with trainer._reference.loaded():
        assert not all(torch.equal(a, b) for a, b in zip(before, chunk.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, chunk.parameters(), strict=True))


def test_score_is_by_the_weights_of_the_last_hold_and_changes_none(checkpoint):
    trainer, batch = start_trainer(checkpoint, optimizer=ADAM), make_batch(seed=1)
    assert torch.equal(trainer.score(batch), trainer.logprobs(batch)), "of the current weights before any hold"
    for seed in (2, 3):
        trainer.snapshot_weights()
        held = trainer.logprobs(batch)
        trainer.train(make_batch(seed=seed))
        trained = trainer.logprobs(batch)
        assert not torch.equal(trained, held)
        assert torch.equal(trainer.score(batch), held)
        assert torch.equal(trainer.logprobs(batch), trained)
