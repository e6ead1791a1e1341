"""Attention of the last tokens of a sequence to its tokens so far, without a tensor of queries x keys.

With 2 queries and 5 keys the queries are those of the tokens 3 and 4; token 3 attends to the keys 0 to 3. Torch's fused
kernels hold a part of the scores at a time. A mask for the whole would be a tensor of queries x keys, so there is none:

    GPU      the kernels know this causality
    CPU      the mask is a view of queries + keys numbers
    window   blocks of queries attend to the keys in reach, with a mask for a block
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

BLOCK = 1024
"""Queries in a block of a layer with a window."""
SINK_CHANNELS = 8  # one is needed; kernels for GPUs need multiples of 8


def attend_to_prefix(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention [sequences, heads, queries, value channels]; the last query is that of the last key.

    Args:
        q: [sequences, heads, queries, channels].
        k: [sequences, key-value heads, keys, channels], with keys >= queries.
        v: [sequences, key-value heads, keys, value channels].
        scale: factor of the scores.
        window: number of keys that a query attends to, its own included; None for all. With 3, token 5 attends to the
            tokens 3, 4 and 5.
        sinks: [heads], a score for each head that takes part in the softmax without a value; None for no such scores.
    """
    queries, keys = q.shape[2], k.shape[2]
    if window is None or keys <= window:
        return _attend(q, k, v, scale=scale, sinks=sinks, mask=None)
    mask_of = functools.cache(functools.partial(_window_mask, q, window=window, has_sinks=sinks is not None))
    parts: list[Tensor] = []
    end = keys - queries
    for block in q.split(BLOCK, dim=2):
        start, end = max(end - window + 1, 0), end + block.shape[2]
        mask = mask_of(block.shape[2], end - start)
        parts.append(_attend(block, k[:, :, start:end], v[:, :, start:end], scale=scale, sinks=sinks, mask=mask))
    return torch.cat(parts, dim=2)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add a key in front whose score is the sink of the query's head and whose value is 0, and the channels for it.

    q = (a, b), k = ((c, d),) and a sink s become q = (a, b, s), k = ((0, 0, 1), (c, d, 0)), with the scores s and
    ac + bd.

    Args:
        q: [sequences, heads, queries, channels].
        k: [sequences, key-value heads, keys, channels], as v.
        sinks: [heads], divided by the scale of the scores.
    """
    column = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    q = torch.cat((q, F.pad(column, (0, SINK_CHANNELS - 1))), dim=-1)
    k, v = (F.pad(x, (0, SINK_CHANNELS, 1, 0)) for x in (k, v))
    marked = torch.zeros(k.shape[-2:], dtype=k.dtype, device=k.device)
    marked[0, -SINK_CHANNELS] = 1.0
    return q, k + marked, v


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None, mask: Tensor | None) -> Tensor:
    if sinks is None:
        return _kernel(q, k, v, scale=scale, mask=mask)
    return _kernel(*with_sinks(q, k, v, sinks / scale), scale=scale, mask=mask)[..., :-SINK_CHANNELS]


def _kernel(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None) -> Tensor:
    """Attention with a mask [queries, keys], or causal without one, by a kernel that holds no such tensor."""
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if q.is_cuda:
        if groups > 1 and (mask is not None or q.dtype == torch.float32):  # only the flash kernels take groups of heads
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    elif v.shape[-1] < q.shape[-1]:  # the kernel of CPUs takes as many channels of values as of keys
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return _kernel(q, k, padded, scale=scale, mask=mask)[..., : v.shape[-1]]
    attend = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if mask is not None:
        return attend(q, k, v, attn_mask=mask)
    if queries == keys:
        return attend(q, k, v, is_causal=True)
    if q.is_cuda:
        return attend(q, k, v, attn_mask=causal_lower_right(queries, keys))
    return attend(q.flip(2), k, v, attn_mask=_mask_of_flipped(q, keys)).flip(2)


def _mask_of_flipped(q: Tensor, keys: int) -> Tensor:
    """Mask [queries, keys] to add to scores, for queries in reverse order: a view of queries + keys - 1 numbers.

    Query i from the end attends to key j if i + j < keys. With 2 queries and 3 keys the rows are (0, 0, 0) and
    (0, 0, -inf), views of (0, 0, 0, -inf).
    """
    line = q.new_zeros(q.shape[2] + keys - 1)
    line[keys:] = -torch.inf
    return line.as_strided((q.shape[2], keys), (1, 1))


def _window_mask(q: Tensor, queries: int, keys: int, *, window: int, has_sinks: bool) -> Tensor:
    """Mask [queries, keys] to add to scores, with a column in front for a sink. The last query is that of the last key.

    The result has the type of q, because kernels would copy a bool mask for each call.
    """
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    allowed = allowed.tril(keys - queries).triu(keys - queries - window + 1)
    mask = q.new_zeros(queries, keys).masked_fill(~allowed, -torch.inf)
    return F.pad(mask, (int(has_sinks), 0))
