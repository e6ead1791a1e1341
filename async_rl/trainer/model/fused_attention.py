"""Attention over packed rows with Transformer Engine's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from async_rl.trainer.batch.micro_batch import PackedRows
from async_rl.trainer.model.attention import RowModule


class FusedRowAttention(RowModule):
    """Attention with a kernel of Transformer Engine.

    With context parallelism the kernel passes keys and values around a ring of ranks. It expects the same two chunks of
    each sequence on a rank as `pack_rows` assigns.

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
        q, k, v = (x.contiguous() for x in (query, key, value))
        return cast(Tensor, self.kernel(q, k, v, None, AttnMaskType.causal, packed_seq_params=packed_sequences(rows)))


def packed_sequences(rows: PackedRows) -> PackedSeqParams:
    """Sequence boundaries over all context ranks as megatron's PackedSeqParams.

    Padding rows count as tokens. They are on the right, so causality keeps real tokens from attending to them, and
    kernels that cannot skip rows between sequences can be used. The boundaries with and without padding must be the
    same object: Transformer Engine then knows that there are no rows to skip.
    """
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=rows.boundaries,
        cu_seqlens_kv=rows.boundaries,
        cu_seqlens_q_padded=rows.boundaries,
        cu_seqlens_kv_padded=rows.boundaries,
        max_seqlen_q=rows.longest,
        max_seqlen_kv=rows.longest,
    )
