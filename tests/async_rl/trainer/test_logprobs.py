"""Logprob and entropy of split vocabularies, whole or of the tokens that the sampler kept, against log_softmax."""

import threading
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from async_rl.trainer.loss.logprobs import KeptTokens, OutputLayer, kept_logprobs_and_entropy, logprobs_and_entropy
from tests.helpers import numerics
from tests.helpers.thread_group import ThreadGroup

pytestmark = [pytest.mark.numerics, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

COLUMNS, SIZE = 11, 3


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    """The logits of 3 rows, as many as hidden units, exist at a time, and 2 are worked on: 7 rows are 3 + 3 + 1."""
    monkeypatch.setattr("async_rl.trainer.loss.logprobs.ELEMENTS_AT_ONCE", 2 * COLUMNS)


@dataclass(frozen=True)
class Case:
    """Positions in a loss. kept: tokens that the sampler kept for each; None for the whole vocabulary."""

    rows: list[int]
    targets: list[int]
    kept: list[list[int]] | None = None

    def ours(self, hidden, weight, *, ids=COLUMNS, group=None, **options):
        """Logprobs and entropy by the functions under test; `ids` rows of the weight are no padding."""
        layer = OutputLayer(weight=weight, num_ids=ids, dtype=weight.dtype, group=group)
        rows, targets = hidden[self.rows], torch.tensor(self.targets)
        if self.kept is None:
            return logprobs_and_entropy(rows, targets, layer=layer, **options)
        kept = KeptTokens.of(torch.tensor([len(ids) for ids in self.kept]), torch.tensor([*chain(*self.kept)]))
        return kept_logprobs_and_entropy(rows, targets, kept, layer=layer, **options)

    def reference(self, hidden, weight, temperature=1.0):
        """Logprobs and entropy by log_softmax."""
        scores = (hidden @ weight.T)[self.rows] / temperature
        outside = torch.zeros_like(scores, dtype=torch.bool)
        if self.kept is not None:
            outside[:] = True
            for row, ids in zip(outside, self.kept, strict=True):
                row[ids] = False
        scores = scores.masked_fill(outside, -torch.inf).log_softmax(-1)
        entropy = -(scores.exp() * scores.masked_fill(outside, 0.0)).sum(-1)
        return scores.gather(-1, torch.tensor(self.targets).unsqueeze(-1)).squeeze(-1), entropy

    def gradients(self, hidden, weight, temperature=1.0):
        """Gradients of `total` of the reference by hidden states and weight."""
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        return torch.autograd.grad(total(self.reference(*inputs, temperature)), inputs)


WHOLE = Case(rows=[3, 0, 14, 9, 10, 1, 7], targets=[4, 0, 10, 5, 6, 7, 2])  # of 15 rows; any order, not all
# Kept: one token, all on one rank of two, on both, the last id.
KEPT = Case(rows=[6, 0, 2, 9], targets=[4, 3, 7, 10], kept=[[4], [1, 3, 5], [0, 2, 6, 7], [5, 9, 10]])
both_cases = pytest.mark.parametrize("case", [WHOLE, KEPT], ids=["whole", "kept"])


def total(found):
    """A function of logprobs and entropies that gives each another gradient."""
    logprobs, entropy = found
    return logprobs.sum() + 0.3 * entropy.square().sum()


def example():
    """Hidden states of 15 rows, and the weight of an output layer."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(15, SIZE, generator=generator) * 2, torch.randn(COLUMNS, SIZE, generator=generator)


def assert_near(found, compute, inputs, *arguments):
    """`found` are the results of `compute` in float64, up to the error that it has in float32."""
    exact_inputs = [tensor.double() for tensor in inputs]
    for ours, single, exact in zip(
        found, compute(*inputs, *arguments), compute(*exact_inputs, *arguments), strict=True
    ):
        bound = numerics.FACTOR * numerics.error(single.detach(), exact.detach())
        numerics.assert_within((ours.detach() - exact.detach()).abs().max().item(), bound)


@both_cases
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_their_gradients_equal_those_of_log_softmax(case, temperature):
    inputs = example()
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    found = case.ours(*ours, temperature=temperature)
    gradients = torch.autograd.grad(total(found), ours)
    assert_near(found, case.reference, inputs, temperature)
    assert_near(gradients, case.gradients, inputs, temperature)


@both_cases
def test_gradients_of_logprobs_and_entropy_are_the_derivative(case, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)  # gradcheck needs the float64 it gives
    inputs = tuple(tensor.double().requires_grad_() for tensor in example())
    assert torch.autograd.gradcheck(case.ours, inputs)
    assert torch.autograd.gradcheck(lambda *given: case.ours(*given)[0], inputs)
    assert torch.autograd.gradcheck(lambda *given: case.ours(*given)[1], inputs)


@both_cases
def test_entropy_is_zero_if_only_logprobs_are_wanted(case):
    logprobs, entropy = case.ours(*example(), with_entropy=False)
    assert not entropy.any()
    assert torch.equal(logprobs, case.ours(*example())[0])


@both_cases
def test_a_frozen_output_layer_has_no_gradient(case):
    hidden, weight = example()
    for frozen in (False, True):
        ours = hidden.clone().requires_grad_()
        total(case.ours(ours, weight.clone().requires_grad_(not frozen))).backward()
        assert_near((ours.grad,), lambda *given: case.gradients(*given)[:1], (hidden, weight))


@both_cases
def test_logprobs_of_a_vocabulary_split_over_ranks_are_the_same(case, monkeypatch):
    hidden, weight = example()
    group, results = ThreadGroup(2), {}
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)

    def run(rank):
        group.local.rank = rank
        # 6 + 5 ids: the second rank has a row of padding.
        part = torch.nn.functional.pad(weight[6 * rank : 6 * rank + 6], (0, 0, 0, rank), value=50.0)
        inputs = [hidden.clone().requires_grad_(), part.clone().requires_grad_()]
        found = case.ours(*inputs, ids=6 - rank, group=group)
        # Autograd would run both backward passes on one thread; they need no exchange.
        results[rank] = (*found, *torch.autograd.grad(total(found), inputs))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rank in range(2):
        assert_near(results[rank][:2], case.reference, (hidden, weight))
    of_weight = torch.cat([results[0][3], results[1][3]])
    assert_near((results[0][2] + results[1][2], of_weight[:COLUMNS]), case.gradients, (hidden, weight))
    assert not of_weight[COLUMNS:].any()


def test_kept_tokens_are_of_the_positions_that_were_cut():
    kept = KeptTokens.of(torch.tensor([2, 0, 1]), torch.tensor([3, 7, 5]))
    assert (kept.cut.tolist(), kept.whole.tolist(), kept.counts.tolist()) == ([0, 2], [1], [2, 1])
    assert kept.num_containing(torch.tensor([7, 9, 4])) == 1
    assert KeptTokens.of(torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) is None


@pytest.mark.parametrize("kept", [None, [[0, 7]] * 400], ids=["whole", "kept"])
def test_the_logits_of_a_few_rows_exist_at_a_time(kept, monkeypatch):
    from tests.parallel.ranks import LiveTensors  # imports megatron

    hidden, weight = (torch.randn(rows, 4).bfloat16().requires_grad_() for rows in (400, 200))
    case, at_once = Case(rows=[*range(400)], targets=[0] * 400, kept=kept), 4 * 200
    monkeypatch.setattr("async_rl.trainer.loss.logprobs.ELEMENTS_AT_ONCE", at_once)
    limit = 8 * at_once + 64 * len(hidden)  # and 64 numbers per row
    with LiveTensors(known=[hidden, weight], limit=limit) as live:
        logprobs, entropy = case.ours(hidden, weight, ids=len(weight))
        torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert live.most <= limit < len(hidden) * len(weight) / 2
