"""What the driver was told of by the queue, and what must therefore be there after a restart.

A fact is noted when its call returned, hence after it was written; it is durable once the disk synced after that, or
when the settings promise it. After the death of processes every fact must be there, after a loss of power those that
are durable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from message_queue.contract import Admission


@dataclass(frozen=True, slots=True)
class Held:
    """A trajectory holds `length` tokens, or is `closed` with them."""

    group: int
    trajectory: int
    length: int
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    group: int


@dataclass(frozen=True, slots=True)
class Dropped:
    group: int


@dataclass(frozen=True, slots=True)
class Trained:
    """Groups took part in a train step."""

    groups: tuple[int, ...]
    train_step: int


@dataclass(frozen=True, slots=True)
class Published:
    version: int


Fact: TypeAlias = Admission | Held | Ready | Dropped | Trained | Published


@dataclass(slots=True)
class Expected:
    """What facts add up to. held: (group, trajectory) -> the last that is known of it.

    trained: by the last train step of the batch. updates_per_batch: train steps of each.
    """

    admitted: dict[int, Admission] = field(default_factory=dict[int, Admission])
    held: dict[tuple[int, int], Held] = field(default_factory=dict[tuple[int, int], Held])
    ready: set[int] = field(default_factory=set[int])
    dropped: set[int] = field(default_factory=set[int])
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    version: int = 0
    updates_per_batch: int = 1

    def of_group(self, group: int) -> dict[int, Held]:
        """What is known of its trajectories, by number."""
        return {fact.trajectory: fact for (of, _), fact in self.held.items() if of == group}

    def step_of(self) -> Mapping[int, int]:
        """Group -> the train step that it was in."""
        return {group: step for step, groups in self.trained.items() for group in groups}

    def replay(self, train_step: int) -> dict[int, tuple[int, ...]]:
        """Batches that are trained again after a checkpoint of `train_step`, by their last train step."""
        batches: dict[int, tuple[int, ...]] = {}
        while (batch := self.trained.get(train_step := train_step + self.updates_per_batch)) is not None:
            batches[train_step] = batch
        return batches


class Acknowledged:
    """Facts in the order in which they were told.

    Args:
        durable_after_s: at the latest; None: never but by a sync.
        shards: of the queue; where there are several, each process has a disk of its own.
        updates_per_batch: train steps of each batch.
    """

    def __init__(
        self,
        *,
        durable_after_s: float | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        shards: int = 1,
        updates_per_batch: int = 1,
    ) -> None:
        self._updates_per_batch = updates_per_batch
        self._facts: list[Fact] = []
        self._told_at: list[float] = []
        self._shards = shards
        self._processes = ["queue", *(f"queue-shard-{shard}" for shard in range(shards if shards > 1 else 0))]
        self._durable = dict.fromkeys(self._processes, 0)  # so many facts at the front, as far as they are there
        self._durable_after_s = durable_after_s
        self._clock = clock
        self._dead: set[str] = set()

    def note(self, *facts: Fact) -> None:
        """The driver was told."""
        self._facts += facts
        self._told_at += [self._clock()] * len(facts)

    def synced(self, process: str) -> None:
        """The disk of a process synced. While a journal is opened, that is one of its files only."""
        if process not in self._dead:
            self._durable[process] = len(self._facts)

    def all_synced(self) -> None:
        """All disks did."""
        for process in self._processes:
            self.synced(process)

    def restart(self, facts: Sequence[Fact]) -> None:
        """From now on these are the facts."""
        self._facts, self._durable, self._dead = list(facts), dict.fromkeys(self._processes, 0), set()
        self._told_at = [self._clock()] * len(self._facts)

    def died(self, process: str) -> None:
        """It syncs no more until the journal is open again."""
        if self._durable_after_s is not None and process not in self._dead:
            since = bisect_right(self._told_at, self._clock() - self._durable_after_s)
            self._durable[process] = max(self._durable[process], since)
        self._dead.add(process)

    def power_lost(self) -> None:
        """What is not durable may be lost."""
        for process in self._processes:
            self.died(process)
        pairs = list(zip(self._facts, self._told_at, strict=True))
        kept = [pair for at, pair in enumerate(pairs) if at < self._durable[self._home(pair[0])]]
        self._facts, self._told_at = [fact for fact, _ in kept], [told_at for _, told_at in kept]
        self._durable = dict.fromkeys(self._processes, len(kept))

    def _home(self, fact: Fact) -> str:
        """The process that has it in its journal."""
        if self._shards > 1 and isinstance(fact, Held):
            return f"queue-shard-{fact.group % self._shards}"
        return "queue"

    def expected(self) -> Expected:
        """What must be there."""
        made = Expected(updates_per_batch=self._updates_per_batch)
        for fact in self._facts:
            match fact:
                case Admission():
                    made.admitted[fact.group] = fact
                case Held():
                    made.held[fact.group, fact.trajectory] = fact
                case Ready():
                    made.ready.add(fact.group)
                case Dropped():
                    made.dropped.add(fact.group)
                case Trained():
                    made.trained[fact.train_step] = fact.groups
                case Published():
                    made.version = max(made.version, fact.version)
        return made
