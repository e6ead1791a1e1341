"""Logprobs of several given tokens for each row, and of all other tokens together, over a split vocabulary.

As in `async_rl.trainer.loss.logprobs`, the logits of a part of the rows exist at a time, and the backward pass
recomputes them: the peak memory does not grow with tokens x vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from async_rl.trainer.loss.logprobs import OutputLayer, row_parts, rows_of, through_layer

_LEAST = torch.finfo(torch.float32).tiny  # of the sum of the other tokens, whose logarithm is taken


class _SupportLogprobs(torch.autograd.Function):
    """Saves hidden states and a few numbers per row. p_j are the probabilities, R those outside of the given ids.

    d logprob_t / d z_j = 1[j = t] - p_j
    d rest      / d z_j = 1[j in R] p_j / sum_R p - p_j
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, layer: OutputLayer) -> Tensor:
        local, elsewhere = layer.local(ids)
        found = list[tuple[Tensor, ...]]()
        for part in row_parts(hidden, weight):
            found += _sums(F.linear(hidden[part], weight), local[part], elsewhere[part])
        top, chosen, total, rest = (torch.cat(columns) for columns in zip(*found, strict=True))
        if layer.is_split:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=layer.group)
            shift = top - highest
            top, scale = highest, shift.exp()
            chosen = (chosen + shift.unsqueeze(-1)).masked_fill_(elsewhere, 0.0)
            packed = torch.cat((chosen, torch.stack((total * scale, rest * scale), -1)), -1)
            dist.all_reduce(packed, group=layer.group)
            chosen, total, rest = packed[:, :-2], packed[:, -2], packed[:, -1]
        log_total, log_rest = total.log(), rest.clamp(min=_LEAST).log()
        ctx.save_for_backward(hidden, weight, local, elsewhere, top + log_total, log_rest - log_total)
        return torch.cat((chosen, log_rest.unsqueeze(-1)), -1) - log_total.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, local, elsewhere, normaliser, log_rest = ctx.saved_tensors
        parts, of_all = row_parts(hidden, weight), gradient.sum(-1)
        of_ids, of_rest = gradient[:, :-1].masked_fill(elsewhere, 0.0), gradient[:, -1]

        def of_logits() -> Iterable[Tensor]:
            for part in parts:
                logits = F.linear(hidden[part], weight)
                out = torch.empty_like(logits)
                each = (normaliser, local, elsewhere, log_rest, of_all, of_ids, of_rest)
                columns = (rows_of(x[part], logits) for x in each)
                for z, to, shift, at, absent, log_r, by_all, by_ids, by_rest in zip(
                    rows_of(logits, logits), rows_of(out, logits), *columns, strict=True
                ):
                    log_probs = torch.sub(z, shift.unsqueeze(-1))
                    others = _without(torch.sub(log_probs, log_r.unsqueeze(-1)).exp_(), at, absent)
                    z_grad = others.mul_(by_rest.unsqueeze(-1)).addcmul_(
                        log_probs.exp_(), by_all.unsqueeze(-1), value=-1
                    )
                    to.copy_(z_grad.scatter_add_(-1, at, by_ids))
                yield out

        of_hidden, of_weight = through_layer(of_logits(), parts, hidden, weight, frozen=not ctx.needs_input_grad[1])
        return of_hidden, of_weight, None, None


def _sums(logits: Tensor, ids: Tensor, elsewhere: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield for some of the rows at a time, with y = z - top: top, y of the ids, sum of exp(y), and that of others."""
    for z, at, absent in zip(rows_of(logits, logits), rows_of(ids, logits), rows_of(elsewhere, logits), strict=True):
        top = z.amax(-1).float()
        y = torch.sub(z, top.unsqueeze(-1))
        exp = y.exp()
        total = exp.sum(-1)
        yield top, y.gather(-1, at).masked_fill(absent, 0.0), total, _without(exp, at, absent).sum(-1)


def _without(values: Tensor, ids: Tensor, elsewhere: Tensor) -> Tensor:
    """Values [rows, V] with exact zeros at `ids` [rows, k] of this rank, in place."""
    return values.scatter_add_(-1, ids, -values.gather(-1, ids).masked_fill(elsewhere, 0.0))


def support_logprobs(hidden: Tensor, ids: Tensor, *, layer: OutputLayer) -> Tensor:
    """Logprobs float32 [n, k + 1] in nat of given tokens, the last of all other tokens together; differentiable.

    Logits (0, 0, log 2) and ids (2,): (log 1/2, log 1/2). An id that no rank has, such as -1, has a finite value
    without meaning.

    Args:
        hidden: [n, H], the input of the output layer for each row.
        ids: int64 [n, k], distinct ids in the whole vocabulary.
        layer: the output layer.
    """
    hidden, weight = hidden.to(layer.dtype), layer.multiplied()
    return cast(Tensor, _SupportLogprobs.apply(hidden, weight, ids, layer))
