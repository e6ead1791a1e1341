"""Cuts the distribution as `agent_loop.engine.SamplingConfig` defines it: min-p, then top-k, then top-p of the rest.

SGLang's own backends apply top-p to the whole distribution or to the top-k tokens, and min-p last. Here the
probabilities are cut before SGLang samples, so that all backends sample from the same tokens and return the same set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sample_cut(
    sample: Callable[..., Any], sampler: Any, probs: torch.Tensor, info: Any, positions: Any, simple: bool
) -> Any:
    """Hook around Sampler._sample_from_probs: cut the probabilities first.

    Args:
        simple: whether all requests sample from the whole distribution.
    """
    if not simple:
        limit = sampler.sampling_mask_max_tokens
        probs = cut(probs, top_ks=info.top_ks, top_ps=info.top_ps, min_ps=info.min_ps, limit=limit)
    return sample(sampler, probs, info, positions, True)


def cut(
    probs: torch.Tensor, *, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, limit: int
) -> torch.Tensor:
    """The probabilities [n, vocab], 0 for tokens that are not kept; not renormalized.

    Args:
        probs: float32 [n, vocab].
        top_ks: int [n]; 1 is greedy, values from `limit` on are off.
        top_ps: float32 [n].
        min_ps: float32 [n].
        limit: most kept tokens that the server returns.
    """
    ranked, order = probs.sort(dim=-1)
    last = ranked[:, -1:]
    size = ranked.shape[1]
    counts = torch.where(top_ks >= limit, size, top_ks).clamp(max=size).long()
    least = ranked.gather(1, (size - counts).unsqueeze(1))
    ranked = ranked.masked_fill((ranked < last * min_ps.unsqueeze(1)) | (ranked < least), 0)
    mass = ranked.cumsum(-1)
    out = mass <= (1 - top_ps.unsqueeze(1)) * mass[:, -1:]
    out |= (counts == 1).unsqueeze(1)
    out[:, -1] = False
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill(out, 0))


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "sglang.srt.layers.sampler.Sampler._sample_from_probs": (sample_cut, "AROUND"),
}
