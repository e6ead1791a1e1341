"""TrainerRank on samples of a cut distribution: top-p, top-k, min-p."""

import pytest
import torch

from async_rl.trainer.loss.losses import M2PO, DecoupledPPO
from async_rl.trainer.state.optimizer import OptimizerConfig
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import ContractError
from tests.helpers import numerics
from tests.helpers.tiny_models import qwen3_dense_config, save_checkpoint
from tests.parallel.support import (
    VOCAB,
    add_support,
    assert_equal_steps,
    assert_near,
    gradients,
    largest_difference,
    load_reference,
    make_batch,
    outside_support,
    policy_terms,
    reference_step,
    save_tiny_moe,
    start_trainer,
    support_of,
)

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

SAMPLERS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "top_p-top_k": {"top_p": 0.9, "top_k": 20},
    "top_p-top_k-min_p": {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
}
PROMPT, LENGTH = 4, 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_moe(tmp_path_factory.mktemp("support") / "model")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_checkpoint(qwen3_dense_config(), tmp_path_factory.mktemp("support") / "dense", seed=3)


@pytest.fixture(scope="module", autouse=True)
def process_group(checkpoint):
    """Owns the process group of this module's trainers."""
    owner = start_trainer(checkpoint)
    yield
    owner.close()


def without_support(batch):
    return batch.exclude("support")


def kept_tokens(probs, *, top_p=1.0, top_k=VOCAB, min_p=0.0):
    """bool [S, V]: top-k, then top-p of what that leaves, then min-p."""
    order = probs.argsort(-1, descending=True)
    ranked = probs.gather(-1, order)
    ranked = ranked * (torch.arange(VOCAB) < top_k)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    kept = (ranked > 0) & (ranked.cumsum(-1) - ranked < top_p) & (ranked >= min_p * ranked[:, :1])
    return torch.zeros_like(kept).scatter(-1, order, kept)


def sampled(checkpoint, sampler, *, temperature):
    """A batch of four sequences that transformers sampled in float64, with what its sampler kept."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (4, PROMPT), generator=g)
    logprobs, kept = torch.zeros(4, PROMPT), torch.zeros(4, PROMPT, VOCAB, dtype=torch.bool)
    model = numerics.float64_model(load_reference(checkpoint))
    with torch.no_grad(), numerics.float64_forward():
        for _ in range(PROMPT, LENGTH):
            probs = (model(ids).logits[:, -1] / temperature).softmax(-1)
            support = kept_tokens(probs, **sampler)
            probs = probs * support
            probs = probs / probs.sum(-1, keepdim=True)
            token = probs.multinomial(1, generator=g)
            ids = torch.cat((ids, token), 1)
            logprobs = torch.cat((logprobs, probs.gather(1, token).log().to(logprobs.dtype)), 1)
            kept = torch.cat((kept, support.unsqueeze(1)), 1)
    batch = make_batch((LENGTH,) * 4, routed=False)
    batch.update({"token_ids": ids, "behaviour_logprobs": logprobs, "loss_mask": kept.any(-1)})
    batch.update({"lag": torch.where(batch["loss_mask"], 0, -1).int(), "pure_lag0": batch["loss_mask"].clone()})
    add_support(batch, [support_of(row) for row in kept])
    return batch


def float32_k3(checkpoint, batch, *, temperature):
    """k3 of transformers in float32 over the kept tokens, against the sampler."""
    with torch.no_grad():
        logits = load_reference(checkpoint)(batch["token_ids"]).logits[:, :-1] / temperature
    scores = logits.masked_fill(outside_support(batch)[:, 1:], -torch.inf).log_softmax(-1)
    current = scores.gather(-1, batch["token_ids"][:, 1:, None]).squeeze(-1)
    d = (current - batch["behaviour_logprobs"][:, 1:])[batch["loss_mask"][:, 1:]].double()
    return (torch.expm1(d) - d).mean().item()


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_support_makes_trainer_and_sampler_agree_at_equal_weights(dense, sampler):
    batch = sampled(dense, sampler, temperature=0.8)
    counts = torch.cat([torch.from_numpy(support.unpack()[0]) for support in batch["support"]])
    assert 1 < counts[counts > 0].double().mean() < VOCAB / 2
    trainer = start_trainer(dense, loss=DecoupledPPO(temperature=0.8), router_replay="none")
    bound = numerics.FACTOR**2 * float32_k3(dense, batch, temperature=0.8)  # quadratic in the difference
    assert bound < 1e-9
    numerics.assert_within(trainer.train(batch)["mismatch/k3_lag0"], bound)
    assert trainer.train(without_support(batch))["mismatch/k3_lag0"] > 1e5 * bound


def test_support_gives_the_logprobs_loss_and_gradient_of_transformers(checkpoint):
    config = DecoupledPPO(entropy_coefficient=0.01)
    batch = make_batch(support=True)
    expected = reference_step(load_reference(checkpoint), batch, policy_terms(config))
    trainer = start_trainer(checkpoint, loss=config, micro_batch_tokens=40)
    mask = batch["loss_mask"]
    assert_near(trainer.logprobs(batch)[mask], expected.logprobs[mask], bound=expected.logprob_bound)
    assert_equal_steps(trainer.train(batch)["loss"], gradients(trainer), expected)
    with pytest.raises(AssertionError):
        assert_equal_steps(trainer.train(without_support(batch))["loss"], gradients(trainer), expected)


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
    assert trainer.train(without_support(batch))["mask/fraction"] > 0


def test_support_without_the_sampled_token_is_refused(checkpoint):
    batch = make_batch(support=True)
    batch["token_ids"] = torch.where(batch["loss_mask"], (batch["token_ids"] + 1) % VOCAB, batch["token_ids"])
    with pytest.raises(ContractError, match="SamplingSupport"):
        start_trainer(checkpoint).train(batch)
