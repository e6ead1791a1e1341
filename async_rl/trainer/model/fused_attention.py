"""Attention over packed rows with Transformer Engine's kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from async_rl.trainer.batch.micro_batch import PackedRows
from async_rl.trainer.model.attention import RowModule, to_rows, to_slots

_BOTTOM_RIGHT = SimpleNamespace(name="padding_causal_bottom_right")
"""A mask of Transformer Engine that megatron's AttnMaskType lacks; megatron passes on the name."""


class FusedRowAttention(RowModule):
    """Attention with a kernel of Transformer Engine.

    With context parallelism the kernel passes keys and values around a ring of ranks. It expects the same two chunks of
    each sequence on a rank as `pack_rows` assigns. There are no shared prefixes then (`TrainerConfig.shares_prefixes`);
    without context parallelism the keys of their paths are gathered, as in `RowAttention`.

    Args:
        config: megatron's TransformerConfig.
        kernel: megatron's TEDotProductAttention.
        settings: further arguments of `kernel`.
    """

    def __init__(self, config: Any, *, kernel: Callable[..., Any], **settings: Any) -> None:
        super().__init__(config)
        if config.multi_latent_attention:
            settings |= {
                "k_channels": config.qk_head_dim + config.qk_pos_emb_head_dim,
                "v_channels": config.v_head_dim,
            }
        self.kernel = kernel(config=config, **settings)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        """See RowModule."""
        if rows.is_plain:
            q, k, v = (x.contiguous() for x in (query, key, value))
            packed = packed_sequences(rows)
            return cast(Tensor, self.kernel(q, k, v, None, AttnMaskType.causal, packed_seq_params=packed))
        q, k, v = to_slots(query, rows.queries), to_slots(key, rows.keys), to_slots(value, rows.keys)
        out = self.kernel(q, k, v, None, _BOTTOM_RIGHT, packed_seq_params=packed_spans(rows, device=q.device))
        return to_rows(out, rows.queries)


def packed_sequences(rows: PackedRows) -> PackedSeqParams:
    """Sequence boundaries over all context ranks as megatron's PackedSeqParams.

    Padding rows count as tokens. They are on the right, so causality keeps real tokens from attending to them, and
    kernels that cannot skip rows between sequences can be used. The boundaries with and without padding must be the
    same object: Transformer Engine then knows that there are no rows to skip.
    """
    return _packed(rows.boundaries, rows.boundaries, longest=(rows.longest, rows.longest))


def packed_spans(rows: PackedRows, *, device: torch.device) -> PackedSeqParams:
    """Boundaries of the query and key slots of each span; slots of padding count as tokens, as above."""

    def boundaries(sizes: list[int]) -> Tensor:
        return torch.tensor([0, *sizes], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)

    spans = [bucket for bucket in rows.buckets for _ in range(bucket.spans)]
    queries, keys = [span.queries for span in spans], [span.keys for span in spans]
    return _packed(boundaries(queries), boundaries(keys), longest=(max(queries), max(keys)))


def _packed(queries: Tensor, keys: Tensor, *, longest: tuple[int, int]) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=queries,
        cu_seqlens_kv=keys,
        cu_seqlens_q_padded=queries,
        cu_seqlens_kv_padded=keys,
        max_seqlen_q=longest[0],
        max_seqlen_kv=longest[1],
    )
