"""Which faster ways of megatron are used, by layout and device. This module must not import megatron.

Not used:

    overlap_param_gather        a publish reads all weights right after the update, and would wait for the gather
    moe_router_fusion           bypasses router replay
    cross_entropy_loss_fusion   the loss is a function of logprobs and entropies; see `loss/logprobs.py`
    other token dispatchers     allgather does not take micro-batches of different sizes over a pipeline, and flex
                                needs DeepEP
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.trainer.model.model import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What a rank computes with."""

    cuda: bool = False
    """Whether the device is a GPU."""
    fused_permutation: bool = False
    """Whether Transformer Engine has kernels that permute tokens (2.1 or later)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPaths:
    """Settings of megatron, by its names."""

    overlap_grad_reduce: bool
    """Sum gradients over ranks in buckets, while the last backward pass of an update runs."""
    moe_permute_fusion: bool
    """One kernel that orders tokens by expert."""
    bias_activation_fusion: bool
    """SwiGLU is compiled, and its backward pass needs only its input."""


def fast_paths(config: TrainerConfig, *, platform: Platform, swiglu: bool) -> FastPaths:
    """The faster ways for a rank.

    2 ranks with tensor=2 and expert_tensor=1 have the same experts, whose gradients are summed: they overlap.

    Args:
        config: layout.
        platform: hardware and kernels of the rank.
        swiglu: whether the MLPs of the model are SwiGLU without biases.
    """
    parallel = config.parallel
    copies = config.ranks // (parallel.tensor * parallel.pipeline)
    copies_of_experts = config.ranks // (parallel.expert * parallel.expert_tensor_size * parallel.pipeline)
    return FastPaths(
        overlap_grad_reduce=max(copies, copies_of_experts) > 1,
        moe_permute_fusion=platform.cuda and platform.fused_permutation,
        bias_activation_fusion=platform.cuda and swiglu,  # on a CPU it is not compiled, and slower
    )
