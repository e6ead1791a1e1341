"""Gives a router its experts: replaces what select_experts chose by what a plan says, with the weights it would give.

How a family turns scores into weights is not read from its code but from its own answer: of the known formulas the one
that gives the engine's weights for the engine's choice is used for the given choice, and none means refusal.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

TOLERANCE = 1e-4


class _Current:
    """Plan of the forward pass that runs: int32 [tokens, layers, top_k], -1 where the router chooses."""

    plan: torch.Tensor | None = None
    layers_done: int = 0
    routed_layers: ClassVar[set[int]] = set()  # seen in any forward pass


def free_dense_layers(rows: torch.Tensor) -> None:
    """Set rows [positions, layers, top_k] of the layers without experts, which SGLang keeps as zeros, to -1."""
    if _Current.routed_layers:
        dense = sorted(set(range(rows.shape[1])) - _Current.routed_layers)
        rows[:, dense] = -1


@contextmanager
def applied(plan: torch.Tensor) -> Generator[None]:
    """Force `plan` in the forward pass that runs inside.

    Raises:
        RuntimeError: the pass went around the hook, as inside a captured graph, so nothing was forced.
    """
    _Current.plan, _Current.layers_done = plan, 0
    try:
        yield
        forced = int((plan >= 0).any(-1).any(0).sum())
        if _Current.layers_done < forced:
            raise RuntimeError(f"experts were forced in {_Current.layers_done} of {forced} layers; is a graph in use?")
    finally:
        _Current.plan = None


def select_forced(
    select: Callable[..., Any], hidden_states: Any = None, router_logits: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Around layers.moe.topk.select_experts."""
    chosen = select(hidden_states, router_logits, *args, **kwargs)
    config, layer, plan = args[0] if args else kwargs["topk_config"], kwargs.get("layer_id"), _Current.plan
    if layer is not None:
        _Current.routed_layers.add(layer)
    if plan is None:
        return chosen
    given = plan[:, layer]
    forced = (given >= 0).any(-1)
    if not bool(forced.any()):
        return chosen
    _Current.layers_done += 1
    if given.shape != chosen.topk_ids.shape:
        raise RuntimeError(f"layer {layer} chose {list(chosen.topk_ids.shape)}, the plan has {list(given.shape)}")
    ids, weights = chosen.topk_ids.clone(), chosen.topk_weights.clone()
    ids[forced] = given[forced].to(ids.dtype)
    weights[forced] = reweighed(
        router_logits, chosen.topk_ids, chosen.topk_weights, given=ids, renormalize=config.renormalize
    )[forced].to(weights.dtype)
    capturer: Any = importlib.import_module("sglang.srt.state_capturer.routed_experts")
    if (rows := capturer.get_global_experts_capturer()) is not None:
        rows.capture(layer_id=layer, topk_indices=ids)
    return chosen._replace(topk_ids=ids, topk_weights=weights)


def reweighed(
    logits: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, given: torch.Tensor, renormalize: bool
) -> torch.Tensor:
    """Weights of the experts `given` by the formula that gave `weights` to those `chosen`.

    Args:
        logits: [tokens, experts]. chosen, given: ids [tokens, top_k]. weights: [tokens, top_k].

    Raises:
        RuntimeError: no known formula gives `weights`.
    """
    for scores in (torch.softmax(logits.float(), -1), torch.sigmoid(logits.float())):
        own = _gathered(scores, chosen, renormalize=renormalize)
        scale = weights.float().sum() / own.sum()
        if bool(((own * scale - weights.float()).abs() <= TOLERANCE * scale).all()):
            return _gathered(scores, given, renormalize=renormalize) * scale
    raise RuntimeError("the router's weights are neither softmax nor sigmoid scores; experts cannot be forced in it")


def _gathered(scores: torch.Tensor, ids: torch.Tensor, *, renormalize: bool) -> torch.Tensor:
    taken = scores.gather(-1, ids.long())
    return taken / taken.sum(-1, keepdim=True) if renormalize else taken
