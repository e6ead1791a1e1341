"""Attention and norm modules for megatron's local spec, whose own refuse packed, context and sequence parallelism.

The forward pass sees rows: the concatenated tokens of several sequences, with batch dimension 1. Positions and
sequences of the rows travel as megatron's `packed_seq_params`. Every layer gets it, also when activations are
recomputed. Attention applies the rotary embedding itself, because it depends on these positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from async_rl.trainer.batch.chains import Chains
from async_rl.trainer.batch.micro_batch import PackedRows, Slots
from async_rl.trainer.distributed import context_group, tensor_group
from async_rl.trainer.model.prefix_attention import attend_to_prefix
from async_rl.trainer.router_replay import MicroBatchRouting


class Rotary:
    """Table of rotary angles by position, float32.

    Args:
        frequencies: float32 [dim / 2], radians per position. Channel i rotates with channel i + dim / 2.
        length: number of positions in the table.
        amplitude: factor of cosine and sine.
    """

    def __init__(self, frequencies: Tensor, *, length: int, amplitude: float = 1.0) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        cosine, sine = angles.cos() * amplitude, angles.sin() * amplitude
        self._cosine, self._signed_sine = torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cosine, signed sine) [t, 1, dim] each for positions int64 [t]; the first half of the sine is negated."""
        return self._cosine[positions].unsqueeze(1), self._signed_sine[positions].unsqueeze(1)


@dataclass(kw_only=True)
class RowContext(PackedSeqParams):
    """Properties of the rows of a micro-batch that the layers use."""

    qkv_format: str = "rows"  # pyright: ignore[reportIncompatibleVariableOverride]
    """A format that megatron does not know, so that its code treats the rows as one sequence of a batch of one."""
    rows: PackedRows
    """Positions and sequences of the rows."""
    rotary: tuple[Tensor, Tensor]
    """(cosine, signed sine) [t, 1, dim] each; see `Rotary.at`."""
    routing: MicroBatchRouting | None = None
    """Routing to record or replay; None for the live router."""
    chains: Chains | None = None
    """Chunks of the rows for layers with a recurrent state; None for a model without such layers."""


class RMSNorm(torch.nn.Module):
    """RMS norm with support for sequence parallelism: megatron sums the gradients of marked weights over ranks.

    With megatron's layernorm_zero_centered_gamma the factor is 1 + weight. It is at least float32, because bfloat16
    would round it far more than the weight.

    Raises:
        ValueError: the model has another norm.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: object) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(f"the model's normalization is {config.normalization}; only RMSNorm is supported")
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centred:
            wide = torch.promote_types(x.dtype, torch.float32)
            return self._norm(x.to(wide), 1 + self.weight.to(wide)).to(x.dtype)
        return self._norm(x, self.weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:
            return cast(Tensor, _Float32Norm.apply(x, weight, self.eps))
        return F.rms_norm(x, weight.shape, weight, self.eps)


class AllHeadsNorm(RMSNorm):
    """RMS norm over all heads together: of x [..., heads, channels], with a weight [heads * channels].

    It needs all heads on one rank.
    """

    def __init__(self, config: Any, hidden_size: int, *, heads: int, **rest: Any) -> None:
        super().__init__(config, heads * hidden_size, **rest)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


class _Float32Norm(torch.autograd.Function):
    """RMS norm with few passes over memory. On a CPU torch's own consists of many small steps.

    y = n w, n = x r, r = (mean(x^2) + eps)^-1/2;  dx = r (g - n mean(g n)), g = dy w;  dw = sum(dy n)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        n = x * r
        ctx.save_for_backward(n, r, weight)
        return n * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        n, r, weight = ctx.saved_tensors
        grad_weight = (grad * n).flatten(0, -2).sum(0)
        g = grad * weight
        mean = torch.linalg.vecdot(g, n).div_(-n.shape[-1]).unsqueeze(-1)
        return g.addcmul_(n, mean).mul_(r), grad_weight, None


class _Rotate(torch.autograd.Function):
    """x cos + swap(x) sin, where swap exchanges the halves of the last dimension. The gradient rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, signed_sine)
        return _rotate(x, cosine, signed_sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cosine, signed_sine = ctx.saved_tensors
        return _rotate(grad, cosine, -signed_sine), None, None


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first `dim` channels of x [t, heads, channels] by `rotary`, the result of Rotary.at for its rows.

    Channels (1, 0) rotated by 90 degrees become (0, 1).
    """
    width = rotary[0].shape[-1]
    if width == x.shape[-1]:
        return cast(Tensor, _Rotate.apply(x, *rotary))
    return torch.cat((cast(Tensor, _Rotate.apply(x[..., :width], *rotary)), x[..., width:]), dim=-1)


def _rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    turned = torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, dims=-1), signed_sine)
    return turned.to(x.dtype)


class _ToSlots(torch.autograd.Function):
    """Rows [rows, ...] -> slots [slots, ...]. The gradient of a row is the sum over its slots; padding has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots: Slots = ctx.slots
        if slots.first is None:
            return grad.index_select(0, slots.slot), None
        # A sum over a list of rows for each row: the order of its terms is fixed, on every device.
        summed = F.embedding_bag(slots.slot, grad.flatten(1), slots.first, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None


class _ToRows(torch.autograd.Function):
    """Query slots [slots, ...] -> rows [t, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots: Slots = ctx.slots
        return grad.new_zeros((len(slots.row), *grad.shape[1:])).index_copy_(0, slots.slot, grad), None


def to_slots(x: Tensor, slots: Slots) -> Tensor:
    """The rows [rows, ...] of each slot [slots, ...]."""
    return cast(Tensor, _ToSlots.apply(x, slots))


def to_rows(x: Tensor, slots: Slots) -> Tensor:
    """The slot of each row [t, ...], if each has one, from [slots, ...]."""
    return cast(Tensor, _ToRows.apply(x, slots))


def recomputed(module: MegatronModule, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`compute(*inputs)`, a second time in the backward pass if `recompute_modules` has core_attn."""
    config = cast(Any, module.config)
    if module.training and config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
        return cast(Tensor, tensor_parallel.checkpoint(compute, False, *inputs))
    return compute(*inputs)


class RowModule(MegatronModule):
    """Rotary embedding and `attend`, in place of megatron's core attention.

    With latent attention this module does not rotate: `LatentAttention` rotates before the key is copied to the heads.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.rotates = not config.multi_latent_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: RowContext | None = None,
    ) -> Tensor:
        """Output [t, 1, heads * value dim] from query [t, 1, heads, dim], key and value [t, 1, kv heads, own dim].

        Raises:
            ValueError: `packed_seq_params` is missing.
        """
        if packed_seq_params is None:
            raise ValueError(f"{type(self).__name__} needs packed_seq_params: a RowContext")
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        if self.rotates:
            q, k = (rotate(x, packed_seq_params.rotary) for x in (q, k))
        return self.attend(q, k, v, packed_seq_params.rows).reshape(len(q), 1, -1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        """Causal attention within each sequence: [t, heads, ...] or [t, heads * ...].

        Inputs are as in `forward`, without the batch dimension.
        """
        raise NotImplementedError


class RowAttention(RowModule):
    """Attention with torch's kernels: the rows of a span attend to the keys of their path, which are gathered.

    Spans of similar place and length form padded batches (see `AttentionBucket`). Padding is before the first query or
    behind the last, so causality keeps real tokens from attending to it. With context parallelism, keys and values of
    all ranks are gathered first.

    Some models (gpt-oss) have a sink for each head: a score that takes part in the softmax without a value. Some layers
    have a window: with 3, token 5 attends to the tokens 3, 4 and 5.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.context_group, self.tp_group = context_group(), tensor_group()
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels or config.kv_channels)

    sharded_state_dict: Any = DotProductAttention.sharded_state_dict  # sinks are split over tensor ranks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        """See RowModule."""
        if self.context_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.context_group) for x in (key, value)
            )
        query, key, value = to_slots(query, rows.queries), to_slots(key, rows.keys), to_slots(value, rows.keys)
        queries = query.split([bucket.spans * bucket.queries for bucket in rows.buckets])
        keys = [bucket.spans * bucket.keys for bucket in rows.buckets]
        parts: list[Tensor] = []
        for bucket, q, *kv in zip(rows.buckets, queries, key.split(keys), value.split(keys), strict=True):
            q, k, v = (x.unflatten(0, (bucket.spans, -1)).transpose(1, 2) for x in (q, *kv))
            parts.append(self._attend(q, k, v).transpose(1, 2).flatten(0, 1))
        return to_rows(torch.cat(parts) if len(parts) > 1 else parts[0], rows.queries)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_to_prefix(q, k, v, scale=self.scale, window=self.window, sinks=self.softmax_offset)
