"""Logprob and entropy of split vocabularies, whole or of the tokens that the sampler kept, against log_softmax."""

import threading
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from async_rl.trainer.loss.logprobs import KeptTokens, kept_logprobs_and_entropy, logprobs_and_entropy
from tests.helpers import numerics

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

COLUMNS = 11


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    """Two rows of 11 columns, so that 7 rows are worked on in four parts, the last one smaller."""
    monkeypatch.setattr("async_rl.trainer.loss.logprobs.ELEMENTS_AT_ONCE", 2 * COLUMNS)


@dataclass(frozen=True)
class Case:
    """Positions in a loss. kept: tokens that the sampler kept for each; None for the whole vocabulary."""

    rows: list[int]
    targets: list[int]
    kept: list[list[int]] | None = None

    def ours(self, logits, *, columns=COLUMNS, group=None, **options):
        """Logprobs and entropy by the functions under test; `columns` of the logits are no padding."""
        rows, targets = torch.tensor(self.rows), torch.tensor(self.targets)
        if self.kept is None:
            return logprobs_and_entropy(
                logits, rows, targets, group=group, full_columns=6 if group else None, **options
            )
        kept = KeptTokens.of(torch.tensor([len(ids) for ids in self.kept]), torch.tensor([*chain(*self.kept)]))
        return kept_logprobs_and_entropy(logits, rows, targets, kept, columns=columns, group=group, **options)

    def reference(self, logits, temperature=1.0):
        """Logprobs and entropy by log_softmax."""
        scores = logits[self.rows] / temperature
        outside = torch.zeros_like(scores, dtype=torch.bool)
        if self.kept is not None:
            outside[:] = True
            for row, ids in zip(outside, self.kept, strict=True):
                row[ids] = False
        scores = scores.masked_fill(outside, -torch.inf).log_softmax(-1)
        entropy = -(scores.exp() * scores.masked_fill(outside, 0.0)).sum(-1)
        return scores.gather(-1, torch.tensor(self.targets).unsqueeze(-1)).squeeze(-1), entropy

    def reference_gradient(self, logits, temperature=1.0):
        """Gradient of `total` of the reference."""
        whole = logits.clone().requires_grad_()
        return torch.autograd.grad(total(self.reference(whole, temperature)), whole)


WHOLE = Case(rows=[3, 0, 14, 9, 10, 1, 7], targets=[4, 0, 10, 5, 6, 7, 2])  # of 15 rows; any order, not all
# Kept: one token, all on one rank of two, on both, the last id.
KEPT = Case(rows=[6, 0, 2, 9], targets=[4, 3, 7, 10], kept=[[4], [1, 3, 5], [0, 2, 6, 7], [5, 9, 10]])
both_cases = pytest.mark.parametrize("case", [WHOLE, KEPT], ids=["whole", "kept"])


def total(found):
    """A function of logprobs and entropies in which each has another gradient."""
    logprobs, entropy = found
    return logprobs.sum() + 0.3 * entropy.square().sum()


def example():
    """Logits of 15 rows."""
    return torch.randn(15, COLUMNS, generator=torch.Generator().manual_seed(0)) * 3


def assert_near(found, compute, logits, *arguments):
    """`found` are the results of `compute` in float64, up to the error that it has in float32."""
    for ours, single, exact in zip(
        found, compute(logits, *arguments), compute(logits.double(), *arguments), strict=True
    ):
        bound = numerics.FACTOR * numerics.error(single.detach(), exact.detach())
        numerics.assert_within((ours.detach() - exact.detach()).abs().max().item(), bound)


@both_cases
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_their_gradients_equal_those_of_log_softmax(case, temperature):
    logits = example()
    ours = logits.clone().requires_grad_()
    found = case.ours(ours, temperature=temperature)
    total(found).backward()
    assert_near(found, case.reference, logits, temperature)
    assert_near((ours.grad,), case.reference_gradient, logits, temperature)
    assert torch.equal(ours, logits)
    if case.kept is not None:
        inside = torch.zeros_like(logits, dtype=torch.bool)
        for row, ids in zip(case.rows, case.kept, strict=True):
            inside[row, ids] = len(ids) > 1
        assert torch.equal(ours.grad != 0, inside)


@both_cases
def test_gradients_of_logprobs_and_entropy_are_the_derivative(case, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # gradcheck needs the float64 it gives
    logits = example().double().requires_grad_()
    assert torch.autograd.gradcheck(case.ours, (logits,))
    assert torch.autograd.gradcheck(lambda z: case.ours(z)[0], (logits,))
    assert torch.autograd.gradcheck(lambda z: case.ours(z)[1], (logits,))


@both_cases
def test_entropy_is_zero_if_only_logprobs_are_wanted(case):
    logprobs, entropy = case.ours(example(), with_entropy=False)
    assert not entropy.any()
    assert torch.equal(logprobs, case.ours(example())[0])


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


@both_cases
def test_logprobs_of_a_vocabulary_split_over_ranks_are_the_same(case, monkeypatch):
    logits = example()
    group, results = ThreadGroup(2), {}
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)

    def run(rank):
        group.local.rank = rank
        # 6 + 5 columns: the second rank has one of padding, which the whole vocabulary does without.
        part = logits[:, 6 * rank : 6 * rank + 6]
        if case.kept is not None and rank == 1:
            part = torch.nn.functional.pad(part, (0, 1), value=50.0)
        part = part.clone().requires_grad_()
        found = case.ours(part, columns=6 - rank, group=group)
        # Autograd would run both backward passes on one thread; they need no exchange.
        results[rank] = (*found, torch.autograd.grad(total(found), part)[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        assert_near(results[rank][:2], case.reference, logits)
    gradient = torch.cat([results[0][2], results[1][2]], -1)
    assert_near((gradient[:, :COLUMNS],), case.reference_gradient, logits)
    assert not gradient[:, COLUMNS:].any()


def test_kept_tokens_are_of_the_positions_that_were_cut():
    kept = KeptTokens.of(torch.tensor([2, 0, 1]), torch.tensor([3, 7, 5]))
    assert (kept.cut.tolist(), kept.whole.tolist(), kept.counts.tolist()) == ([0, 2], [1], [2, 1])
    assert kept.num_containing(torch.tensor([7, 9, 4])) == 1
    assert KeptTokens.of(torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) is None


def test_logprobs_are_computed_without_a_copy_of_all_logits(monkeypatch):
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
