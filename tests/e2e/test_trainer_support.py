"""TrainerRank on samples of a cut distribution: top-p, top-k, min-p keep other tokens at each position."""

import pytest
import torch

from async_rl.trainer.loss.losses import M2PO, DecoupledPPO
from async_rl.trainer.state.optimizer import OptimizerConfig
from message_queue.errors import ContractError
from message_queue.sampling_support import SamplingSupport
from tests.parallel.support import (
    MARKS,
    VOCAB,
    add_support,
    assert_near,
    assert_trains_as,
    expected_step,
    gradients,
    largest_difference,
    make_batch,
    start_trainer,
)

pytestmark = [*MARKS, pytest.mark.usefixtures("owner")]


def test_support_gives_the_logprobs_loss_and_gradient_of_transformers(checkpoint):
    config = DecoupledPPO(entropy_coefficient=0.01)
    batch = make_batch(support=True)
    expected = expected_step(checkpoint, batch, config)
    trainer = start_trainer(checkpoint, loss=config, micro_batch_tokens=40)
    mask = batch["loss_mask"]
    assert_near(trainer.logprobs(batch)[mask], expected.logprobs[mask], bound=expected.logprob_bound)
    assert_trains_as(trainer, batch, expected)
    with pytest.raises(AssertionError):
        assert_trains_as(trainer, batch.exclude("support"), expected)


def test_support_of_the_whole_vocabulary_changes_nothing(checkpoint):
    batch = make_batch()
    with_support = batch.copy()
    add_support(with_support, [SamplingSupport.whole(length) for length in batch["lengths"].tolist()])
    trainer, other = start_trainer(checkpoint), start_trainer(checkpoint)
    assert trainer.train(with_support)["loss"] == other.train(batch)["loss"]
    assert largest_difference(gradients(trainer), gradients(other)) == 0


def test_support_is_that_of_the_reference_of_kl_too(checkpoint):
    loss, adam = DecoupledPPO(kl_coefficient=1.0), OptimizerConfig(lr=1e-2)
    batch = make_batch(support=True)
    start = start_trainer(checkpoint, loss=loss, router_replay="none")
    given = batch.copy().set("reference_logprobs", start.logprobs(batch))
    losses = []
    for each in (batch, given):
        trainer = start_trainer(checkpoint, loss=loss, optimizer=adam, router_replay="none")
        trainer.train(make_batch())
        losses.append(trainer.train(each))
    assert losses[0]["loss"] == losses[1]["loss"]
    assert losses[0]["kl/reference"] > 1e-3


def test_support_is_that_of_the_proximal_policy_too(checkpoint):
    trainer = start_trainer(checkpoint, loss=M2PO(max_second_moment=1e-9))
    batch = make_batch(support=True)
    batch["behaviour_logprobs"] = trainer.logprobs(batch)
    assert trainer.train(batch)["mask/fraction"] == 0
    assert trainer.train(batch.exclude("support"))["mask/fraction"] > 0


def test_support_without_the_sampled_token_is_refused(checkpoint):
    batch = make_batch(support=True)
    batch["token_ids"] = torch.where(batch["loss_mask"], (batch["token_ids"] + 1) % VOCAB, batch["token_ids"])
    with pytest.raises(ContractError, match="SamplingSupport"):
        start_trainer(checkpoint).train(batch)
