"""Facts that the queue and the content files acknowledged, which must be there after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from message_queue.contract import Admission
from message_queue.progress import RolloutRecord, Sampled, TrajectoryClosed


@dataclass(slots=True, kw_only=True)
class Acknowledged:
    """A fact is noted when its call returned, hence after it was written."""

    updates_per_batch: int = 1
    """Train steps of each batch."""
    admitted: dict[int, Admission] = field(default_factory=dict[int, Admission])
    """By group."""
    stored: dict[int, dict[int, tuple[int, bool]]] = field(default_factory=dict[int, dict[int, tuple[int, bool]]])
    """Group -> trajectory -> (tokens, whether it is closed)."""
    ready: set[int] = field(default_factory=set[int])
    """Groups that were put."""
    dropped: set[int] = field(default_factory=set[int])
    """Groups that were given up."""
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Last train step of a batch -> its groups."""
    version: int = 0
    """Newest that was published."""

    def store(self, record: RolloutRecord) -> None:
        """A record of the content was stored."""
        what, length = record.what, record.at
        match what:
            case Sampled():
                length += len(what.segment)
            case np.ndarray():
                length += len(what)
            case _:
                pass
        closed = isinstance(what, TrajectoryClosed)
        self.stored.setdefault(record.group, {})[record.trajectory] = (length, closed)

    def step_of(self) -> Mapping[int, int]:
        """Group -> the train step that it was in."""
        return {group: step for step, groups in self.trained.items() for group in groups}

    def replay(self, train_step: int) -> dict[int, tuple[int, ...]]:
        """Batches that are trained again after a checkpoint of `train_step`, by their last train step."""
        batches: dict[int, tuple[int, ...]] = {}
        while (batch := self.trained.get(train_step := train_step + self.updates_per_batch)) is not None:
            batches[train_step] = batch
        return batches

    def forget(self) -> None:
        """The journal was removed."""
        self.admitted, self.stored, self.trained = {}, {}, {}
        self.ready, self.dropped, self.version = set(), set(), 0
