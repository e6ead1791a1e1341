"""What an engine must agree with: one transformers forward over the whole trajectory, and how close is equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LOGPROB_TOLERANCE = 1e-4
TIE_MARGIN = 1e-5  # two float32 implementations may rank experts differently when their scores are this close


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """logprobs: float64 [T - 1, vocab], row p is the distribution of token p + 1 at temperature 1.

    experts: int [T, moe_layers, top_k], ascending ids. margins: float [T, moe_layers], how much the scores of the last
    chosen and the first rejected expert differ.
    """

    logprobs: np.ndarray[Any, Any]
    experts: np.ndarray[Any, Any]
    margins: np.ndarray[Any, Any]


def reference(model: Any, token_ids: np.ndarray[Any, Any]) -> Reference:
    """Forward `token_ids` int32 [T] through a transformers model whose routers return (logits, weights, indices)."""
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, out: chosen.append((out[0], out[2])))
        for router in routers
    ]
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0, :-1]
    for hook in hooks:
        hook.remove()
    return Reference(
        logprobs=torch.log_softmax(logits.double(), -1).numpy(),
        experts=np.stack([np.sort(indices.numpy(), -1) for _, indices in chosen], axis=1),
        margins=np.stack([_margins(scores, indices) for scores, indices in chosen], axis=1),
    )


def logprob_gap(expected: Reference, token_ids: np.ndarray[Any, Any], logprobs: Any, *, start: int) -> float:
    """Largest |difference| for the tokens from position `start` on, which the engine gave `logprobs`."""
    at = np.arange(start, start + len(logprobs))
    return float(np.abs(expected.logprobs[at - 1, token_ids[at]] - logprobs).max())


def routing_mismatches(expected: Reference, experts: Any, *, start: int) -> int:
    """Entries (position, layer) of `experts` [rows, moe_layers, top_k] from position `start` on that choose otherwise.

    Numerical ties do not count.
    """
    at = slice(start, start + len(experts))
    differs = (np.sort(experts.astype(np.int64), -1) != expected.experts[at]).any(-1)
    return int((differs & (expected.margins[at] > TIE_MARGIN)).sum())


def _margins(scores: torch.Tensor, indices: torch.Tensor) -> np.ndarray[Any, Any]:
    taken = torch.gather(scores, 1, indices)
    rest = scores.scatter(1, indices, float("-inf"))
    return (taken.min(-1).values - rest.max(-1).values).abs().numpy()
