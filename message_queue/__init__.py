"""The contract between rollout and training: segments, trajectories, groups, and the queue that passes them on."""

from message_queue.errors import ContractError, QueueClosed
from message_queue.policies import StalenessConfig
from message_queue.queue import TrajectoryQueue
from message_queue.sampling_support import SamplingSupport
from message_queue.tokens import RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.trajectory import PromptGroup, Trajectory, Turn

__all__ = [
    "ContractError",
    "PromptGroup",
    "QueueClosed",
    "RoutedExperts",
    "RoutingSpec",
    "SamplingSupport",
    "StalenessConfig",
    "StopReason",
    "TokenOutput",
    "Trajectory",
    "TrajectoryQueue",
    "Turn",
    "WeightVersion",
]
