"""AdamW with warm-up and decay, based on megatron's optimizer (main gradients, clipping, distributed state)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from agent_loop.bounds import bounded
from async_rl.trainer.model.model import TrainerConfig

if TYPE_CHECKING:
    from async_rl.trainer.state.optimizer_state import State


@bounded("optimizer")
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    lr=1e-3, warmup_steps=2, decay=linear, decay_steps=4: the updates 0 to 6 have 5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4,
    2.5e-4, 0.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    lr: Annotated[float, Gt(0), Lt(1)] = 1e-6
    """Learning rate after the warm-up: AdamW moves each weight by about this much per update. 1e-6 is usual for all
    weights of a language model, 1e-5 to 1e-4 with LoRA."""
    min_lr: Annotated[float, Ge(0)] = 0.0
    """Learning rate after the decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Adam's epsilon."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Of matrices; biases and norms have none."""
    clip_grad: Annotated[float, Ge(0)] = 1.0
    """Bound on the global gradient norm; 0 for no bound."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Updates over which the learning rate rises linearly."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay to min_lr."""
    decay_steps: Annotated[int, Ge(0)] = 0
    """Updates of the decay, after the warm-up."""
    cpu_offload: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share (0..1) of Adam's state and arithmetic that is moved from the GPU to the CPU."""

    def __post_init__(self) -> None:
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr is {self.min_lr}; must be in 0..lr={self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {self.betas}; need two values in [0, 1)")
        if self.decay != "constant" and self.decay_steps == 0:
            raise ValueError(f"optimizer.decay is {self.decay} with decay_steps=0; set decay_steps, in updates")

    def lr_at(self, update: int) -> float:
        """Learning rate of update `update`, counted from 0; the first update of a warm-up has lr / warmup_steps."""
        if update < self.warmup_steps:
            return self.lr * ((update + 1) / self.warmup_steps)  # in this order, rounding never exceeds lr
        if self.decay == "constant":
            return self.lr
        done = min(1.0, (update - self.warmup_steps) / self.decay_steps)
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return min(self.lr, self.min_lr + (self.lr - self.min_lr) * left)


class Optimizer:
    """Megatron's optimizer with a learning-rate schedule.

    Args:
        model: DDP-wrapped chunks of this rank.
        config: AdamW and schedule.
        trainer: dtype and distribution of the state.

    Raises:
        ValueError: cpu_offload is set without a GPU, or megatron does not support it with these settings.
    """

    def __init__(self, model: Sequence[Any], *, config: OptimizerConfig, trainer: TrainerConfig) -> None:
        # Imported here so that settings can be read without torch and megatron.
        import torch
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
        from megatron.core.optimizer import get_megatron_optimizer

        from async_rl.trainer.state.optimizer_state import fuse

        bfloat16 = trainer.dtype == "bfloat16"
        self._config = config
        self._updates = self._steps = 0
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
        fuse(self._parts())

    @property
    def updates(self) -> int:
        """Updates so far, including skipped ones."""
        return self._updates

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
        lr = self._config.lr_at(self._updates)
        for group in self._inner.param_groups:
            group["lr"] = lr
            # In megatron the scheduler applies wd_mult, 0 for biases and norms.
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self._inner.prepare_grads()
        norm = float(self._inner.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of update {self._updates} is {norm}; lower optimizer.lr={self._config.lr} "
                "or check mismatch/abs_max of the previous steps"
            )
        self._inner.step()
        self._updates += 1
        self._steps += 1
        return norm, lr

    def skip(self) -> float:
        """Count an update without gradients and advance the schedule; returns the learning rate."""
        lr = self._config.lr_at(self._updates)
        self._updates += 1
        return lr

    @property
    def steps(self) -> int:
        """Updates so far without skipped ones: Adam's step count."""
        return self._steps

    def shards(self, weights: Mapping[str, Any], *, loading: bool) -> State:
        """Moments and float32 weights for a checkpoint; see `optimizer_state.state_shards`. Collective.

        Args:
            weights: `shards.model_shards` of the chunks.
            loading: whether the shards are targets of a load.
        """
        from async_rl.trainer.state.optimizer_state import state_shards

        return state_shards(self._parts(), weights, loading=loading)

    def load(self, state: State, *, updates: int, steps: int) -> None:
        """Restore the optimizer from `state`, the loaded `shards`; load the weights of the chunks first."""
        from async_rl.trainer.state.optimizer_state import load_state

        load_state(self._parts(), state, steps=steps)
        self._updates, self._steps = updates, steps

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
