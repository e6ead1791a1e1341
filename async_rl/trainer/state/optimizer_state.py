"""State of megatron's optimizers per weight, independent of the parallel layout and of the optimizer class.

Each weight has exp_avg, exp_avg_sq and, unless the weight is float32, its float32 value. Adam's step count is stored
once, because torch's AdamW has it per weight and other implementations have it per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from async_rl.trainer.state.shards import Shard, shard_like, shards_by_tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
# One rank gathers the split state of all ranks in CPU memory and writes it.
_GATHER = {"distrib_optim_fully_reshardable_mem_efficient": True}

# Number of the optimizer -> number of the weight -> name -> shard or tensor.
State = dict[str, dict[Any, dict[str, Any]]]


def state_shards(parts: Sequence[Any], weights: Mapping[str, Shard], *, loading: bool) -> State:
    """Shards of the state of each optimizer. Collective.

    Args:
        parts: megatron's inner optimizers.
        weights: `shards.model_shards` of the optimized chunks.
        loading: whether the shards are targets of a load.
    """
    for part in parts:
        _create_moments(part)
    states = {
        str(number): _split_state(part, weights, loading=loading)
        if isinstance(part, DistributedOptimizer)
        else _whole_state(part, shards_by_tensor(weights))
        for number, part in enumerate(parts)
    }
    return {number: state for number, state in states.items() if state}


@torch.no_grad()
def load_state(parts: Sequence[Any], loaded: State, *, steps: int) -> None:
    """Restore the state of each optimizer; load the weights first.

    Args:
        parts: megatron's inner optimizers.
        loaded: the loaded `state_shards`.
        steps: Adam's step count.
    """
    for number, part in enumerate(parts):
        state = loaded.get(str(number), {})  # empty if this rank has no weights in this optimizer
        if isinstance(part, DistributedOptimizer):
            _load_split_state(part, state)
        else:
            for i, (_, tensors) in enumerate(_state_tensors(part)):
                for name, tensor in tensors.items():
                    tensor.copy_(state[i][name])
        _set_steps(part, steps)


def _create_moments(part: Any) -> None:
    """Create the zero moments that Adam would create at its first update."""
    for optimizer in _adams(part):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if "exp_avg" not in state:
                    state.update({name: torch.zeros_like(parameter) for name in _MOMENTS})
                    _set_step(optimizer, state, 0)
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_sub_optimizers_state_to_hdo()  # pyright: ignore[reportPrivateUsage]


def _set_steps(part: Any, steps: int) -> None:
    for optimizer in _adams(part):
        for state in optimizer.state.values():
            _set_step(optimizer, state, steps)
        for group in optimizer.param_groups:
            if not isinstance(optimizer, torch.optim.Adam):
                group["step"] = steps


def _set_step(optimizer: torch.optim.Optimizer, state: dict[str, Any], steps: int) -> None:
    if isinstance(optimizer, torch.optim.Adam):
        device = state["exp_avg"].device  # where the fused kernel reads it
        state["step"] = torch.tensor(float(steps), device=device)  # not shared: torch increments it in place


def fuse(parts: Sequence[Any]) -> None:
    """Let torch's AdamW take one kernel per weight, without temporaries: nine times faster on a CPU."""
    for part in parts:
        for optimizer in _adams(part):
            if isinstance(optimizer, torch.optim.Adam):
                for group in (optimizer.defaults, *optimizer.param_groups):
                    group.update(fused=True, foreach=False)


def _adams(part: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that do the arithmetic: one, or with offloading one for the CPU and one for the GPU."""
    optimizer = part.optimizer
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


# ---- every data-parallel rank has the complete state


def _whole_state(part: Any, weights: Mapping[int, Shard]) -> dict[Any, dict[str, Any]]:
    return {
        i: {name: shard_like(weights[id(weight)], tensor, f"optimizer.{name}") for name, tensor in tensors.items()}
        for i, (weight, tensors) in enumerate(_state_tensors(part))
    }


def _state_tensors(part: Any) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield (weight of the model, its state by name)."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        groups = [
            *zip(part.float16_groups, part.fp32_from_float16_groups, strict=True),
            *zip(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, strict=True),
        ]
    else:
        groups = [(group["params"], group["params"]) for group in part.optimizer.param_groups]
    for weights, mains in groups:
        for weight, main in zip(weights, mains, strict=True):
            tensors = {name: part.optimizer.state[main][name] for name in _MOMENTS}
            yield weight, tensors if main is weight else {**tensors, "float32": main}


# ---- the state is split over data-parallel ranks


def _split_state(part: DistributedOptimizer, weights: Mapping[str, Shard], *, loading: bool) -> dict[Any, Any]:
    """Megatron's shards, keyed by the number of a weight. Its name `param` of the float32 value is replaced."""
    state = part.sharded_param_state_fully_reshardable(dict(weights), loading, _GATHER)
    if state is None:
        return {}  # another rank writes the state
    for i, weight in enumerate(_weights_in_order(part)):
        tensors = state[i]
        if weight.dtype == torch.float32:
            del tensors["param"]  # equal to the weight
        for name, shard in tensors.items():
            stored = "float32" if name == "param" else name
            shard.key = shard.key.replace(f"optimizer.state.{name}.", f"optimizer.{stored}.", 1)
    return state


def _load_split_state(part: DistributedOptimizer, loaded: dict[Any, dict[str, Tensor]]) -> None:
    for i, weight in enumerate(_weights_in_order(part)):
        loaded[i].setdefault("param", weight.detach())
    # Megatron copies every entry in the state of a weight, but does not support `step`.
    for state in part.optimizer.state.values():
        state.pop("step", None)
    part.load_parameter_state_from_fully_reshardable(loaded)
    optimizer: Any = part.optimizer
    if isinstance(optimizer, HybridDeviceOptimizer):
        # Otherwise each part would keep the complete tensor alive that it is a view of.
        for state in optimizer.state.values():
            state.update({name: state[name].clone() for name in _MOMENTS})


def _weights_in_order(part: DistributedOptimizer) -> list[Tensor]:
    """Weights in the order of megatron's numbers in `sharded_param_state_fully_reshardable`."""
    return [weight for buffer in cast(Any, part).buffers for weight in buffer.param_index_map]
