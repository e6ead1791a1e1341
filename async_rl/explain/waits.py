"""Where the staleness of the trained tokens came from, and which groups waited longest.

A token that is trained with gradient of u updates and was sampled by weights of v updates has staleness u - v. With U
the updates that the trainer had made when its group was ready:

    before the queue   U - v, from sampling to the end of its group: generation over several versions, and publishes
    in the queue       updates between U and the batch of the group
    in training        later optimizer steps of the same batch

    v=3, the trainer has made 4 updates when the group is ready, and 6 when it takes the group: 1 before the queue and 2
    in the queue
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.explain.division import CAUSES, OF_TRAINER, StepDivision
from async_rl.plan.records import Records
from async_rl.plan.requests import trained_groups


@dataclass(frozen=True, slots=True)
class Staleness:
    """Mean staleness of the trained tokens, by where it arose, in optimizer steps."""

    before_queue: float
    """From sampling until the group was ready."""
    in_queue: float
    """From then until its batch was taken."""
    in_training: float
    """In later optimizer steps of the batch."""


@dataclass(frozen=True, slots=True)
class GroupWait:
    """A group that waited in the queue, or that the trainer waited for."""

    group: int
    """Its number."""
    step: int
    """Last train step of its batch."""
    seconds: float
    """Of the wait."""
    reason: str
    """Why."""


def staleness(records: Records) -> Staleness | None:
    """Sources of the staleness of the steps of the trace; None without trace or schedule."""
    trains = [span for span in records.of("train") if span.args.get("step") in records.batches]
    ready = {span.args.get("group"): span.end for span in records.of("rollout")}
    if not trains or not ready:
        return None
    ends, steps = [span.end for span in trains], [span.args["step"] for span in trains]
    made = {line["train_step"]: line.get("optimizer_steps", 1) for line in records.metrics}
    tokens = before = queued = 0.0
    for step in steps:
        taken = step - made.get(step, 1)
        for group in records.batches[step]:
            if group["group"] not in ready:
                continue
            done = bisect_right(ends, ready[group["group"]])
            then = min(taken, steps[done - 1] if done else steps[0] - made.get(steps[0], 1))
            for update, count in (span for spans in group["spans"] for span in spans):
                tokens += count
                before += count * (then - update)
                queued += count * (taken - then)
    if not tokens:
        return None
    in_training = 0.0
    if max(made.values()) > 1:
        recorded = [line["staleness/mean"] for line in records.metrics if line["train_step"] in steps]
        in_training = max(0.0, float(np.mean(recorded)) - (before + queued) / tokens)
    return Staleness(before / tokens, queued / tokens, in_training)


def longest_in_queue(records: Records, steps: Sequence[StepDivision], *, count: int) -> list[GroupWait]:
    """Groups that were ready longest before their batch was taken, with the larger part of the reason."""
    ready = {span.args.get("group"): span.end for span in records.of("rollout")}
    groups = trained_groups(records)
    waits = [
        (step.wait[1] - ready[group], group, step)
        for step in steps
        for group in groups.get(step.step, ())
        if group in ready
    ]
    return [
        GroupWait(group, step.step, max(0.0, seconds), _reason(ready[group], step.wait[1], steps))
        for seconds, group, step in sorted(waits, key=lambda wait: -wait[0])[:count]
    ]


def _reason(start: float, end: float, steps: Sequence[StepDivision]) -> str:
    """Why a group stayed in the queue: the trainer was busy, or the batch waited for another group."""
    shared = [(max(0.0, min(step.wait[1], end) - max(step.wait[0], start)), step) for step in steps]
    if 2 * sum(seconds for seconds, _ in shared) <= end - start:
        return "the trainer was busy with earlier batches"
    _, step = max(shared, key=lambda each: each[0])
    return f"the batch of step {step.step} waited for group {step.group}"


def longest_waited_for(steps: Sequence[StepDivision], *, count: int) -> list[GroupWait]:
    """Groups that the trainer waited for longest, each with the largest cause of its step's wait."""
    found = list[GroupWait]()
    for step in steps:
        if step.group is not None:
            waited = {cause: s for cause, s in step.seconds.items() if cause not in OF_TRAINER}
            cause = max(waited, key=lambda each: waited[each], default="rollouts")
            reason = CAUSES[cause].text.removeprefix("wait: ")
            found.append(GroupWait(step.group, step.step, step.wait[1] - step.wait[0], reason))
    return sorted(found, key=lambda wait: -wait.seconds)[:count]
