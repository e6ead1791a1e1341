"""The contract between rollout and training: segments, trajectories, groups, and the queue that passes them on."""

from message_queue.contract import Admission, Batch, QueueClosed, QueueError, QueueSnapshot
from message_queue.heads import GroupHead, SequenceHead, TrajectoryHead, head_of
from message_queue.queue import TrajectoryQueue
from message_queue.sampling_support import SamplingSupport
from message_queue.staleness import StalenessConfig, StalenessError
from message_queue.tokens import ContractError, RoutedExperts, RoutingSpec, StopReason, TokenOutput, WeightVersion
from message_queue.training_sequence import GroupContent, TrainingSequence, content_of
from message_queue.trajectory import PromptGroup, Trajectory, Turn

__all__ = [
    "Admission",
    "Batch",
    "ContractError",
    "GroupContent",
    "GroupHead",
    "PromptGroup",
    "QueueClosed",
    "QueueError",
    "QueueSnapshot",
    "RoutedExperts",
    "RoutingSpec",
    "SamplingSupport",
    "SequenceHead",
    "StalenessConfig",
    "StalenessError",
    "StopReason",
    "TokenOutput",
    "TrainingSequence",
    "Trajectory",
    "TrajectoryHead",
    "TrajectoryQueue",
    "Turn",
    "WeightVersion",
    "content_of",
    "head_of",
]
