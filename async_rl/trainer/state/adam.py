"""Megatron's AdamW with a learning-rate schedule, and its state per weight.

The state does not depend on the parallel layout, nor on the optimizer's class. Each weight has exp_avg, exp_avg_sq
and, unless the weight is float32, its float32 value. Adam's step count is stored once, because torch's AdamW has it per
weight and other implementations have it per group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from async_rl.trainer.model.model import TrainerConfig
from async_rl.trainer.state.optimizer import OptimizerConfig
from async_rl.trainer.state.shards import Shard

_MOMENTS = ("exp_avg", "exp_avg_sq")
# One rank gathers the split state of all ranks in CPU memory and writes it.
_GATHER = {"distrib_optim_fully_reshardable_mem_efficient": True}

# Number of the optimizer -> number of the weight -> name -> shard or tensor.
State = dict[str, dict[Any, dict[str, Any]]]


class Optimizer:
    """Megatron's optimizer with a learning-rate schedule.

    Args:
        model: DDP-wrapped chunks of this rank.
        config: AdamW and schedule.
        trainer: dtype and distribution of the state.

    Attributes:
        updates: updates so far, including skipped ones.
        steps: updates so far without skipped ones: Adam's step count.

    Raises:
        ValueError: cpu_offload is set without a GPU, or megatron does not support it with these settings.
    """

    def __init__(self, model: Sequence[Any], *, config: OptimizerConfig, trainer: TrainerConfig) -> None:
        bfloat16 = trainer.dtype == "bfloat16"
        self._config = config
        self.updates = self.steps = 0
        self._model = model
        self._inner: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.min_lr,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                weight_decay=config.weight_decay,
                clip_grad=config.clip_grad,
                bf16=bfloat16,
                params_dtype=torch.bfloat16 if bfloat16 else torch.float32,
                use_distributed_optimizer=trainer.distributed_optimizer,
                **_offload(config, trainer, on_gpu=next(model[0].parameters()).is_cuda),
            ),
            list(model),
        )
        for part in self._parts():
            if isinstance(part, DistributedOptimizer):
                _number_by_group(part)
        for optimizer in (adam for part in self._parts() for adam in _adams(part)):
            # One kernel per weight, without temporaries: nine times faster on a CPU.
            if isinstance(optimizer, torch.optim.Adam):
                for group in (optimizer.defaults, *optimizer.param_groups):
                    group.update(fused=True, foreach=False)

    def zero_grad(self) -> None:
        """Set gradients to zero; call it before every update."""
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._inner.zero_grad()

    def step(self) -> tuple[float, float]:
        """Update the weights from the gradients in the buffers.

        Returns:
            (gradient norm before clipping, learning rate).

        Raises:
            FloatingPointError: the gradient is not finite; raised on all ranks, and the weights are unchanged.
        """
        lr = self._config.lr_at(self.updates)
        for group in self._inner.param_groups:
            group["lr"] = lr
            # In megatron the scheduler applies wd_mult, 0 for biases and norms.
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self._inner.prepare_grads()
        norm = float(self._inner.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of update {self.updates} is {norm}; lower optimizer.lr={self._config.lr} "
                "or check mismatch/abs_max of the previous steps"
            )
        self._inner.step()
        self.updates += 1
        self.steps += 1
        return norm, lr

    def skip(self) -> float:
        """Count an update without gradients and advance the schedule; returns the learning rate."""
        lr = self._config.lr_at(self.updates)
        self.updates += 1
        return lr

    def shards(self, weights: Mapping[str, Shard], *, loading: bool) -> State:
        """Moments and float32 weights for a checkpoint. Collective.

        Args:
            weights: `shards.model_shards` of the chunks.
            loading: whether the shards are targets of a load.
        """
        states: State = {}
        for number, part in enumerate(self._parts()):
            _create_moments(part)
            if isinstance(part, DistributedOptimizer):
                state = _split_state(part, weights, loading=loading)
            else:
                shard_of = {id(shard.data): shard for shard in weights.values()}
                state = {
                    i: {
                        name: make_sharded_optimizer_tensor(shard_of[id(weight)], tensor, f"optimizer.{name}")
                        for name, tensor in tensors.items()
                    }
                    for i, (weight, tensors) in enumerate(_state_tensors(part))
                }
            if state:
                states[str(number)] = state
        return states

    @torch.no_grad()
    def load(self, state: State, *, updates: int, steps: int) -> None:
        """Restore the optimizer from `state`, the loaded `shards`; load the weights of the chunks first."""
        for number, part in enumerate(self._parts()):
            loaded = state.get(str(number), {})  # empty if this rank has no weights in this optimizer
            if isinstance(part, DistributedOptimizer):
                _load_split_state(part, loaded)
            else:
                for i, (_, tensors) in enumerate(_state_tensors(part)):
                    for name, tensor in tensors.items():
                        tensor.copy_(loaded[i][name])
            _set_steps(part, steps)
        self.updates, self.steps = updates, steps

    def _parts(self) -> list[Any]:
        """Megatron's inner optimizers: one for dense weights, one for experts."""
        return [part for part in self._inner.chained_optimizers if part.optimizer is not None]


def _offload(config: OptimizerConfig, trainer: TrainerConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Megatron's settings for optimizer.cpu_offload."""
    if config.cpu_offload == 0:
        return {}
    if not on_gpu:
        raise ValueError(
            f"optimizer.cpu_offload is {config.cpu_offload}, but this trainer has no GPU; use cpu_offload=0"
        )
    if not trainer.distributed_optimizer or trainer.dtype != "bfloat16":
        raise ValueError(
            f"optimizer.cpu_offload is {config.cpu_offload} with trainer.dtype={trainer.dtype} and "
            f"trainer.distributed_optimizer={trainer.distributed_optimizer}; megatron offloads bfloat16 training with "
            "the distributed optimizer: set dtype=bfloat16 and distributed_optimizer=true, or use cpu_offload=0"
        )
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": config.cpu_offload,
        "use_precision_aware_optimizer": True,  # keeps the float32 weights with the moments
    }


# ---- state


def _create_moments(part: Any) -> None:
    """Create the zero moments that Adam would create at its first update."""
    for optimizer in _adams(part):
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            state = optimizer.state[parameter]
            if "exp_avg" not in state:
                state.update({name: torch.zeros_like(parameter) for name in _MOMENTS})
                if isinstance(optimizer, torch.optim.Adam):
                    state["step"] = _step(state, 0)
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_sub_optimizers_state_to_hdo()  # pyright: ignore[reportPrivateUsage]


def _step(state: Mapping[str, Tensor], steps: int) -> Tensor:
    """Step count of a weight, where the fused kernel reads it. It is not shared: torch increments it in place."""
    return torch.tensor(float(steps), device=state["exp_avg"].device)


def _set_steps(part: Any, steps: int) -> None:
    for optimizer in _adams(part):
        if isinstance(optimizer, torch.optim.Adam):
            for state in optimizer.state.values():
                state["step"] = _step(state, steps)
        else:
            for group in optimizer.param_groups:
                group["step"] = steps


def _adams(part: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that do the arithmetic: one, or with offloading one for the CPU and one for the GPU."""
    optimizer = part.optimizer
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


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


def _number_by_group(part: DistributedOptimizer) -> None:
    """Give each weight the number that its group has it under: float32 ones come first.

    Megatron numbers by buffer, and a bfloat16 model with float32 weights would save and load moments of other weights.
    """
    groups: Any = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    part.model_param_group_index_map = {
        weight: (group, place)
        for group, (float32, float16) in enumerate(groups)
        for place, weight in enumerate([*float32, *float16])
    }


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
