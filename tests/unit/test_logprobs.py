"""Logprob and entropy of split vocabularies against log_softmax."""

import threading

import pytest
import torch
import torch.distributed as dist

from async_rl.train.logprobs import logprobs_and_entropy
from tests import numerics

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def example(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, 11, generator=g, dtype=dtype) * 3, torch.randint(0, 11, (5, 3), generator=g)


def by_log_softmax(logits, targets, temperature=1.0):
    """Logprobs and entropy of the targets."""
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(scores.exp() * scores).sum(-1)


def assert_near(found, compute, logits, *arguments):
    """`found` are the results of `compute` in float64, up to the error that it has in float32."""
    for ours, single, exact in zip(
        found, compute(logits, *arguments), compute(logits.double(), *arguments), strict=True
    ):
        bound = numerics.FACTOR * numerics.error(single.detach(), exact.detach())
        numerics.assert_within((ours.detach() - exact.detach()).abs().max().item(), bound)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_equal_log_softmax(temperature):
    logits, targets = example()
    kept = logits.clone()
    found = logprobs_and_entropy(logits, targets, temperature=temperature)
    assert_near(found, by_log_softmax, logits, targets, temperature)
    assert torch.equal(logits, kept)


def test_gradients_equal_those_of_log_softmax():
    logits, targets = example()
    ours = logits.clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(ours, targets, temperature=0.7)
    (logprobs.sum() + 0.3 * entropy.square().sum()).backward()

    def gradient(logits):
        theirs = logits.clone().requires_grad_()
        logprobs, entropy = by_log_softmax(theirs, targets, 0.7)
        return torch.autograd.grad(logprobs.sum() + 0.3 * entropy.square().sum(), theirs)

    assert_near((ours.grad,), gradient, logits)


def test_gradients_are_the_derivative(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # gradcheck needs the float64 it gives
    logits, targets = example(torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, targets), (logits,))
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, targets)[0], (logits,))
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, targets)[1], (logits,))


def test_entropy_is_zero_where_it_is_not_asked_for():
    logits, targets = example()
    logprobs, entropy = logprobs_and_entropy(logits, targets, with_entropy=False)
    assert not entropy.any()
    assert torch.equal(logprobs, logprobs_and_entropy(logits, targets)[0])


class ThreadGroup:
    """Ranks of a group as threads of one process."""

    def __init__(self, size):
        self.parts, self.size_, self.barrier = [None] * size, size, threading.Barrier(size)
        self.local = threading.local()

    def size(self):
        return self.size_

    def rank(self):
        return self.local.rank

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None):
        self.parts[self.rank()] = tensor.clone()
        self.barrier.wait()
        stacked = torch.stack(self.parts)
        self.barrier.wait()
        tensor.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))


def test_a_vocabulary_split_over_ranks_with_padding_gives_the_same(monkeypatch):
    logits, targets = example()
    group, results = ThreadGroup(2), {}
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)

    def run(rank):
        group.local.rank = rank
        part = logits[..., :6] if rank == 0 else logits[..., 6:]  # 6 + 5 columns: the second rank has one of padding
        part = part.clone().requires_grad_()
        found = logprobs_and_entropy(part, targets, group=group, full_columns=6)
        # Autograd would run both backward passes on one thread; they need no exchange.
        results[rank] = (*found, torch.autograd.grad(found[0].sum() + found[1].sum(), part)[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    def gradient(logits):
        whole = logits.clone().requires_grad_()
        logprobs, entropy = by_log_softmax(whole, targets)
        return torch.autograd.grad(logprobs.sum() + entropy.sum(), whole)

    for rank in range(2):
        assert_near(results[rank][:2], by_log_softmax, logits, targets)
    assert_near((torch.cat([results[0][2], results[1][2]], -1)[..., :11],), gradient, logits)
