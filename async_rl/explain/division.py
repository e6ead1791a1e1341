"""The wall clock of each train step, divided into causes that add up to it.

The trainer is busy or waits for a batch. Its work is divided by the spans of the controller. A wait ends when the last
group of the batch is ready, so it is walked back along that group: the time before its admission, then its longest
trajectory, request by request and tool by tool. Any of these, if it were shorter, would have ended the wait earlier, so
the wait is divided in their proportion, also if a part of them was before the wait.

A request of T tokens next to n requests on its replica is divided by the decode step that is fitted to all requests,
a + b n seconds:

    T a             latency: more groups in flight would hide it, so it counts as `staleness`; the part
                    beyond the length of nine tenths of all trajectories counts as `tail`
    T b n           `engines`; the part of validation requests among n counts as `validation`
    the rest        `replica` if its replica is slower than the others, `slots` while the replica has more requests than
                    it decodes, `repeat` after an abort, `validation` during one, otherwise `engines`

The part of rollout time that went to dropped groups counts as `drops`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from async_rl.plan.records import Records, Span
from async_rl.plan.requests import RequestModel, trained_groups

Seconds = dict[str, float]
"""Cause -> seconds."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason why time passes."""

    text: str
    """For the report."""
    removable: float = 1.0
    """Part of its time that is gone without it. Work that twice the GPUs do in half the time has 0.5."""


CAUSES: Mapping[str, Cause] = {
    "train": Cause("trainer: forward, backward and optimizer", 0.5),
    "export": Cause("trainer: export of the weights"),
    "checkpoint": Cause("trainer: checkpoint"),
    "other": Cause("trainer: records and everything without a span", 0.5),
    "engines": Cause("wait: requests share the replicas", 0.5),
    "slots": Cause("wait: requests queue in the replicas (engine.max_num_seqs)"),
    "staleness": Cause("wait: the staleness bound admits no more groups"),
    "tail": Cause("wait: few trajectories that are longer than the others"),
    "tools": Cause("wait: tools and environments"),
    "reward": Cause("wait: rewards"),
    "teacher": Cause("wait: teachers score rollouts"),
    "publish": Cause("wait: replicas pause for a publish"),
    "repeat": Cause("wait: context is prefilled again after a publish"),
    "validation": Cause("wait: a validation uses the replicas"),
    "drops": Cause("wait: groups that were dropped"),
    "replica": Cause("wait: a replica is slower than the others"),
    "agent": Cause("wait: rollout workers, outside of requests and tools"),
    "rollouts": Cause("wait: rollouts, without a finer cause", 0.5),
}
OF_TRAINER = ("train", "export", "checkpoint", "other")
SOON_S = 1e-3  # between what allows an admission and the start of the rollout
NEGLIGIBLE = 0.02  # part of a step; a shorter wait for a batch is that of a call
OF_REQUESTS = ("engines", "slots", "staleness", "tail", "rollouts")
"""Causes whose time dropped groups have a part in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDivision:
    """A batch and its wall clock, from the wait for it to the wait for the next one."""

    step: int
    """Last train step of the batch."""
    start: float
    """Seconds since the start of the run."""
    end: float
    """Likewise."""
    wait: tuple[float, float]
    """Start and end of the wait for the batch."""
    group: int | None
    """Group that the trainer waited for; None if it did not wait or that is not known."""
    seconds: Seconds = field(default_factory=dict[str, float])
    """They add up to `end - start`."""


def divide(records: Records, requests: RequestModel | None) -> list[StepDivision]:
    """The steps that `trace.json` has; without one, the steps of metrics.jsonl with the share of waiting only.

    Args:
        requests: None if the trace has no spans of requests.
    """
    trains = records.of("train")
    if not trains:
        return _without_trace(records)
    walk = _Walk(records, requests)
    befores = [-math.inf, *(train.end for train in trains)]
    waits = [_wait_before(train, before, records) for before, train in zip(befores, trains, strict=False)]
    after = max(s.end for kind in ("train", "export", "checkpoint") for s in records.of(kind))
    ends = [*(start for start, _ in waits[1:]), max(after, trains[-1].end)]
    return [walk.step(train, wait, end) for train, wait, end in zip(trains, waits, ends, strict=True)]


def total(steps: Iterable[StepDivision]) -> Seconds:
    """Sum over steps, largest first."""
    return summed(item for step in steps for item in step.seconds.items())


def summed(parts: Iterable[tuple[str, float]]) -> Seconds:
    """Sum of each cause, largest first."""
    seconds: Seconds = defaultdict(float)
    for cause, value in parts:
        seconds[cause] += value
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def savings(records: Records, steps: Sequence[StepDivision]) -> Seconds:
    """Cause -> seconds that its removal would save at most, largest first.

    A wait can save its own time. Work of the trainer can only save the part that is on the critical path: while the
    trainer works and the group that it waits for next is already in rollout, a faster trainer only waits longer.
    """
    critical = _critical_work(records, steps)
    found = {cause: min(seconds, critical.get(cause, seconds)) for cause, seconds in total(steps).items()}
    return summed((cause, seconds * CAUSES[cause].removable) for cause, seconds in found.items())


def _critical_work(records: Records, steps: Sequence[StepDivision]) -> Seconds:
    """Seconds of the trainer's work on the critical path, walked back from the end of the last step.

    From the start of a batch for which the trainer waited, the path continues at the admission of the group that it
    waited for, and from there at what allowed the admission: the end of a publish, or the start of a batch.
    """
    rollouts = {span.args.get("group"): span for span in records.of("rollout")}
    publishes = sorted(records.of("publish"), key=lambda span: span.end)
    ends = [span.end for span in publishes]
    starts = [step.wait[1] for step in steps]
    found: Seconds = dict.fromkeys(OF_TRAINER, 0.0)
    place, at = len(steps) - 1, steps[-1].end
    while place >= 0:
        step = steps[place]
        work = {cause: step.seconds.get(cause, 0.0) for cause in OF_TRAINER}
        part = min(1.0, (at - step.wait[1]) / max(1e-9, sum(work.values())))
        for cause, seconds in work.items():
            found[cause] += part * seconds
        waited = step.wait[1] - step.wait[0]
        if step.group not in rollouts or waited < NEGLIGIBLE * (step.end - step.start):
            place, at = place - 1, step.start
            continue
        admitted = rollouts[step.group].start + SOON_S
        taken, loaded = bisect_right(starts, admitted) - 1, bisect_right(ends, admitted) - 1
        if loaded >= 0 and (taken < 0 or ends[loaded] > starts[taken]):
            at = publishes[loaded].start
            place = min(place - 1, bisect_right(starts, at) - 1)
        else:
            place = min(place - 1, taken)
            at = starts[place] if place >= 0 else 0.0
    return found


def _without_trace(records: Records) -> list[StepDivision]:
    lines = records.metrics
    ends = list(accumulate(line["step/seconds"] for line in lines))
    steps = list[StepDivision]()
    for line, start, end in zip(lines, [0.0, *ends], ends, strict=False):
        waited = (end - start) * line["idle/trainer"]
        parts, wait = {"rollouts": waited, "train": end - start - waited}, (start, start + waited)
        steps.append(StepDivision(step=line["train_step"], start=start, end=end, wait=wait, group=None, seconds=parts))
    return steps


def _wait_before(train: Span, since: float, records: Records) -> tuple[float, float]:
    """The wait for a batch after `since`; from metrics.jsonl if the trace has no waits."""
    if records.of("wait"):
        found = [span for span in records.of("wait") if since <= span.start and span.end <= train.start + 1e-3]
        return (found[-1].start, found[-1].end) if found else (train.start, train.start)
    line = next((m for m in records.metrics if m["train_step"] == train.args.get("step")), None)
    waited = 0.0 if line is None else line["step/seconds"] * line["idle/trainer"]
    return max(since, train.start - waited), train.start


class _Walk:
    """Divides one step after the other."""

    def __init__(self, records: Records, requests: RequestModel | None) -> None:
        self._records = records
        self._requests = requests
        self._rollouts = {span.args["group"]: span for span in records.of("rollout") if "group" in span.args}
        self._groups = trained_groups(records)
        self._publishes = _merged(records.of("publish"))
        self._pauses = _merged(records.of("pause") or records.of("publish"))
        self._dropped = _dropped_share(records, self._rollouts)

    def step(self, train: Span, wait: tuple[float, float], end: float) -> StepDivision:
        """The division of one step."""
        step = train.args.get("step", 0)
        groups = [group for group in self._groups.get(step, ()) if group in self._rollouts and wait[1] > wait[0]]
        group = max(groups, key=lambda group: self._rollouts[group].end, default=None)  # the one that was ready last
        seconds = self._waited(group, *wait) | {"train": train.seconds}
        for kind in ("export", "checkpoint"):
            seconds[kind] = sum(s.overlap(train.end, end) for s in self._records.of(kind))
        seconds["other"] = max(0.0, end - wait[0] - sum(seconds.values()))
        return StepDivision(step=step, start=wait[0], end=end, wait=wait, group=group, seconds=seconds)

    def _waited(self, group: int | None, start: float, end: float) -> Seconds:
        if group is None or end <= start:
            return {"rollouts": end - start} if end > start else {}
        rollout = self._rollouts[group]
        admitted = min(max(start, rollout.start), end)
        seconds: Seconds = defaultdict(float, self._not_admitted(start, admitted))
        life = self._life(group, rollout)
        scale = (end - admitted) / sum(life.values()) if life else 0.0
        for cause, value in life.items():
            dropped = self._dropped if cause in OF_REQUESTS else 0.0
            seconds[cause] += value * scale * (1 - dropped)
            seconds["drops"] += value * scale * dropped
        return dict(seconds)

    def _not_admitted(self, start: float, end: float) -> Seconds:
        """Causes of the time before an admission."""
        publish = _shared(self._publishes, start, end)
        validation = min(end - start - publish, sum(s.overlap(start, end) for s in self._records.of("validate")))
        return {"publish": publish, "validation": validation, "staleness": end - start - publish - validation}

    def _life(self, group: int, rollout: Span) -> Seconds:
        """Causes of the time from admission to completion; they add up to it."""
        if self._requests is None or (found := self._requests.critical(group)) is None:
            return {"rollouts": rollout.seconds}
        seconds: Seconds = defaultdict(float)
        at, aborted = rollout.start, False
        longer = self._requests.longer_than_usual(found)
        for span in found:
            if span.end <= at:
                continue
            self._gap(at, span.start, seconds)
            part = (span.end - max(at, span.start)) / span.seconds
            if span.kind == "generate":
                for cause, value in self._requests.parts(span, aborted=aborted).items():
                    seconds[cause] += part * value
                aborted = bool(span.args.get("aborted"))
            else:
                seconds[{"tool": "tools", "score": "teacher"}.get(span.kind, "reward")] += part * span.seconds
            at = span.end
        self._gap(at, rollout.end, seconds)
        latency = seconds.pop("latency", 0.0)
        seconds["tail"] += latency * longer
        seconds["staleness"] += latency * (1 - longer)
        return seconds

    def _gap(self, start: float, end: float, seconds: dict[str, float]) -> None:
        """Time between two spans of a trajectory: a publish holds tools and requests back, or the worker is slow."""
        if end > start:
            paused = _shared(self._pauses, start, end)
            seconds["publish"] += paused
            seconds["agent"] += end - start - paused


def _dropped_share(records: Records, rollouts: Mapping[int, Span]) -> float:
    """Part of the rollout time of ended groups that was of dropped ones."""
    spent = summed((records.ledger.get(group, {}).get("outcome", "open"), s.seconds) for group, s in rollouts.items())
    dropped = spent.get("dropped", 0.0)
    return dropped / (dropped + spent.get("trained", 0.0) or 1.0)


def _merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Intervals that are in any of the spans."""
    found = list[tuple[float, float]]()
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.start, span.end))
    return found


def _shared(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of an interval that are in others; these do not overlap."""
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in intervals)
