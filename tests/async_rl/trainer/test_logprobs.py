"""Logprob and entropy of split vocabularies against log_softmax."""

import threading
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from async_rl.trainer.loss.logprobs import KeptTokens, kept_logprobs_and_entropy, logprobs_and_entropy
from tests.helpers import numerics

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


LOSS_ROWS = torch.tensor([3, 0, 14, 9, 10, 1, 7])  # of 15 rows; any order, not all


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    """Two rows of 11 columns, so that 7 rows are worked on in four parts, the last one smaller."""
    monkeypatch.setattr("async_rl.trainer.loss.logprobs.ELEMENTS_AT_ONCE", 22)


def example(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return torch.randn(15, 11, generator=g, dtype=dtype) * 3, torch.randint(0, 11, (7,), generator=g)


def by_log_softmax(logits, targets, temperature=1.0):
    """Logprobs and entropy of the targets."""
    scores = (logits[LOSS_ROWS] / temperature).log_softmax(-1)
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
    found = logprobs_and_entropy(logits, LOSS_ROWS, targets, temperature=temperature)
    assert_near(found, by_log_softmax, logits, targets, temperature)
    assert torch.equal(logits, kept)


def test_gradients_equal_those_of_log_softmax():
    logits, targets = example()
    ours = logits.clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(ours, LOSS_ROWS, targets, temperature=0.7)
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
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, LOSS_ROWS, targets), (logits,))
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, LOSS_ROWS, targets)[0], (logits,))
    assert torch.autograd.gradcheck(lambda z: logprobs_and_entropy(z, LOSS_ROWS, targets)[1], (logits,))


def test_entropy_is_zero_where_it_is_not_asked_for():
    logits, targets = example()
    logprobs, entropy = logprobs_and_entropy(logits, LOSS_ROWS, targets, with_entropy=False)
    assert not entropy.any()
    assert torch.equal(logprobs, logprobs_and_entropy(logits, LOSS_ROWS, targets)[0])


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
        found = logprobs_and_entropy(part, LOSS_ROWS, targets, group=group, full_columns=6)
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


# ---- over the tokens that the sampler kept

# Rows of logits in the loss, and what was kept for each: one token, all on one rank of two, over both, the last id.
ROWS, SETS = [6, 0, 2, 9], [[4], [1, 3, 5], [0, 2, 6, 7], [5, 9, 10]]
TARGETS = [4, 3, 7, 10]


def kept_example():
    """Logits [10, 11], rows, targets and kept tokens of four positions."""
    logits = torch.randn(10, 11, generator=torch.Generator().manual_seed(0)) * 3
    kept = KeptTokens.of(torch.tensor([len(ids) for ids in SETS]), torch.tensor([*chain(*SETS)]))
    return logits, torch.tensor(ROWS), torch.tensor(TARGETS), kept


def by_masked_log_softmax(logits, temperature=1.0):
    """Logprobs of TARGETS and entropy over SETS in ROWS."""
    outside = torch.ones(len(ROWS), logits.shape[-1], dtype=torch.bool)
    for row, ids in zip(outside, SETS, strict=True):
        row[ids] = False
    scores = (logits[ROWS] / temperature).masked_fill(outside, -torch.inf).log_softmax(-1)
    entropy = -(scores.exp() * scores.masked_fill(outside, 0.0)).sum(-1)
    return scores.gather(-1, torch.tensor(TARGETS).unsqueeze(-1)).squeeze(-1), entropy


def kept_gradient(logits, temperature=1.0):
    whole = logits.clone().requires_grad_()
    logprobs, entropy = by_masked_log_softmax(whole, temperature)
    return torch.autograd.grad(logprobs.sum() + 0.3 * entropy.square().sum(), whole)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_over_kept_tokens_equal_a_masked_log_softmax(temperature):
    logits, rows, targets, kept = kept_example()
    found = kept_logprobs_and_entropy(logits, rows, targets, kept, columns=11, temperature=temperature)
    assert_near(found, by_masked_log_softmax, logits, temperature)


def test_gradients_over_kept_tokens_are_zero_for_all_others():
    logits, rows, targets, kept = kept_example()
    ours = logits.clone().requires_grad_()
    logprobs, entropy = kept_logprobs_and_entropy(ours, rows, targets, kept, columns=11, temperature=0.7)
    (logprobs.sum() + 0.3 * entropy.square().sum()).backward()
    assert_near((ours.grad,), kept_gradient, logits, 0.7)
    inside = torch.zeros(10, 11, dtype=torch.bool)
    for row, ids in zip(ROWS, SETS, strict=True):
        inside[row, ids] = len(ids) > 1
    assert torch.equal(ours.grad != 0, inside)


def test_gradients_over_kept_tokens_are_the_derivative(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # gradcheck needs the float64 it gives
    logits, rows, targets, kept = kept_example()

    def both(z):
        return kept_logprobs_and_entropy(z, rows, targets, kept, columns=11)

    exact = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(both, (exact,))
    assert torch.autograd.gradcheck(lambda z: both(z)[0], (exact,))
    assert torch.autograd.gradcheck(lambda z: both(z)[1], (exact,))


def test_kept_tokens_of_a_vocabulary_split_over_ranks_give_the_same(monkeypatch):
    logits, rows, targets, kept = kept_example()
    group, results = ThreadGroup(2), {}
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    padded = torch.nn.functional.pad(logits, (0, 1), value=50.0)  # padding columns must not count

    def run(rank):
        group.local.rank = rank
        part = padded[:, 6 * rank : 6 * rank + 6].clone().requires_grad_()
        columns = 6 if rank == 0 else 5
        found = kept_logprobs_and_entropy(part, rows, targets, kept, columns=columns, group=group)
        total = found[0].sum() + 0.3 * found[1].square().sum()
        results[rank] = (*found, torch.autograd.grad(total, part)[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for rank in range(2):
        assert_near(results[rank][:2], by_masked_log_softmax, logits)
    together = torch.cat([results[0][2], results[1][2]], -1)
    assert_near((together[:, :11],), kept_gradient, logits)
    assert not together[:, 11].any()


def test_kept_tokens_are_of_the_positions_that_were_cut():
    kept = KeptTokens.of(torch.tensor([2, 0, 1]), torch.tensor([3, 7, 5]))
    assert (kept.cut.tolist(), kept.whole.tolist(), kept.counts.tolist()) == ([0, 2], [1], [2, 1])
    assert kept.num_containing(torch.tensor([7, 9, 4])) == 1
    assert KeptTokens.of(torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) is None


def test_no_copy_of_all_logits_is_made(monkeypatch):
    from tests.parallel.ranks import LiveTensors  # imports megatron

    logits = torch.randn(400, 50).bfloat16().requires_grad_()
    rows, at_once = torch.arange(400), 4 * 50
    monkeypatch.setattr("async_rl.trainer.loss.logprobs.ELEMENTS_AT_ONCE", at_once)
    with LiveTensors(known=[logits]) as live:
        logprobs, entropy = logprobs_and_entropy(logits, rows, torch.zeros(400, dtype=torch.int64))
        forward = live.most
        torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    numbers_per_row = 32 * len(rows)
    assert forward <= 8 * at_once + numbers_per_row
    assert live.most <= logits.numel() + 8 * at_once + numbers_per_row
