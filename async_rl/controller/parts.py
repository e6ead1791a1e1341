"""Parts of a run that outlive a trainer or a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from agent_loop.loop import Prompt
from async_rl.controller.checkpoints import Checkpoints
from async_rl.controller.interfaces import Trainer
from async_rl.inference.publisher import Publisher
from async_rl.inference.supervisor import Supervisor
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.schedule_replay import NoReplay
from message_queue.tokens import RoutingSpec

if TYPE_CHECKING:
    from async_rl.cluster.queue import QueueClient
    from async_rl.controller.probe import Probe

T = TypeVar("T", bound=Trainer)


class PartFactory(Protocol[T]):
    """Starts the parts that may fail; see `async_rl.controller.processes.Processes`."""

    async def start_queue(self) -> QueueClient: ...
    async def replace_trainer(self, lost: T) -> T:
        """Close `lost` and start another in its place; the call is repeated with the same `lost` if that fails."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts(Generic[T]):
    """Parts that outlive a trainer or a queue."""

    processes: PartFactory[T]
    """Starts and replaces processes."""
    publisher: Publisher
    """Loads versions on the replicas."""
    replicas: Supervisor
    """Restarts replicas that failed."""
    rollouts: Dispatcher
    """Hands out groups to the rollout workers."""
    routing: RoutingSpec | None
    """Layout of the routing rows; None if engines return none."""
    checkpoints: Checkpoints
    """Folders with the state of the run."""
    recorder: Recorder
    """Records of the run."""
    trace: Trace
    """Time spans of all processes."""
    weights_directory: Path | str
    """Folder of published versions, on the node of trainer rank 0, or its URL."""
    held_out: Mapping[str, Sequence[Prompt]]
    """Set of held-out prompts -> its prompts; see CheckedRun."""
    schedule_replay: NoReplay
    """Controls the timing of events; rollouts pass through it."""
    probe: Probe | None = None
    """Compares engines and trainer at equal weights; None compares nothing."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the run is to stop."""

    def request_stop(self) -> None:
        """Finish the train step under way, save a checkpoint, and return from `RecoveryLoop.run`."""
        self.stop.set()
        self.rollouts.end_soon()
