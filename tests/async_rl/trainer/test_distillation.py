"""The teacher's terms and their gradients against a plain float64 implementation, on one rank and on two."""

import threading

import pytest
import torch
import torch.distributed as dist

from async_rl.trainer.loss.distillation import DistillationConfig, log_rest, supported_kl, teacher_term, with_teacher
from async_rl.trainer.loss.logprobs import OutputLayer, logprobs_and_entropy
from async_rl.trainer.loss.support_logprobs import support_logprobs
from tests.helpers import numerics
from tests.helpers.thread_group import ThreadGroup

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

VOCAB, SIZE, ROWS, K = 29, 8, 11, 6
BOUND = 1e-6


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr("async_rl.trainer.loss.logprobs.ELEMENTS_AT_ONCE", 2 * VOCAB)


def example(dtype=torch.float32):
    """Hidden states, output weight, and a teacher's logprobs of the whole vocabulary."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(ROWS, SIZE, generator=generator), torch.randn(VOCAB, SIZE, generator=generator) / 2
    teacher = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)
    return hidden.to(dtype), weight.to(dtype), teacher


def top_of(teacher, k=K):
    top = teacher.topk(k)
    return top.indices, top.values.float()


def plain_kl(hidden, weight, teacher, kl, k=K):
    """The KL [n] over the teacher's top k tokens and the rest, from the logits of the whole vocabulary."""
    log_p, ids = (hidden @ weight.T).log_softmax(-1), top_of(teacher, k)[0]
    held = torch.zeros_like(teacher, dtype=torch.bool).scatter_(-1, ids, True)

    def folded(log_probs):
        rest = log_probs.masked_fill(held, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat((log_probs.gather(-1, ids), rest), -1)

    log_p, log_q = folded(log_p), folded(teacher)
    return ((log_q.exp() * (log_q - log_p)) if kl == "forward" else (log_p.exp() * (log_p - log_q))).sum(-1)


def ours(hidden, weight, teacher, kl, *, ids=VOCAB, group=None):
    top_ids, top = top_of(teacher)
    layer = OutputLayer(weight=weight, num_ids=ids, dtype=weight.dtype, group=group)
    return supported_kl(support_logprobs(hidden, top_ids, layer=layer), top, kl)


def gradients(function, *inputs):
    """Values and gradients by hidden states and weight, each row with another factor."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    values = function(*inputs)
    return values.detach(), torch.autograd.grad((values * torch.linspace(0.2, 1.0, len(values))).sum(), inputs)


def assert_equal_to_plain(values, grads, kl):
    hidden, weight, teacher = example(torch.float64)
    exact, exact_grads = gradients(lambda *given: plain_kl(*given, teacher, kl), hidden, weight)
    assert exact.min() > 0.05, "the distributions differ"
    numerics.assert_within((values - exact).abs().max().item(), BOUND, kl)
    for found, wanted in zip(grads, exact_grads, strict=True):
        numerics.assert_within((found.double() - wanted).abs().max().item(), BOUND, f"gradient of {kl}")


@pytest.mark.parametrize("kl", ["forward", "reverse_top_k"])
def test_a_kl_and_its_gradients_are_those_of_plain_float64(kl):
    hidden, weight, teacher = example()
    values, grads = gradients(lambda *given: ours(*given, teacher, kl), hidden, weight)
    assert_equal_to_plain(values, grads, kl)


@pytest.mark.parametrize("kl", ["forward", "reverse_top_k"])
def test_a_vocabulary_that_is_split_over_two_ranks_gives_the_same(kl, monkeypatch):
    hidden, weight, teacher = example()
    group, found = ThreadGroup(2), {}
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    half = (VOCAB + 1) // 2

    def run(rank):
        group.local.rank = rank
        part = torch.nn.functional.pad(weight[half * rank : half * rank + half], (0, 0, 0, rank), value=50.0)  # padding
        inputs = [hidden.clone().requires_grad_(), part.clone().requires_grad_()]
        values = ours(*inputs, teacher, kl, ids=half - rank, group=group)
        factors = torch.linspace(0.2, 1.0, len(values))
        found[rank] = values.detach(), torch.autograd.grad((values * factors).sum(), inputs)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    of_weight = torch.cat([found[0][1][1], found[1][1][1]])
    for rank in range(2):
        assert_equal_to_plain(found[rank][0], (found[0][1][0] + found[1][1][0], of_weight[:VOCAB]), kl)
    assert not of_weight[VOCAB:].any()


def test_the_reverse_term_is_the_policy_gradient_of_the_sampled_kl():
    """-A' log p(t) with A' = c (log q(t) - log p(t)), whose log p(t) has no gradient of its own."""
    hidden, weight, teacher = example()
    sampled = torch.arange(ROWS) * 2

    def plain(hidden, weight):
        log_p = (hidden @ weight.T).log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        log_q = teacher.gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        return -(0.3 + 0.7 * (log_q - log_p.detach())) * log_p

    def found(hidden, weight):
        layer = OutputLayer(weight=weight, num_ids=VOCAB, dtype=weight.dtype)
        current, _ = logprobs_and_entropy(hidden, sampled, layer=layer)
        log_q = teacher.gather(-1, sampled.unsqueeze(-1)).squeeze(-1).float()
        return -with_teacher(torch.full((ROWS,), 0.3), current, log_q, coefficient=0.7) * current

    values, grads = gradients(found, hidden, weight)
    exact, exact_grads = gradients(plain, hidden.double(), weight.double())
    numerics.assert_within((values - exact).abs().max().item(), 4 * BOUND)  # products of up to 4 nat
    for ours_, wanted in zip(grads, exact_grads, strict=True):
        numerics.assert_within((ours_ - wanted).abs().max().item(), 8 * BOUND)


def test_the_mean_of_the_sampled_kl_is_the_kl():
    """Each token of the vocabulary once, weighted with its probability."""
    hidden, weight, teacher = example(torch.float64)
    log_p = (hidden @ weight.T).log_softmax(-1)[0]
    sampled = with_teacher(torch.zeros(VOCAB, dtype=torch.float64), log_p, teacher[0], coefficient=1.0)
    kl = (log_p.exp() * (log_p - teacher[0])).sum()
    assert torch.isclose((log_p.exp() * -sampled).sum(), kl, rtol=1e-12)


def test_a_token_without_a_teacher_has_no_term_and_no_gradient():
    advantages, current = torch.tensor([1.0, -1.0]), torch.tensor([-2.0, -3.0])
    teacher = torch.tensor([torch.nan, -1.0])
    assert with_teacher(advantages, current, teacher, coefficient=0.5).tolist() == [1.0, 0.0]
    hidden, weight, _ = example()
    hidden.requires_grad_()
    layer = OutputLayer(weight=weight, num_ids=VOCAB, dtype=weight.dtype)
    ids, top = torch.full((ROWS, K), -1), torch.full((ROWS, K), -torch.inf)
    student = support_logprobs(hidden, ids, layer=layer)
    assert student.isfinite().all() and student[:, -1].abs().max() < BOUND, "all tokens are the rest"
    columns = {"teacher_logprobs": torch.full((ROWS,), torch.nan), "teacher_top_logprobs": top}
    columns["advantages"] = torch.ones(ROWS)
    term = teacher_term(columns, student[:, 0], student, DistillationConfig(kl="forward"))
    assert not term.loss.any() and not any(column.any() for column in term.sums.values())
    gradient = torch.autograd.grad(supported_kl(student, top, "forward").sum(), hidden)[0]
    assert gradient.abs().max() < BOUND


def test_tokens_that_the_student_does_not_have_are_of_the_rest():
    hidden, weight, teacher = example()
    ids, top = top_of(teacher)
    layer = OutputLayer(weight=weight, num_ids=VOCAB, dtype=weight.dtype)
    fewer = supported_kl(support_logprobs(hidden, ids[:, : K - 2], layer=layer), top[:, : K - 2], "forward")
    ids[:, K - 2 :], top[:, K - 2 :] = -1, -torch.inf
    masked = supported_kl(support_logprobs(hidden, ids, layer=layer), top, "forward")
    numerics.assert_within((fewer - masked).abs().max().item(), BOUND)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_a_rest_without_mass_gives_finite_gradients(scale):
    """At 300 all mass is on one token, and float32 has none for the rest."""
    hidden, weight, teacher = example()
    hidden = (hidden * scale).requires_grad_()
    layer = OutputLayer(weight=weight, num_ids=VOCAB, dtype=weight.dtype)
    ids = (hidden @ weight.T).topk(K).indices
    found = support_logprobs(hidden, ids, layer=layer)
    for kl in ("forward", "reverse_top_k"):
        value = supported_kl(found, teacher.gather(-1, ids).float(), kl)
        gradient = torch.autograd.grad(value.sum(), hidden, retain_graph=True)[0]
        assert value.isfinite().all() and gradient.isfinite().all()


def test_the_rest_is_what_the_top_leaves():
    top = torch.tensor([[0.5, 0.3], [0.999, 0.0009]]).log()
    assert torch.allclose(log_rest(top).exp(), torch.tensor([0.2, 0.0001]), rtol=1e-2)
    assert log_rest(torch.zeros(1, 1)).isfinite().all()


def test_the_logits_of_a_few_rows_exist_at_a_time(monkeypatch):
    from tests.parallel.ranks import LiveTensors  # imports megatron

    hidden, weight = (torch.randn(rows, 4).bfloat16().requires_grad_() for rows in (400, 200))
    ids, at_once = torch.arange(400).unsqueeze(-1) % 100 + torch.tensor([0, 50, 100]), 4 * 200
    monkeypatch.setattr("async_rl.trainer.loss.logprobs.ELEMENTS_AT_ONCE", at_once)
    layer = OutputLayer(weight=weight, num_ids=200, dtype=weight.dtype)
    limit = 8 * at_once + 64 * len(hidden)
    with LiveTensors(known=[hidden, weight, ids], limit=limit) as live:
        torch.autograd.grad(support_logprobs(hidden, ids, layer=layer).sum(), (hidden, weight))
    assert live.most <= limit < len(hidden) * len(weight) / 2


def test_only_the_kls_of_the_top_need_ids():
    assert [DistillationConfig(kl=kl).num_ids for kl in ("reverse", "forward", "reverse_top_k")] == [0, 64, 64]
    with pytest.raises(ValueError, match="coefficient"):
        DistillationConfig(coefficient=0)
