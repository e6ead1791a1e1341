"""The explanation of a run: its limit, the sources of the staleness of its tokens, the longest waits, and overrides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.explain.division import CAUSES, OF_TRAINER, Seconds, StepDivision, divide, savings, summed, total
from async_rl.explain.overrides import Prediction, predict
from async_rl.plan.measured import describe, filling
from async_rl.plan.records import Records, RecordsError, read_records
from async_rl.plan.requests import RequestModel, trained_groups

NUM_WAITS = 3


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What limited a run."""

    steps: Sequence[StepDivision]
    """Batches, without those that fill the pipeline."""
    seconds: Seconds
    """Cause -> seconds of all steps, largest first."""
    savings: Seconds
    """Cause -> seconds that its removal would save at most, largest first."""
    trainer: Seconds
    """Kind of span of the first trainer rank -> seconds, largest first; empty without such spans."""
    tflops: float | None
    """Mean `throughput/train_tflops` of the steps; None if none has it."""
    mfu: float | None
    """Mean `throughput/mfu` of the steps; None if none has it."""
    compression: float | None
    """Mean `tree/compression` of the steps; None if none has it."""
    staleness: Staleness | None
    """Sources of the staleness; None if they are not known."""
    waited_for: Sequence[GroupWait]
    """Groups that the trainer waited for longest."""
    in_queue: Sequence[GroupWait]
    """Groups that were longest in the queue."""
    predictions: Sequence[Prediction]
    """Overrides, the most likely to help first."""
    simulated_step_s: float | None
    """Seconds of a batch in the simulation with the rates of the run; None if the rates are not known."""
    signal: Mapping[str, float]
    """Mean share of the trained groups `without_signal`, and of those `all_right` and `all_wrong` among them."""
    notes: Sequence[str]
    """What is not known."""

    @property
    def limit(self) -> str:
        """The cause whose removal would save most, a key of `CAUSES`."""
        return next(iter(self.savings))

    @property
    def steps_per_hour(self) -> float:
        """Batches per hour."""
        return 3600 * len(self.steps) / sum(self.seconds.values())

    def periods(self, count: int) -> Iterator[tuple[int, int, Seconds]]:
        """First step, last step and causes of that many equal parts of the run."""
        size = -(-len(self.steps) // count)
        for first in range(0, len(self.steps), size):
            part = self.steps[first : first + size]
            yield part[0].step, part[-1].step, total(part)

    def values(self) -> dict[str, Any]:
        """All figures with the types of JSON."""
        predictions = [
            {
                "override": each.override.text,
                "treats": list(each.override.treats),
                "price": each.override.price,
                "gain": each.gain,
                "steps_per_hour": self.steps_per_hour * (1 + each.gain),
                "by": each.by,
            }
            for each in self.predictions
        ]
        figures = asdict(replace(self, predictions=()))
        return {"limit": self.limit, "steps_per_hour": self.steps_per_hour, **figures, "predictions": predictions}


def explain(directory: Path) -> Explanation:
    """Explain a run that has ended or still runs.

    Raises:
        RecordsError: the directory has no run, no train step, or a damaged file.
    """
    records = read_records(directory)
    try:
        return _explain(records)
    except (KeyError, TypeError) as error:
        raise RecordsError(f"{directory} is not of this version of async_rl: {error!r} in its files") from error


def _explain(records: Records) -> Explanation:
    notes = list(records.notes)
    requests = RequestModel(records) if records.of("generate") else None
    steps = divide(records, requests)
    first = filling(records.config, batches=len(steps))
    steps = steps[first:]
    seconds = total(steps)
    description = None
    if requests is not None:
        try:
            description = describe(records, requests, first=first)
        except RecordsError as error:
            notes.append(f"overrides are not simulated: {error}")
    saved = savings(records, steps)
    predictions, simulated = predict(
        records.config,
        seconds,
        limit=next(iter(saved)),
        step_s=sum(seconds.values()) / len(steps),
        description=description,
        requests=requests,
    )
    return Explanation(
        steps=steps,
        seconds=seconds,
        savings=saved,
        trainer=summed((s.kind, s.overlap(steps[0].start, steps[-1].end)) for s in records.rank_spans),
        tflops=_mean(records, steps, "throughput/train_tflops"),
        mfu=_mean(records, steps, "throughput/mfu"),
        compression=_mean(records, steps, "tree/compression"),
        staleness=_staleness(records),
        waited_for=_longest_waited_for(steps),
        in_queue=_longest_in_queue(records, steps),
        predictions=predictions,
        simulated_step_s=simulated,
        signal={
            name: float(np.mean([line.get(f"reward/groups_{name}") or 0.0 for line in records.metrics]))
            for name in ("without_signal", "all_right", "all_wrong")
        },
        notes=notes,
    )


def _mean(records: Records, steps: Sequence[StepDivision], key: str) -> float | None:
    """Mean of a metric over the steps that have it."""
    last = {step.step for step in steps}
    values = [line[key] for line in records.metrics if line["train_step"] in last and line.get(key) is not None]
    return float(np.mean(values)) if values else None


def _staleness(records: Records) -> Staleness | None:
    """Sources of the staleness of the steps of the trace; None without trace or schedule.

    A token that is trained with gradient of u updates and was sampled by weights of v updates has staleness u - v. U is
    the number of updates that the trainer had made when its group was ready:

        before the queue   U - v, from sampling to the end of its group: generation over several versions, and publishes
        in the queue       updates between U and the batch of the group
        in training        later optimizer steps of the same batch

    v=3, the trainer has made 4 updates when the group is ready, and 6 when it takes the group: 1 before the queue and
    2 in the queue.
    """
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


def _longest_in_queue(records: Records, steps: Sequence[StepDivision]) -> list[GroupWait]:
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
        for seconds, group, step in sorted(waits, key=lambda wait: -wait[0])[:NUM_WAITS]
    ]


def _reason(start: float, end: float, steps: Sequence[StepDivision]) -> str:
    """Why a group stayed in the queue: the trainer was busy, or the batch waited for another group."""
    shared = [(max(0.0, min(step.wait[1], end) - max(step.wait[0], start)), step) for step in steps]
    if 2 * sum(seconds for seconds, _ in shared) <= end - start:
        return "the trainer was busy with earlier batches"
    _, step = max(shared, key=lambda each: each[0])
    return f"the batch of step {step.step} waited for group {step.group}"


def _longest_waited_for(steps: Sequence[StepDivision]) -> list[GroupWait]:
    """Groups that the trainer waited for longest, each with the largest cause of its step's wait."""
    found = list[GroupWait]()
    for step in steps:
        if step.group is not None:
            waited = {cause: s for cause, s in step.seconds.items() if cause not in OF_TRAINER}
            cause = max(waited, key=lambda each: waited[each], default="rollouts")
            reason = CAUSES[cause].text.removeprefix("wait: ")
            found.append(GroupWait(step.group, step.step, step.wait[1] - step.wait[0], reason))
    return sorted(found, key=lambda wait: -wait.seconds)[:NUM_WAITS]
