"""Makes SGLang's experts on the CPU run with expert and attention data parallelism.

SGLang gives the experts of other ranks the id -1. Its GPU kernels skip -1; its CPU version takes it for an index.
It returns the sums of experts to the groups of attention data parallelism through NCCL, absent on the CPU, and its
attention on the CPU lacks the length of the requests that pad the batch of a group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch


def forward_local(
    forward: Callable[..., torch.Tensor], layer: Any, hidden_states: torch.Tensor, chosen: Any, config: Any
) -> torch.Tensor:
    """Hook around layers.moe.fused_moe_native.moe_forward_native: leave out the experts of other ranks.

    Each pair of a token and one of its experts on this rank becomes a token with one expert.

    Args:
        hidden_states: [tokens, hidden].
        chosen: SGLang's StandardTopKOutput; its ids [tokens, top_k] are indices on this rank, -1 elsewhere.
    """
    here = chosen.topk_ids >= 0
    if bool(here.all()):
        return forward(layer, hidden_states, chosen, config)
    output, tokens = torch.zeros_like(hidden_states), here.nonzero()[:, 0]
    if len(tokens):
        pairs = chosen._replace(
            topk_ids=chosen.topk_ids[here].unsqueeze(1), topk_weights=chosen.topk_weights[here].unsqueeze(1)
        )
        output.index_add_(0, tokens, forward(layer, hidden_states[tokens], pairs, config))
    return output


def reduce_by_all(
    reduce: Callable[..., torch.Tensor],
    group: Any,
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Hook around GroupCoordinator.reduce_scatterv: sum on all ranks and take the part of this rank.

    Args:
        input_: [sum of sizes, hidden].
        output: [tokens of this rank, hidden].
    """
    del reduce
    total: torch.Tensor = group.all_reduce(input_)
    parts = total.tensor_split(group.world_size) if sizes is None else total.split(list(sizes))
    part = parts[group.rank_in_group]
    return part if output is None else output.copy_(part)


def give_padding_a_length() -> None:
    """Give requests that pad a batch the length 1, as SGLang's other attention backends do."""
    backend: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = lambda _: 1


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "sglang.srt.distributed.parallel_state.GroupCoordinator.reduce_scatterv": (reduce_by_all, "AROUND"),
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": (forward_local, "AROUND"),
}
