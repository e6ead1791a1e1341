"""The LM head in float32 for a model in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor


def compute_head_in_float32(chunks: Sequence[GPTModel]) -> None:
    """Let the output layer multiply in float32, so that logits are not rounded to bfloat16.

    bfloat16 rounds a logit of 16 by up to 0.06, which is then the error of a logprob (MiniMax-M1, arXiv 2506.13585).
    The weight and its gradient remain bfloat16. Chunks without an output layer are unchanged.
    """
    for chunk in chunks:
        if chunk.post_process:
            layer: Any = chunk.output_layer
            layer._forward_impl = _in_float32(layer._forward_impl)


def _in_float32(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wide(*, input: Tensor, weight: Tensor, **settings: Any) -> Tensor:
        return multiply(input=input.float(), weight=weight.float(), **settings)

    return wide
