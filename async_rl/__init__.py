"""Fully asynchronous, off-policy reinforcement learning for language models.

A name below is imported when it is first used: every process of a run imports this package, and few need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_rl.config import ConfigError, RunConfig, load_config
    from async_rl.inference.replica import EngineReplica
    from async_rl.metrics.callbacks import RunEvent
    from async_rl.rollout.task import Demonstration, Task, TaskConfig, build_task
    from async_rl.run import TrainResult, train
    from async_rl.weights.transport import WeightUpdate
    from message_queue.errors import AsyncRLError

__all__ = [
    "AsyncRLError",
    "ConfigError",
    "Demonstration",
    "EngineReplica",
    "RunConfig",
    "RunEvent",
    "Task",
    "TaskConfig",
    "TrainResult",
    "WeightUpdate",
    "build_task",
    "load_config",
    "train",
]

_MODULES = {
    "async_rl.config": ("ConfigError", "RunConfig", "load_config"),
    "async_rl.inference.replica": ("EngineReplica",),
    "async_rl.metrics.callbacks": ("RunEvent",),
    "async_rl.rollout.task": ("Demonstration", "Task", "TaskConfig", "build_task"),
    "async_rl.run": ("TrainResult", "train"),
    "async_rl.weights.transport": ("WeightUpdate",),
    "message_queue.errors": ("AsyncRLError",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
