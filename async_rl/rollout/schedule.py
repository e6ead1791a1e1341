"""Schedule of a run, without its tokens: `schedule.jsonl`, one line per batch.

A line lists the groups of the batch, in the order of the trainer. Each entry has the prompt, the optimizer updates in
the weights at its admission, and for each trajectory the number of tokens sampled under each version of the weights.
This covers every effect of admissions, aborts, resumes, publishes and batches on the data. A run under the schedule
(`async_rl.rollout.schedule_replay`) therefore trains on tokens of the same prompts, with the same age at the same step.
`train_step` is the last optimizer step of the batch, `optimizer_steps` the number of its optimizer steps
(trainer.updates_per_batch).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.loop import Prompt
from async_rl.files.jsonl import read_lines
from async_rl.rollout.prompts import PromptOrder
from message_queue.errors import AsyncRLError
from message_queue.heads import GroupHead, merged_spans

FILE_NAME = "schedule.jsonl"

Span = tuple[int, int]
"""(optimizer updates in the weights, tokens sampled under them)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledGroup:
    """A trained group of the recorded run."""

    group: int
    """Id in the recorded run; ids increase in the order of admission."""
    prompt: int
    """Index of the prompt in the recorded run."""
    admitted_update: int
    """Optimizer updates in the weights at its admission."""
    train_step: int
    """Last optimizer step of its batch."""
    spans: tuple[tuple[Span, ...], ...]
    """Spans of each trajectory, in the order of sampling."""


class ScheduleError(AsyncRLError, ValueError):
    """A schedule cannot be read, or does not fit the run."""


class RunSchedule:
    """The trained groups of a run. A position is an index among them in the order of admission.

    Args:
        groups: in any order.
        updates_per_batch: optimizer steps per batch.

    Raises:
        ScheduleError: train steps with a gap or a late start, or batches of different sizes.
    """

    def __init__(self, groups: Sequence[ScheduledGroup], *, updates_per_batch: int = 1) -> None:
        self.groups = tuple(sorted(groups, key=lambda group: group.group))
        self.updates_per_batch = per_batch = updates_per_batch
        steps, sizes = np.unique([group.train_step for group in self.groups], return_counts=True)
        if not self.groups or steps.tolist() != list(range(per_batch, len(steps) * per_batch + 1, per_batch)):
            raise ScheduleError(
                f"a schedule has the train steps {steps.tolist()}; need {per_batch}, {2 * per_batch}, {3 * per_batch} "
                "and so on"
            )
        if len(set(sizes.tolist())) > 1:
            raise ScheduleError(f"a schedule has batches of {sorted(set(sizes.tolist()))} groups; need one size")
        self.train_steps = len(steps) * per_batch
        self.batch_groups = int(sizes[0])
        self.trajectories_per_group = max(len(group.spans) for group in self.groups)

    def batch_of(self, position: int) -> int:
        """Batch number, from 0, of the group at a position."""
        return self.groups[position].train_step // self.updates_per_batch - 1

    @property
    def max_staleness(self) -> int:
        """Highest staleness of a token at the last optimizer step of its batch."""
        return max(g.train_step - 1 - update for g in self.groups for spans in g.spans for update, _ in spans)

    def check(
        self,
        *,
        groups_per_batch: int,
        trajectories_per_group: int,
        updates_per_batch: int = 1,
        train_steps: int,
        max_staleness: int,
        every: int,
    ) -> None:
        """Refuse a run that cannot follow the schedule.

        Args:
            every: optimizer updates from one published version to the next.

        Raises:
            ScheduleError: names the field, its value and the required value.
        """
        updates = {g.admitted_update for g in self.groups} | {u for g in self.groups for s in g.spans for u, _ in s}
        for field, value, wanted in (
            ("rollout.groups_per_batch", groups_per_batch, self.batch_groups),
            ("rollout.trajectories_per_group", trajectories_per_group, self.trajectories_per_group),
            ("trainer.updates_per_batch", updates_per_batch, self.updates_per_batch),
        ):
            if value != wanted:
                raise ScheduleError(f"{field} is {value}, and the schedule is of a run with {wanted}; set that")
        if train_steps > self.train_steps:
            raise ScheduleError(
                f"total_train_steps is {train_steps}, and the schedule has {self.train_steps}; set at most that"
            )
        if max_staleness < self.max_staleness:
            raise ScheduleError(
                f"staleness.max_staleness is {max_staleness}, and the schedule has tokens of {self.max_staleness}; "
                "set at least that"
            )
        if off := sorted(update for update in updates if update % every):
            raise ScheduleError(
                f"sync.every is {every}, and the schedule has weights of {off[0]} updates, which it never publishes"
            )

    def order(self, order: PromptOrder) -> PromptOrder:
        """The prompts of the schedule: index i is position i."""
        return _ScheduledOrder(order, [group.prompt for group in self.groups])


def read_schedule(path: Path) -> RunSchedule:
    """Read the schedule of a run directory, or a schedule file.

    Raises:
        ScheduleError: the file is missing or malformed; names file, line and cause.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        lines = read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"schedule is {path}, which has no {FILE_NAME} to read: {error}") from error
    groups: list[ScheduledGroup] = []
    per_batch: set[int] = set()
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
            per_batch.add(int(step.get("optimizer_steps", 1)))
            groups += [_group(int(step["train_step"]), entry) for entry in step["groups"]]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ScheduleError(f"line {number} of {file} is not a train step of a schedule: {error!r}") from error
    if len(per_batch) > 1:
        raise ScheduleError(f"{file}: batches of {sorted(per_batch)} optimizer steps; need one number")
    try:
        return RunSchedule(groups, updates_per_batch=min(per_batch, default=1))
    except ScheduleError as error:
        raise ScheduleError(f"{file}: {error}") from error


def scheduled_groups(groups: Sequence[GroupHead], *, version_updates: Mapping[int, int]) -> list[dict[str, Any]]:
    """`groups` of a line of `schedule.jsonl`.

    Args:
        version_updates: `param_version` -> optimizer updates in it.
    """
    return [
        {
            "group": group.group,
            "prompt": group.prompt,
            "admitted_update": group.admitted_update,
            "spans": [spans_of(t.spans, version_updates) for t in group.trajectories if not t.failed],
        }
        for group in groups
    ]


def spans_of(sampled: Iterable[tuple[int, int]], version_updates: Mapping[int, int]) -> tuple[Span, ...]:
    """Tokens sampled under each number of updates, from (`param_version`, tokens) in order."""
    return merged_spans((version_updates[version], tokens) for version, tokens in sampled if tokens)


def _group(train_step: int, entry: Mapping[str, Any]) -> ScheduledGroup:
    return ScheduledGroup(
        group=int(entry["group"]),
        prompt=int(entry["prompt"]),
        admitted_update=int(entry["admitted_update"]),
        train_step=train_step,
        spans=tuple(tuple((int(update), int(tokens)) for update, tokens in spans) for spans in entry["spans"]),
    )


class _ScheduledOrder:
    def __init__(self, order: PromptOrder, prompts: Sequence[int]) -> None:
        self._order = order
        self._prompts = prompts

    def train_prompt(self, index: int) -> Prompt:
        """The prompt at position `index`; after the end an arbitrary prompt that is never admitted."""
        prompt = self._prompts[min(index, len(self._prompts) - 1)]
        return replace(self._order.train_prompt(prompt), index=index)
