"""Logprobs of given tokens and entropies, from hidden states and an output layer that is split over tensor ranks.

The logits of a part of the rows exist at a time. The backward pass recomputes them, so that the peak memory does
not depend on the number of tokens. The distribution is over the whole vocabulary, or over the tokens that the sampler
kept (top-p, top-k, min-p), whose logits alone are gathered, so that no mask over the vocabulary is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

ELEMENTS_AT_ONCE = 1 << 23  # 32 MiB in float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputLayer:
    """The output layer on this rank.

    A vocabulary of 9 on 2 tensor-parallel ranks is padded to 10. Rank 1 has 5 rows of the weight, and the first 4
    are the ids 5 to 8.
    """

    weight: Tensor
    """[rows, H], this rank's part of the weight with the padding of the vocabulary."""
    num_ids: int
    """Rows of the weight that are ids, without padding."""
    dtype: torch.dtype
    """Of the multiplication and the logits."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None for one rank."""

    @property
    def is_split(self) -> bool:
        """Whether other ranks have a part of the vocabulary."""
        return self.group is not None and self.group.size() > 1

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this rank for ids int64 [n] (0 for an id of another rank), and bool [n], whether it is of another.

        In the example, the ids (4, 7) are the rows (0, 2) of rank 1, and the first is of another rank.
        """
        rows = ids if self.group is None else ids - self.group.rank() * len(self.weight)
        elsewhere = (rows < 0) | (rows >= self.num_ids)
        return rows.masked_fill(elsewhere, 0), elsewhere

    def multiplied(self) -> Tensor:
        """The weight [num_ids, H] that the hidden states are multiplied with, in `dtype`."""
        weight = self.weight if self.num_ids == len(self.weight) else self.weight[: self.num_ids]
        return weight.to(self.dtype)


class _LogprobEntropy(torch.autograd.Function):
    """Saves hidden states and a few numbers per row for backward, and the logits of the last part of the rows.

    A target of another rank contributes 0 to the sum over ranks.

    d logprob_t / d z_j = (1[j = t] - p_j) / temperature
    d entropy   / d z_j = -p_j (log p_j + entropy) / temperature
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        layer: OutputLayer,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        local, elsewhere = layer.local(targets)
        logits, found = hidden, list[tuple[Tensor, ...]]()
        for part in row_parts(hidden, weight):
            logits = F.linear(hidden[part], weight)
            found += _sums(logits, local[part], temperature=temperature, with_entropy=with_entropy)
        top, chosen, total, moment = (torch.cat(columns) for columns in zip(*found, strict=True))
        if layer.is_split:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=layer.group)
            shift = (top - highest).div_(temperature)
            scale, top = shift.exp(), highest
            chosen = (chosen + shift).masked_fill_(elsewhere, 0.0)
            packed = torch.stack([chosen, total * scale, (moment + total * shift) * scale])
            dist.all_reduce(packed, group=layer.group)
            chosen, total, moment = packed.unbind()
        log_total = total.log()
        entropy = log_total - moment / total if with_entropy else torch.zeros_like(total)
        ctx.save_for_backward(hidden, weight, logits, top + temperature * log_total, local, elsewhere, entropy)
        ctx.temperature = temperature
        return chosen - log_total, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, last_logits, normaliser, local, elsewhere, entropy = ctx.saved_tensors
        zeros = torch.zeros_like(entropy)
        of_logprob, of_entropy = (zeros if g is None else g for g in (grad_logprob, grad_entropy))
        of_target = of_logprob.masked_fill(elsewhere, 0.0)
        parts = row_parts(hidden, weight)

        def of_logits() -> Iterable[Tensor]:
            for part in parts:
                logits = last_logits if part is parts[-1] else F.linear(hidden[part], weight)
                gradient = torch.empty_like(logits)
                each = (normaliser, local, entropy, of_logprob, of_entropy, of_target)
                columns = (rows_of(x[part], logits) for x in each)
                for z, out, shift, at, mean, by_logprob, by_entropy, by_target in zip(
                    rows_of(logits, logits), rows_of(gradient, logits), *columns, strict=True
                ):
                    log_probs = torch.sub(z, shift.unsqueeze(-1)).div_(ctx.temperature)
                    probs = log_probs.exp()
                    factor = by_logprob.unsqueeze(-1)
                    if grad_entropy is not None:
                        factor = log_probs.add_(mean.unsqueeze(-1)).mul_(by_entropy.unsqueeze(-1)).add_(factor)
                    z_grad = probs.mul_(factor).neg_()
                    z_grad.scatter_add_(-1, at.unsqueeze(-1), by_target.unsqueeze(-1))
                    out.copy_(z_grad.div_(ctx.temperature))
                yield gradient

        of_hidden, of_weight = through_layer(of_logits(), parts, hidden, weight, frozen=not ctx.needs_input_grad[1])
        return of_hidden, of_weight, None, None, None, None


def _sums(
    logits: Tensor, chosen: Tensor, *, temperature: float, with_entropy: bool
) -> Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield for some of the rows at a time, with y = (z - top) / temperature: top, y of `chosen`, sum of exp(y), sum
    of y exp(y), float32 [rows] each."""
    for z, at in zip(rows_of(logits, logits), rows_of(chosen, logits), strict=True):
        top = z.amax(-1).float()
        y = torch.sub(z, top.unsqueeze(-1)).div_(temperature)
        exp = y.exp()
        moment = torch.linalg.vecdot(exp, y) if with_entropy else torch.zeros_like(top)
        yield top, y.gather(-1, at.unsqueeze(-1)).squeeze(-1), exp.sum(-1), moment


def row_parts(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Parts of the rows of hidden states [n, H], whose logits exist at one time; at least one part.

    ELEMENTS_AT_ONCE logits are enough to be fast on a CPU. Each part reads the weight and adds to its gradient. With
    at least H rows these take less time than the logits, and the logits of a part are no larger than the weight.
    """
    rows = max(1, ELEMENTS_AT_ONCE // len(weight), weight.shape[1])
    return [slice(start, min(start + rows, len(hidden))) for start in range(0, max(1, len(hidden)), rows)]


def rows_of(values: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor with one entry per row of logits, so that their arithmetic in float32 needs little memory."""
    return values.split(max(1, ELEMENTS_AT_ONCE // logits.shape[1]))


def through_layer(
    of_logits: Iterable[Tensor], parts: Sequence[slice], hidden: Tensor, weight: Tensor, *, frozen: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden states and weight, None if it is frozen, from the gradient of the logits of each part."""
    of_hidden, of_weight = torch.empty_like(hidden), None
    wide = torch.promote_types(weight.dtype, torch.float32)  # sums over parts are not rounded to bfloat16
    for part, gradient in zip(parts, of_logits, strict=True):
        torch.mm(gradient, weight, out=of_hidden[part])
        if frozen:
            continue
        if of_weight is None:
            of_weight = (gradient.t() @ hidden[part]).to(wide)
        elif wide == weight.dtype:
            of_weight.addmm_(gradient.t(), hidden[part])
        else:
            of_weight += gradient.t() @ hidden[part]
    return of_hidden, None if of_weight is None else of_weight.to(weight.dtype)


def logprobs_and_entropy(
    hidden: Tensor, targets: Tensor, *, layer: OutputLayer, temperature: float = 1.0, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Logprob of `targets` and entropy of their distributions, float32 [n] in nat, both differentiable.

    Logits (0, 0, log 2) and target 2: probabilities (1/4, 1/4, 1/2), logprob -0.693, entropy 1.040.

    Args:
        hidden: [n, H], the input of the output layer for each target.
        targets: int64 [n], ids in the whole vocabulary.
        layer: the output layer.
        temperature: the logits are divided by it.
        with_entropy: if False, the entropy is all zeros.
    """
    hidden, weight = hidden.to(layer.dtype), layer.multiplied()
    return _LogprobEntropy.apply(hidden, weight, targets, layer, temperature, with_entropy)  # pyright: ignore[reportReturnType]


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

    ends: Sequence[int]
    """[c + 1] 0 and the sums of the first `counts`: the kept tokens of the positions a to b are ends[a] to ends[b]."""

    @classmethod
    def of(cls, counts: Tensor, token_ids: Tensor) -> KeptTokens | None:
        """From counts int64 [n], 0 for the whole vocabulary, and ids int64 [sum(counts)]; None if all counts are 0.

        The example above: counts (2, 0, 1), ids (3, 7, 5).
        """
        cut = counts.nonzero().squeeze(1)
        if not len(cut):
            return None
        whole = (counts == 0).nonzero().squeeze(1)
        ends = [0, *counts[cut].cumsum(0).tolist()]
        return cls(cut=cut, whole=whole, counts=counts[cut], token_ids=token_ids, ends=ends)

    def to(self, device: torch.device) -> KeptTokens:
        """A copy on `device`."""
        tensors = {name: getattr(self, name).to(device) for name in ("cut", "whole", "counts", "token_ids")}
        return replace(self, **tensors)

    def num_containing(self, targets: Tensor) -> int:
        """Number of positions in `cut` whose kept tokens include their target, for targets int64 [n]."""
        return int((self.token_ids == self.each(targets[self.cut])).sum())

    def each(self, values: Tensor) -> Tensor:
        """Repeat values [c] for each kept token: (10, 20) in the example above become (10, 10, 20)."""
        return values.repeat_interleave(self.counts, output_size=len(self.token_ids))

    def reduced(self, values: Tensor, kind: str) -> Tensor:
        """The `sum` or `max` [c] of values [sum(counts)] over the kept tokens of each position."""
        return torch.segment_reduce(values, kind, lengths=self.counts, unsafe=True)

    def places(self, part: slice, columns: Tensor, *, width: int) -> tuple[slice, Tensor]:
        """The kept tokens of the positions `part`, and their places int64 in the flattened logits of these positions.

        With width=9 and the part 0 to 2 of the example: tokens 0 to 3, places 3, 7, 14.

        Args:
            part: a part of `cut`.
            columns: int64 [sum(counts)], columns of the kept tokens in the logits.
            width: columns of the logits.
        """
        tokens = slice(self.ends[part.start], self.ends[part.stop])
        first = torch.arange(part.stop - part.start, device=columns.device) * width
        rows = first.repeat_interleave(self.counts[part], output_size=tokens.stop - tokens.start)
        return tokens, rows + columns[tokens]


class _KeptLogits(torch.autograd.Function):
    """The logits [sum(counts)] of kept tokens at `columns` of the weight. Backward does not need the other logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, columns: Tensor, kept: KeptTokens) -> Tensor:
        ctx.save_for_backward(hidden, weight, columns)
        ctx.kept = kept
        found: list[Tensor] = []
        for part in row_parts(hidden, weight):
            _, places = kept.places(part, columns, width=len(weight))
            found.append(F.linear(hidden[part], weight).flatten()[places])
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, columns = ctx.saved_tensors
        parts = row_parts(hidden, weight)

        def of_logits() -> Iterable[Tensor]:
            for part in parts:
                tokens, places = ctx.kept.places(part, columns, width=len(weight))
                out = gradient.new_zeros((part.stop - part.start) * len(weight))
                # Tokens of other ranks share the place of column 0, and add 0.
                yield out.index_add_(0, places, gradient[tokens]).view(-1, len(weight))

        of_hidden, of_weight = through_layer(of_logits(), parts, hidden, weight, frozen=not ctx.needs_input_grad[1])
        return of_hidden, of_weight, None, None


def kept_logprobs_and_entropy(
    hidden: Tensor,
    targets: Tensor,
    kept: KeptTokens,
    *,
    layer: OutputLayer,
    temperature: float = 1.0,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logprob of `targets` and entropy over the kept tokens, float32 [c] in nat. Only kept tokens have a gradient.

    With equal logits and the example of `KeptTokens`, targets (7, 5): logprobs (-0.693, 0), entropies (0.693, 0).

    Args:
        hidden: [c, H], the input of the output layer for each position in `kept.cut`.
        targets: int64 [c], ids, each among the kept tokens of its position.
        kept: the kept tokens of the positions.
        layer, temperature, with_entropy: see `logprobs_and_entropy`.
    """
    columns, elsewhere = layer.local(kept.token_ids)
    logits = cast(Tensor, _KeptLogits.apply(hidden.to(layer.dtype), layer.multiplied(), columns, kept))
    z = logits.double() / temperature  # a token of another tensor-parallel rank adds nothing to the sums of this rank
    with torch.no_grad():
        top = kept.reduced(z.masked_fill(elsewhere, -math.inf), "max")
        if layer.is_split:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=layer.group)
    y = (z - kept.each(top)).masked_fill(elsewhere, 0.0)
    exp = y.exp().masked_fill(elsewhere, 0.0)
    parts = [exp, y * (kept.token_ids == kept.each(targets)), *([exp * y] if with_entropy else [])]
    sums = torch.stack([kept.reduced(part, "sum") for part in parts])
    if layer.is_split:  # in place, so that a rank gets the gradient of its own part
        dist.all_reduce(sums.detach(), group=layer.group)
    log_total = sums[0].log()
    entropy = log_total - sums[2] / sums[0] if with_entropy else torch.zeros_like(log_total)
    return (sums[1] - log_total).float(), entropy.float()
