"""Settings of the critic. This module must not import megatron."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from agent_loop.bounds import Count, bounded
from async_rl.trainer.state.optimizer import OptimizerConfig

_COEFFICIENT = 0.1


@bounded("critic")
class CriticConfig:
    """The value model of advantage.name=gae. PPO, Schulman et al. 2017, arXiv 1707.06347.

    The loss of a token with the value V and the return R is (V - R)^2 / 2, and the update takes the mean over tokens.

    Raises:
        ValueError: a value is out of range or fields contradict each other; the message names the fields.
    """

    trunk: Literal["own", "shared"] = "own"
    """`own`: a second model with the layout and settings of the trainer, without an output layer. `shared`: the last
    hidden states of the policy; only the value head has the critic's optimizer."""
    checkpoint: Path | None = None
    """With `own`: initial weights, a Hugging Face folder or a name at the hub, as of model.checkpoint; null for the
    policy's weights."""
    coefficient: Annotated[float, Ge(0)] = _COEFFICIENT
    """With `shared`: factor of the gradient of the value loss in the trunk, next to that of the policy loss; 0 trains
    the head alone."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """AdamW and its schedule, in updates of the critic."""
    updates: Count = 1
    """Optimizer steps of the critic on each mini-batch, for one of the policy."""
    value_clip: Annotated[float, Gt(0)] | None = None
    """Bound on the change of a value since the start of the batch: the loss is the larger one of V and of V within
    this bound. Null for no bound."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Train steps in which the policy does not change and only the critic is trained; with `shared` its head alone."""

    def __post_init__(self) -> None:
        if self.optimizer.cpu_offload:
            raise ValueError(
                f"critic.optimizer.cpu_offload is {self.optimizer.cpu_offload}, but the state of the critic, with "
                "its float32 value head, is not moved to the CPU; set critic.optimizer.cpu_offload=0"
            )
        if self.trunk == "own" and self.coefficient != _COEFFICIENT:
            raise ValueError(
                f"critic.coefficient is {self.coefficient} with critic.trunk=own, which the policy does not share; set "
                f"critic.trunk=shared, or leave it at {_COEFFICIENT}"
            )
        if self.trunk == "shared" and self.checkpoint is not None:
            raise ValueError(
                f"critic.checkpoint is {self.checkpoint} with critic.trunk=shared, which has the weights of the "
                "policy; set critic.trunk=own, or checkpoint=null"
            )
        if self.trunk == "shared" and self.updates > 1:
            raise ValueError(
                f"critic.updates is {self.updates} with critic.trunk=shared, whose value loss is a part of the "
                "policy's update; set it to 1, or critic.trunk=own"
            )
