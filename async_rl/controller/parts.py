"""Stages and trainer of a run, and the parts that outlive a trainer or a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from agent_loop.loop import Prompt
from async_rl.inference.publisher import Publisher
from async_rl.inference.supervisor import Supervisor
from async_rl.metrics.recorder import Recorder
from async_rl.metrics.trace import Trace
from async_rl.rollout.dispatcher import Dispatcher
from async_rl.rollout.schedule import ScheduleReplay
from async_rl.trainer.batch.training_batch import TrainingBatch
from async_rl.trainer.rank_methods import TrainerRank
from message_queue.errors import AsyncRLError
from message_queue.tokens import RoutingSpec

if TYPE_CHECKING:
    from async_rl.cluster.queue import QueueClient
    from async_rl.controller.checkpoints import Checkpoints
    from async_rl.controller.probe import Probe

P = ParamSpec("P")
R = TypeVar("R")
WATCH_EVERY_S = 10.0  # between two signs of life of a replica


class StageError(AsyncRLError):
    """A stage failed; the cause is chained."""


async def run_stage(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a stage.

    Raises:
        StageError: `work` failed.
    """
    try:
        await work()
    except Exception as error:
        raise StageError(f"stage {name} failed") from error


class Trainer(Protocol):
    """All trainer ranks as one."""

    async def call(self, method: Callable[Concatenate[TrainerRank, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call every rank; the answer of rank 0."""
        ...

    async def train(self, batch: TrainingBatch) -> dict[str, float]: ...
    async def save(self, directory: Path) -> None:
        """Copy the state, and start to write it as folder `directory`; `saved` is called before the next save."""
        ...

    async def saved(self) -> None:
        """Wait until the folder of the last `save` is written; `train` may run meanwhile."""
        ...


T = TypeVar("T", bound=Trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts(Generic[T]):
    """Parts that outlive a trainer or a queue."""

    start_queue: Callable[[], Awaitable[QueueClient]]
    """Starts a queue."""
    replace_trainer: Callable[[T], Awaitable[T]]
    """Closes a trainer and starts another in its place; repeated with the same one if that fails."""
    publisher: Publisher
    """Loads versions on the replicas."""
    replicas: Supervisor
    """Restarts replicas that failed."""
    rollouts: Dispatcher
    """Hands out groups to the rollout workers."""
    teachers: Mapping[str, Supervisor] = field(default_factory=dict[str, Supervisor])
    """Teacher -> what restarts its replicas."""
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
    schedule_replay: ScheduleReplay | None = None
    """Keeps the run to a schedule; None lets it run freely."""
    probe: Probe | None = None
    """Compares engines and trainer at equal weights; None compares nothing."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the run is to stop."""

    def request_stop(self) -> None:
        """Finish the train step under way, save a checkpoint, and return from `RecoveryLoop.run`."""
        self.stop.set()
        self.rollouts.end_soon()
