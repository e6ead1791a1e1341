"""Logprob of given tokens and entropy from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _LogprobEntropy(torch.autograd.Function):
    """One pass over the logits; what is kept for backward is the probabilities, and the log-probabilities for entropy.

    d logprob_t / d z_j = 1[j = t] - p_j
    d entropy   / d z_j = -p_j (log p_j + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        full_columns: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        split = group is not None and group.size() > 1
        size = logits.shape[-1]
        z = logits.float()
        top = z.amax(-1, keepdim=True)
        if split:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z = z - top
        exp = z.exp()
        local = targets - (group.rank() * full_columns if split and group is not None else 0)
        elsewhere = (local < 0) | (local >= size)
        local = local.masked_fill(elsewhere, 0)
        sums = [exp.sum(-1), z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0.0)]
        if with_entropy:
            sums.append(torch.linalg.vecdot(exp, z))
        if split:
            packed = torch.stack(sums)
            dist.all_reduce(packed, group=group)
            sums = list(packed.unbind())
        total, chosen = sums[0], sums[1]
        log_total = total.log()
        entropy = log_total - sums[2] / total if with_entropy else torch.zeros_like(total)
        probs = exp.div_(total.unsqueeze(-1))
        log_probs = z.sub_(log_total.unsqueeze(-1)) if with_entropy else None
        ctx.save_for_backward(probs, log_probs, local, elsewhere, entropy)
        ctx.logits_dtype = logits.dtype
        return chosen - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        probs, log_probs, local, elsewhere, entropy = ctx.saved_tensors
        grad = torch.zeros_like(probs)
        if grad_entropy is not None and log_probs is not None:
            grad -= probs * (grad_entropy.unsqueeze(-1) * (log_probs + entropy.unsqueeze(-1)))
        if grad_logprob is not None:
            grad.addcmul_(probs, grad_logprob.unsqueeze(-1), value=-1)
            grad.scatter_add_(-1, local.unsqueeze(-1), grad_logprob.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return grad.to(ctx.logits_dtype), None, None, None, None


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    full_columns: int | None = None,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """float32 [...] logprob of `targets` and entropy in nats (zeros where not asked for), both differentiable.

    Args:
        logits: [..., V / tensor], this rank's part of the vocabulary without padding columns; not changed.
        targets: int64 [...], ids in the whole vocabulary.
        group: the tensor-parallel group; None for one rank.
        full_columns: columns of a rank with padding, which say where its ids begin; None for as many as given.
        temperature: the logits are divided by it.
    """
    if temperature != 1.0:
        logits = logits / temperature
    logprobs, entropy = _LogprobEntropy.apply(logits, targets, group, full_columns or logits.shape[-1], with_entropy)  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs, entropy
