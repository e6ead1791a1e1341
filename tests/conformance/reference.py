"""The reference of an engine: one float64 forward of transformers over the trajectory, and how close is equal.

How close is up to the trajectory: transformers makes the same forward in float32, too, and is as far from float64 as
float32 is on these tokens (up to 6e-5 in Qwen3-MoE, up to 3e-4 in Mixtral). `tests/helpers/numerics.py` says how much
farther an engine may be. One row that is not forced changes 4e-2 or more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from tests.helpers import numerics


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Logprobs and routing of a trajectory."""

    logprobs: np.ndarray[Any, Any]
    """float64 [T - 1, vocab]: row p is the distribution of token p + 1 at temperature 1."""
    experts: np.ndarray[Any, Any]
    """int [T, moe_layers, top_k]: ascending ids."""
    margins: np.ndarray[Any, Any]
    """float [T, moe_layers]: difference between the scores of the last chosen and the first rejected expert."""
    logprob_bound: float
    """How far a float32 implementation may be from `logprobs`."""
    score_errors: np.ndarray[Any, Any]
    """float [T, moe_layers]: how far the scores of float32 transformers are from those in float64."""


def reference(model: Any, token_ids: np.ndarray[Any, Any], *, forced: Any = None) -> Reference:
    """Forward `token_ids` int32 [T] through a transformers model whose routers return (logits, weights, indices).

    forced: int [T', moe_layers, top_k] or None, the experts of positions 0..T'-1; -1 and later positions route freely.
    """
    return reference_of_parts([(model, len(token_ids))], token_ids, forced=forced)


def reference_of_parts(
    parts: Sequence[tuple[Any, int]], token_ids: np.ndarray[Any, Any], *, forced: Any = None
) -> Reference:
    """As `reference`, of a trajectory whose weights changed on the way while its K/V stayed.

    parts: (model, end) in order; each model forwards the positions up to `end` on the K/V that the ones before it left.
    """
    with numerics.float64_forward():
        logits, layers = _forward([(_float64_of(model), end) for model, end in parts], token_ids, forced)
    experts = _table([[layer.experts for layer in part] for part in layers], shape=(len(token_ids), 0, 0))
    logits_32, layers_32 = _forward(parts, token_ids, experts)
    logprobs, logprobs_32 = (torch.log_softmax(each[:-1].double(), -1) for each in (logits, logits_32))
    scores, scores_32 = (
        _table([[layer.scores for layer in part] for part in each], shape=(len(token_ids), 0, 1))
        for each in (layers, layers_32)
    )
    return Reference(
        logprobs=logprobs.numpy(),
        experts=experts,
        margins=_table([[layer.margins for layer in part] for part in layers], shape=(len(token_ids), 0)),
        logprob_bound=numerics.FACTOR * numerics.error(logprobs_32, logprobs),
        score_errors=np.abs(scores_32 - scores).max(-1),
    )


def _forward(
    parts: Sequence[tuple[Any, int]], token_ids: np.ndarray[Any, Any], forced: Any
) -> tuple[torch.Tensor, list[list[RoutedLayer]]]:
    """Logits [T, vocab], and the routers of each part in the order of the layers."""
    logits: list[torch.Tensor] = []
    seen: list[list[RoutedLayer]] = []
    cache, start = None, 0
    for model, end in parts:
        if end == start:
            continue
        ids = torch.from_numpy(token_ids[start:end].astype(np.int64))[None]
        with torch.no_grad(), watched_routers(model, None if forced is None else forced[start:end]) as layers:
            output = model(ids, past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, end
        logits.append(output.logits[0])
        seen.append(layers)
    return torch.cat(logits), seen


_FLOAT64: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _float64_of(model: Any) -> Any:
    if model not in _FLOAT64:
        _FLOAT64[model] = numerics.float64_model(model)
    return _FLOAT64[model]


def logprob_gap(
    expected: Reference, token_ids: np.ndarray[Any, Any], logprobs: Any, *, start: int, settled: int | None = None
) -> float:
    """Largest |difference| for the tokens from position `start` on, which the engine gave `logprobs`, over its bound.

    settled: from `settled_rows`; tokens that a later row predicts do not count.
    """
    gaps = logprob_differences(expected, token_ids, logprobs, start=start) / expected.logprob_bound
    return float(gaps[: None if settled is None else max(0, settled + 1 - start)].max(initial=0.0))


def gap_with_rows(
    expected: Reference, token_ids: np.ndarray[Any, Any], logprobs: Any, experts: Any, *, start: int, first_row: int
) -> float:
    """`logprob_gap` before the first numerical tie that the engine decided the other way.

    Infinite if a row of `experts` before it differs. experts: [rows, moe_layers, top_k] from position `first_row` on.
    """
    settled = settled_rows(expected, experts, start=first_row)
    if routing_mismatches(expected, experts, start=first_row, settled=settled):
        return np.inf
    return logprob_gap(expected, token_ids, logprobs, start=start, settled=settled)


def routing_mismatches(expected: Reference, experts: Any, *, start: int, settled: int | None = None) -> int:
    """Entries (position, layer) of `experts` [rows, moe_layers, top_k] from position `start` on that choose otherwise.

    Numerical ties, and rows after them, do not count. settled: from `settled_rows`, if more rows are known.
    """
    if settled is None:
        settled = settled_rows(expected, experts, start=start)
    return int(differing_rows(expected, experts, start=start)[: max(0, settled - start)].sum())


def settled_rows(expected: Reference, experts: np.ndarray[Any, Any], *, start: int) -> int:
    """Rows before the first numerical tie that the engine decided the other way; later rows may be right and differ.

    experts: [rows, moe_layers, top_k] of the engine from position `start` on. A close tie before `start`, not
    seen, counts as decided the other way.
    """
    # Two scores of an engine may each be off as much as anywhere in the trajectory; before `start`, as much as there.
    margins, errors = expected.margins[: start + len(experts)], expected.score_errors
    tie = margins <= 2 * numerics.FACTOR * errors.max(initial=0.0)
    tie[:start] = margins[:start] <= 2 * numerics.FACTOR * errors[:start]
    tie[start:] &= differing_rows(expected, experts, start=start)
    found = np.flatnonzero(tie.any(-1))
    return int(found[0]) if len(found) else start + len(experts)


def logprob_differences(
    expected: Reference, token_ids: np.ndarray[Any, Any], logprobs: Any, *, start: int
) -> np.ndarray[Any, Any]:
    """float64 [len(logprobs)], |difference| of each."""
    at = np.arange(start, start + len(logprobs))
    return np.abs(expected.logprobs[at - 1, token_ids[at]] - logprobs)


def differing_rows(expected: Reference, experts: np.ndarray[Any, Any], *, start: int) -> np.ndarray[Any, Any]:
    """bool [rows, moe_layers]: whether `experts`, from position `start` on, are others than those of the reference."""
    return (np.sort(experts.astype(np.int64), -1) != expected.experts[start : start + len(experts)]).any(-1)


def _table(parts: list[list[np.ndarray[Any, Any]]], *, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Layers [T, ...] of every part as [T, moe_layers, ...]; of `shape` for a model without experts."""
    return np.concatenate([np.stack(layers, axis=1) for layers in parts]) if parts[0] else np.zeros(shape)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedLayer:
    """One router in one forward pass: experts int [T, top_k] ascending, margins float [T], scores [T, experts]."""

    experts: np.ndarray[Any, Any]
    margins: np.ndarray[Any, Any]
    scores: np.ndarray[Any, Any]


@contextmanager
def watched_routers(model: Any, forced: Any) -> Generator[list[RoutedLayer]]:
    """Every router of `model` inside the block, in the order of the layers, with `forced` in place of its choice."""
    seen: list[RoutedLayer] = []

    def watch(router: Any, _inputs: Any, output: Any) -> Any:
        logits, weights, experts = output
        margins = _margins(logits.detach(), experts)
        if forced is not None:
            rows = torch.from_numpy(np.asarray(forced)[:, len(seen)].astype(np.int64))
            rows = torch.cat([rows, rows.new_full((len(experts) - len(rows), rows.shape[1]), -1)])
            free = (rows < 0).any(-1, keepdim=True)
            experts = torch.where(free, experts, rows)
            weights = torch.where(free, weights, _gate_weights(router, logits, experts).to(weights.dtype))
            margins = torch.where(free[:, 0], margins, torch.inf)
        scores = logits.detach().double().numpy()
        seen.append(RoutedLayer(np.sort(experts.numpy(), -1), margins.numpy(), scores))
        return logits, weights, experts

    hooks = [router.register_forward_hook(watch) for router in routers_of(model)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def routers_of(model: Any) -> list[Any]:
    """The routers of a transformers model, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def _gate_weights(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Weights [T, top_k] of given experts, by the equations of the papers."""
    # DeepSeek-V3 and GLM-4.5: sigmoid scores; their bias steers the choice alone.
    sigmoid = hasattr(router, "e_score_correction_bias")
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    weights = scores.gather(1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always norms
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def _margins(scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    taken = torch.gather(scores, 1, indices)
    rest = scores.scatter(1, indices, float("-inf"))
    return (taken.min(-1).values - rest.max(-1).values).abs()
