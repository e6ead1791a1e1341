"""Figures of a simulated run, counted from what its controller records."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_rl.metrics.recorder import Recorder
from async_rl.metrics.registry import StepRecord
from async_rl.plan.description import Description
from async_rl.plan.parts import OpenTrajectories, PlannedReplica, Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Figures of a simulated run, without its first steps."""

    step_s: float
    """Seconds of a train step."""
    tokens_per_s: float
    """Sampled tokens trained per second."""
    trainer_idle: float
    """Share of the time that the trainer waited for a batch."""
    rollout_idle: float
    """Share of the time that a replica had no running request, mean over replicas."""
    staleness_mean: float
    """Mean over trained tokens, in optimizer steps."""
    staleness_p99: int
    """99th percentile over trained tokens."""
    length_bias: float
    """Mean length in the loss of trained trajectories over that of all that ended."""
    open_share: float
    """Share of the time with an open trajectory."""
    open_tokens_per_s: float
    """Tokens sampled per second of that time."""
    sync_bytes_per_s: float
    """Weights that all replicas receive, mean over time."""
    rollout_bytes_per_s: float
    """Content that rollout workers receive, mean over time."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """A batch, and counters at its end."""

    waited: float
    """Seconds that the trainer waited for it."""
    staleness: Mapping[int, int]
    """Staleness in optimizer steps -> tokens in the loss."""
    ended: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    """Lengths of each group that ended since the batch before, for the loss or given up for its age."""
    at: float = 0.0
    """Seconds since the start of the run."""
    open_s: float = 0.0
    """Seconds with an open trajectory since then."""
    sampled: float = 0.0
    """Tokens sampled since then."""
    busy: float = 0.0
    """Seconds that a replica was busy since then, mean over replicas."""


class Figures(Recorder):
    """A recorder that also counts.

    Args:
        replicas: all simulated ones.
        opened: trajectories in rollout.
        drawn: group -> lengths of its trajectories; entries are removed at the end of a group.
    """

    def __init__(
        self,
        directory: Path,
        *,
        replicas: Sequence[PlannedReplica],
        opened: OpenTrajectories,
        drawn: MutableMapping[int, NDArray[np.int64]],
    ) -> None:
        super().__init__(directory, console=None)
        self._replicas = replicas
        self._opened = opened
        self._drawn = drawn
        self._steps: list[_Step] = []

    def step(self, record: StepRecord) -> None:
        super().step(record)
        waited = record.metrics["idle/trainer"] * record.metrics["step/seconds"]
        self._steps.append(_Step(waited=waited, staleness=record.staleness_tokens))

    def ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """The last call of the controller for a batch."""
        super().ledger(records)
        step = self._steps[-1]
        step.ended += (lengths for r in records if (lengths := self._drawn.pop(r["group"], None)) is not None)
        for replica in self._replicas:
            replica.advance()
        step.at, step.open_s = asyncio.get_running_loop().time(), self._opened.seconds
        step.sampled = sum(replica.tokens for replica in self._replicas)
        step.busy = sum(replica.busy_s for replica in self._replicas) / len(self._replicas)

    def seen(self, description: Description, scale: Scale, *, skipped: int) -> Seen:
        """The figures of the whole cluster. skipped: number of batches that are left out, at least one."""
        first, *steps = self._steps[skipped - 1 :]
        last, staleness = steps[-1], Counter[int]()
        for step in steps:
            staleness.update(step.staleness)
        seconds, open_s, sampled = last.at - first.at, last.open_s - first.open_s, last.sampled - first.sampled
        trained, ended = staleness.total(), np.concatenate([lengths for step in steps for lengths in step.ended])
        trajectories = len(steps) * scale.groups * description.workload.trajectories_per_group
        published = description.rates.model_bytes * scale.whole * len(steps) / description.publish.every
        return Seen(
            step_s=seconds / len(steps),
            tokens_per_s=scale.groups_of * trained / seconds,
            trainer_idle=sum(step.waited for step in steps) / seconds,
            rollout_idle=1 - (last.busy - first.busy) / seconds,
            staleness_mean=sum(stale * tokens for stale, tokens in staleness.items()) / trained,
            staleness_p99=_quantile(staleness, 0.99),
            length_bias=trained / trajectories / float(ended.mean()),
            open_share=open_s / seconds,
            open_tokens_per_s=scale.groups_of * sampled / open_s,
            sync_bytes_per_s=published / seconds,
            rollout_bytes_per_s=scale.groups_of * description.workload.bytes_per_token * sampled / seconds,
        )


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least this share of the counts do not exceed."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return max(counts)
