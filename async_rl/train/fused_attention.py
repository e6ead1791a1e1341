"""Attention of rows by Transformer Engine's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from async_rl.batch.micro_batch import PackedRows
from async_rl.train.attention import RowModule


class FusedRowAttention(RowModule):
    """Attention by `kernel`.

    With context parallelism the kernel passes keys and values around the ranks; its ring takes of each sequence the
    two chunks that `pack_rows` gives a rank.

    Args:
        kernel: megatron's TEDotProductAttention; other arguments as for it.
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
    """The sequences over all context ranks, in megatron's terms.

    Padding counts as tokens: it is on the right, where causality keeps real tokens from seeing it, and kernels that
    cannot skip rows between sequences stay possible. Transformer Engine sees by the boundaries with and without
    padding being one object that there is nothing to skip.
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
