"""The trainer's teacher terms on a real tiny model, against float64 transformers over the whole vocabulary."""

import copy

import pytest
import torch

from async_rl.trainer.loss.distillation import DistillationConfig, log_rest
from async_rl.trainer.loss.losses import TIS
from tests.helpers import numerics
from tests.helpers.tiny_models import qwen3_dense_config, save_checkpoint, spread_model
from tests.parallel.support import (
    MARKS,
    Expected,
    add_teacher,
    assert_equal_gradients,
    distance,
    gradients,
    largest_difference,
    make_batch,
    make_tree_batch,
    start_trainer,
)

pytestmark = MARKS
VOCAB, TOP_K = 1000, 64


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_checkpoint(qwen3_dense_config(vocab_size=VOCAB), tmp_path_factory.mktemp("student") / "m", seed=0)


def logprobs_of(model, batch):
    """[S, T, V]: row t is the distribution of token t; zeros of position 0."""
    rows = []
    for ids, length in zip(batch["token_ids"], batch["lengths"].tolist(), strict=True):
        scores = model(ids[None, :length]).logits[0, :-1].double().log_softmax(-1)
        rows.append(torch.nn.functional.pad(scores, (0, 0, 1, len(ids) - length)))
    return torch.stack(rows)


def taught_batch(top_k):
    """Random tokens without rewards, scored by a softened model of another seed."""
    batch = make_batch(routed=False, vocab=VOCAB)
    batch["advantages"].zero_()
    teacher = spread_model(qwen3_dense_config(vocab_size=VOCAB), seed=1)
    with torch.no_grad():
        teacher.lm_head.weight *= 3  # as peaked as a trained model
        dense = logprobs_of(teacher.double(), batch)
    add_teacher(batch, dense, top_k=top_k)
    return batch, dense


def folded(log_probs, ids):
    held = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(-1, ids.long(), True)
    rest = log_probs.masked_fill(held, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((log_probs.gather(-1, ids.long()), rest), -1)


def kl_of(log_p, log_q, kl):
    weight, ratio = (log_q.exp(), log_q - log_p) if kl == "forward" else (log_p.exp(), log_p - log_q)
    return (weight * ratio).sum(-1)


@pytest.mark.parametrize("kl", ["forward", "reverse_top_k"])
def test_the_kl_over_the_top_64_is_that_over_the_vocabulary_up_to_the_rest(student, kl, capsys):
    batch, dense = taught_batch(TOP_K)
    trainer = start_trainer(
        student, loss=TIS(), router_replay="none", teaches=DistillationConfig(kl=kl, coefficient=0.7)
    )
    metrics = trainer.train(batch)
    found = gradients(trainer)
    trainer.close()
    mask, ids = batch["loss_mask"], batch["teacher_ids"]
    model = spread_model(qwen3_dense_config(vocab_size=VOCAB), seed=0)
    exact, single = copy.deepcopy(model).double(), model
    values, grads = {}, {}
    for name, each in (("exact", exact), ("single", single)):
        log_p = logprobs_of(each, batch)
        over_top = kl_of(folded(log_p, ids), folded(dense, ids), kl)[mask].mean()
        over_all = kl_of(log_p, dense, kl)[mask].mean()
        (0.7 * over_top).backward()
        values[name] = over_top.item(), over_all.item()
        grads[name] = {key: parameter.grad.double() for key, parameter in each.named_parameters()}
    (over_top, over_all), bound = values["exact"], numerics.FACTOR * abs(values["exact"][0] - values["single"][0])
    bound += TOP_K * numerics.EPSILON * 20  # the rest of the teacher is known up to the error of 64 float32 logprobs
    measured = metrics[{"forward": "teacher/kl_forward", "reverse_top_k": "teacher/kl_reverse"}[kl]]
    with capsys.disabled():
        print(f"\n{kl}: trainer {measured:.6f}, top 64 {over_top:.6f}, whole vocabulary {over_all:.6f} nat")  # noqa: T201
    numerics.assert_within(abs(measured - over_top), bound, "to float64 over the same support")
    assert over_all - over_top >= 0, "a coarser support has a smaller KL"
    numerics.assert_within(abs(measured - over_all), (over_all - over_top) + bound, "to the whole vocabulary")
    numerics.assert_within(abs(metrics["loss"] - 0.7 * over_top), bound, "loss")
    assert_equal_gradients(
        found,
        Expected(
            logprobs=torch.empty(0),
            loss=over_top,
            gradients=grads["exact"],
            logprob_bound=0.0,
            loss_bound=0.0,
            gradient_bound=numerics.FACTOR * largest_difference(grads["single"], grads["exact"]),
            distance_bound=numerics.FACTOR * distance(grads["single"], grads["exact"]),
        ),
    )


def test_the_teachers_rest_is_that_of_float64():
    _, dense = taught_batch(TOP_K)
    top = dense.topk(TOP_K).values
    exact = (1 - top.exp().sum(-1)).clamp(min=0)
    numerics.assert_within(
        (log_rest(top.float()).double().exp() - exact).abs().max().item(), 2 * TOP_K * numerics.EPSILON
    )


def test_shared_prefixes_give_the_term_of_separate_sequences(tmp_path):
    from tests.parallel.support import save_tiny_moe

    checkpoint, found = save_tiny_moe(tmp_path / "moe"), {}
    for sharing in (True, False):
        batch = make_tree_batch([(0, 20)] * 8)
        generator = torch.Generator().manual_seed(4)
        add_teacher(batch, torch.randn(*batch["token_ids"].shape, 117, generator=generator).log_softmax(-1), top_k=8)
        trainer = start_trainer(
            checkpoint,
            loss=TIS(),
            teaches=DistillationConfig(kl="forward", top_k=8),
            prefix_sharing="auto" if sharing else "off",
        )
        found[sharing] = trainer.train(batch), gradients(trainer)
        trainer.close()
    assert found[True][0]["tree/compression"] > 1.5 > found[False][0]["tree/compression"]
    for key in ("teacher/kl_forward", "teacher/kl_reverse", "teacher/kl_sampled", "loss"):
        assert found[True][0][key] == pytest.approx(found[False][0][key], rel=1e-4)
    numerics.assert_within(distance(found[True][1], found[False][1]), 1e-4, "gradients")


def test_groups_with_equal_rewards_are_trained_by_their_teacher(student):
    batch, _ = taught_batch(0)
    batch["informative"].zero_()
    trainer = start_trainer(student, loss=TIS(), router_replay="none", teaches=DistillationConfig())
    metrics = trainer.train(batch)
    trainer.close()
    assert metrics["tokens"] == batch["loss_mask"].sum() and metrics["grad_norm"] > 0
