"""Forces the experts of routers: replaces the choice of select_experts by that of a plan, with the router's weights.

Model families turn scores into gate weights in different ways. The formula is found from the router's own answer: if a
known formula gives the router's weights for the router's choice, it is used for the forced experts. If no known formula
fits, forcing fails with an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

TOLERANCE = 1e-4
PLAN = "_async_rl_plan"  # attribute of a batch: int32 [tokens, layers, top_k], -1 if the router chooses


class _Current:
    """State of the current forward pass in this process."""

    batch: Any = None
    """The batch; its attribute PLAN, if present, has the forced experts. None between passes."""
    layers_done: int = 0
    """Layers that were forced in this pass."""
    routed_layers: ClassVar[set[int]] = set()
    """Layers with experts, as seen in any forward pass."""


def free_dense_layers(rows: torch.Tensor) -> None:
    """Set `rows` [positions, layers, top_k] to -1 in dense layers; SGLang stores them as zeros."""
    if _Current.routed_layers:
        dense = sorted(set(range(rows.shape[1])) - _Current.routed_layers)
        rows[:, dense] = -1


@contextmanager
def applied(batch: Any) -> Generator[None]:
    """Apply the plan of a batch; the batch may get it during the forward pass inside the block.

    Raises:
        RuntimeError: the pass bypassed the hook in some layers, for instance in a captured CUDA graph.
    """
    _Current.batch, _Current.layers_done = batch, 0
    try:
        yield
        plan = getattr(batch, PLAN, None)
        forced = 0 if plan is None else int((plan >= 0).any(-1).any(0).sum())
        if _Current.layers_done < forced:
            raise RuntimeError(f"experts were forced in {_Current.layers_done} of {forced} layers; is a graph used?")
    finally:
        _Current.batch = None


def select_forced(
    select: Callable[..., Any], hidden_states: Any = None, router_logits: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Hook around layers.moe.topk.select_experts: replace its choice for forced tokens."""
    chosen = select(hidden_states, router_logits, *args, **kwargs)
    config, layer = args[0] if args else kwargs["topk_config"], kwargs.get("layer_id")
    plan = getattr(_Current.batch, PLAN, None)
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
    """Gate weights [tokens, top_k] of the experts `given`, by the formula that gave `weights` to the experts `chosen`.

    Args:
        logits: router logits [tokens, experts].
        chosen: ids [tokens, top_k] of the router's choice.
        weights: gate weights [tokens, top_k] of `chosen`.
        given: ids [tokens, top_k] of the forced experts.
        renormalize: whether the weights are normalized over the top-k experts.

    Raises:
        RuntimeError: no known formula gives `weights`.
    """
    for scores in (torch.softmax(logits.float(), -1), torch.sigmoid(logits.float())):
        own = _gathered(scores, chosen, renormalize=renormalize)
        scale = weights.float().sum() / own.sum()
        if bool(((own * scale - weights.float()).abs() <= TOLERANCE * scale).all()):
            return _gathered(scores, given, renormalize=renormalize) * scale
    raise RuntimeError("the router's weights are neither softmax nor sigmoid scores; its experts cannot be forced")


def _gathered(scores: torch.Tensor, ids: torch.Tensor, *, renormalize: bool) -> torch.Tensor:
    taken = scores.gather(-1, ids.long())
    return taken / taken.sum(-1, keepdim=True) if renormalize else taken
