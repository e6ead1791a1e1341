"""Logprobs of given tokens and entropies from logits whose vocabulary is split over tensor-parallel ranks.

The distribution is over the whole vocabulary, or over the tokens that the sampler kept (top-p, top-k, min-p). Only the
logits of kept tokens are gathered, so that no mask over the vocabulary is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ELEMENTS_AT_ONCE = 1 << 25  # 128 MiB in float32


class _LogprobEntropy(torch.autograd.Function):
    """Processes a few rows of the logits at a time, which avoids a float32 copy of all logits.

    Saves the logits and a few numbers per row for backward, which recomputes the probabilities. A target of another
    rank contributes 0 to the sum over ranks: with 5 columns per rank, target 7 is column 2 of rank 1, and rank 0 masks
    it.

    d logprob_t / d z_j = 1[j = t] - p_j
    d entropy   / d z_j = -p_j (log p_j + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        full_columns: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        split = group is not None and group.size() > 1
        size = logits.shape[-1]
        top = torch.cat([logits[part].amax(-1) for part in _parts(rows, size)]).float() / temperature
        if split:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        local = targets - (group.rank() * full_columns if split and group is not None else 0)
        elsewhere = (local < 0) | (local >= size)
        local = local.masked_fill(elsewhere, 0)
        chosen = (logits[rows, local].float() / temperature - top).masked_fill_(elsewhere, 0.0)
        exp_sums, entropy_sums = list[Tensor](), list[Tensor]()
        for part, part_top in zip(_parts(rows, size), _parts(top, size), strict=True):
            z = logits[part].float().div_(temperature).sub_(part_top.unsqueeze(-1))
            exp = z.exp()
            exp_sums.append(exp.sum(-1))
            if with_entropy:
                entropy_sums.append(torch.linalg.vecdot(exp, z))
        sums = [torch.cat(exp_sums), chosen, *([torch.cat(entropy_sums)] if with_entropy else [])]
        if split:
            packed = torch.stack(sums)
            dist.all_reduce(packed, group=group)
            sums = list(packed.unbind())
        total, chosen = sums[0], sums[1]
        log_total = total.log()
        entropy = log_total - sums[2] / total if with_entropy else torch.zeros_like(total)
        ctx.save_for_backward(logits, rows, top + log_total, local, elsewhere, entropy)
        ctx.temperature = temperature
        return chosen - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, rows, log_total, local, elsewhere, entropy = ctx.saved_tensors
        size, grad = logits.shape[-1], torch.zeros_like(logits)
        zeros = torch.zeros_like(log_total)
        each = (
            rows,
            log_total,
            local,
            elsewhere,
            entropy,
            *(zeros if g is None else g for g in (grad_logprob, grad_entropy)),
        )
        for part, shift, at, absent, mean, of_logprob, of_entropy in zip(*(_parts(x, size) for x in each), strict=True):
            log_probs = logits[part].float().div_(ctx.temperature).sub_(shift.unsqueeze(-1))
            probs = log_probs.exp()
            weight = of_logprob.unsqueeze(-1)
            if grad_entropy is not None:
                weight = log_probs.add_(mean.unsqueeze(-1)).mul_(of_entropy.unsqueeze(-1)).add_(weight)
            z_grad = probs.mul_(weight).neg_()
            z_grad.scatter_add_(-1, at.unsqueeze(-1), of_logprob.masked_fill(absent, 0.0).unsqueeze(-1))
            grad[part] = z_grad.div_(ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None, None, None


def _parts(rows: Tensor, columns: int) -> tuple[Tensor, ...]:
    """Split a tensor with one entry per row of logits into parts of at most ELEMENTS_AT_ONCE logits."""
    return rows.split(max(1, ELEMENTS_AT_ONCE // columns))


def logprobs_and_entropy(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    full_columns: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logprob of `targets` and entropy of their distributions, float32 [n] in nat, both differentiable.

    Logits (0, 0, log 2) and target 2: probabilities (1/4, 1/4, 1/2), logprob -0.693, entropy 1.040.

    Args:
        logits: [t, V / tensor], this rank's part of the vocabulary without padding columns; not changed.
        rows: int64 [n], the row of logits of each target, each at most once.
        targets: int64 [n], ids in the whole vocabulary.
        group: the tensor-parallel group; None for one rank.
        full_columns: columns per rank including padding; the first id of a rank is its rank times this. None for
            logits without padding.
        temperature: the logits are divided by it.
        with_entropy: if False, the entropy is all zeros.
    """
    columns = full_columns or logits.shape[-1]
    return _LogprobEntropy.apply(logits, rows, targets, group, columns, temperature, with_entropy)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTokens:
    """The tokens that the sampler kept at n positions. It cut the distribution at c positions.

    position   kept      cut      whole   counts   token_ids
    0          {3, 7}    0, 2     1       2, 1     3, 7, 5
    1          all
    2          {5}
    """

    cut: Tensor
    """int64 [c], the positions where the distribution was cut, ascending."""

    whole: Tensor
    """int64 [n - c], the positions with the whole vocabulary, ascending."""

    counts: Tensor
    """int64 [c], kept tokens of each position in `cut`, at least 1."""

    token_ids: Tensor
    """int64 [sum(counts)], their ids in the whole vocabulary, ascending within a position."""

    @classmethod
    def of(cls, counts: Tensor, token_ids: Tensor) -> KeptTokens | None:
        """From counts int64 [n], 0 for the whole vocabulary, and ids int64 [sum(counts)]; None if all counts are 0.

        The example above: counts (2, 0, 1), ids (3, 7, 5).
        """
        cut = counts.nonzero().squeeze(1)
        if not len(cut):
            return None
        whole = (counts == 0).nonzero().squeeze(1)
        return cls(cut=cut, whole=whole, counts=counts[cut], token_ids=token_ids)

    def to(self, device: torch.device) -> KeptTokens:
        """A copy on `device`."""
        return KeptTokens(
            cut=self.cut.to(device),
            whole=self.whole.to(device),
            counts=self.counts.to(device),
            token_ids=self.token_ids.to(device),
        )

    def num_containing(self, targets: Tensor) -> int:
        """Number of positions in `cut` whose kept tokens include their target, for targets int64 [n]."""
        return int((self.token_ids == self.each(targets[self.cut])).sum())

    def each(self, values: Tensor) -> Tensor:
        """Repeat values [c] for each kept token: (10, 20) in the example above become (10, 10, 20)."""
        return values.repeat_interleave(self.counts, output_size=len(self.token_ids))


class _KeptLogprobEntropy(torch.autograd.Function):
    """As `_LogprobEntropy`, from the logits z [sum(counts)] of kept tokens, in float64.

    A token of another tensor-parallel rank has z = -inf and no gradient on this rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        is_target: Tensor,
        kept: KeptTokens,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        split = group is not None and group.size() > 1
        top = torch.segment_reduce(z, "max", lengths=kept.counts, unsafe=True)
        if split:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z = z - kept.each(top)
        exp = z.exp()
        z = z.masked_fill_(z == -math.inf, 0.0)
        parts = [exp, z * is_target, *([exp * z] if with_entropy else [])]
        sums = [torch.segment_reduce(part, "sum", lengths=kept.counts, unsafe=True) for part in parts]
        if split:
            packed = torch.stack(sums)
            dist.all_reduce(packed, group=group)
            sums = list(packed.unbind())
        total, chosen = sums[0], sums[1]
        log_total = total.log()
        entropy = log_total - sums[2] / total if with_entropy else torch.zeros_like(total)
        ctx.save_for_backward(exp / kept.each(total), z - kept.each(log_total), is_target, entropy)
        ctx.kept = kept
        return chosen - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        probs, log_probs, is_target, entropy = ctx.saved_tensors
        each, grad = ctx.kept.each, torch.zeros_like(probs)
        if grad_entropy is not None:
            grad -= each(grad_entropy) * probs * (log_probs + each(entropy))
        if grad_logprob is not None:
            grad += each(grad_logprob) * (is_target.to(probs.dtype) - probs)
        return grad, None, None, None, None


def kept_logprobs_and_entropy(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    kept: KeptTokens,
    *,
    columns: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logprob of `targets` and entropy over the kept tokens, float32 [c] in nat. Only kept tokens have a gradient.

    With equal logits and the example of `KeptTokens`, targets (7, 5): logprobs (-0.693, 0), entropies (0.693, 0).

    Args:
        logits: [t, W], this rank's part of the vocabulary with padding columns; not changed.
        rows: int64 [c], the row of logits of each position in `kept.cut`.
        targets: int64 [c], ids, each among the kept tokens of its position.
        kept: the kept tokens of the positions.
        columns: columns of this rank that are ids of the vocabulary, without padding.
        group, temperature, with_entropy: see `logprobs_and_entropy`.
    """
    width = logits.shape[-1]
    local = kept.token_ids - (group.rank() * width if group is not None and group.size() > 1 else 0)
    elsewhere = (local < 0) | (local >= columns)
    places = kept.each(rows) * width + local.masked_fill(elsewhere, 0)
    z = logits.reshape(-1).gather(0, places).double().masked_fill(elsewhere, -math.inf) / temperature
    is_target = kept.token_ids == kept.each(targets)
    logprobs, entropy = _KeptLogprobEntropy.apply(z, is_target, kept, group, with_entropy)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs.float(), entropy.float()
