"""Settings of AdamW and its learning-rate schedule. This module must not import megatron."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from agent_loop.bounds import bounded


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
