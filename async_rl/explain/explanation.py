"""The whole explanation of a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.explain.division import Seconds, StepDivision, divide, savings, total
from async_rl.explain.overrides import Prediction, predict
from async_rl.explain.waits import GroupWait, Staleness, longest_in_queue, longest_waited_for, staleness
from async_rl.plan.measured import describe, filling
from async_rl.plan.records import Records, RecordsError, read_records
from async_rl.plan.requests import RequestModel

NUM_WAITS = 3


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
    def first_step(self) -> int:
        """First train step."""
        return self.steps[0].step

    @property
    def last_step(self) -> int:
        """Last train step."""
        return self.steps[-1].step

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
        return {
            "limit": self.limit,
            "steps_per_hour": self.steps_per_hour,
            "seconds": self.seconds,
            "savings": self.savings,
            "trainer": self.trainer,
            "tflops": self.tflops,
            "mfu": self.mfu,
            "steps": [asdict(step) for step in self.steps],
            "staleness": None if self.staleness is None else asdict(self.staleness),
            "waited_for": [asdict(wait) for wait in self.waited_for],
            "in_queue": [asdict(wait) for wait in self.in_queue],
            "predictions": predictions,
            "simulated_step_s": self.simulated_step_s,
            "signal": self.signal,
            "notes": list(self.notes),
        }


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
        trainer=_trainer(records, steps),
        tflops=_mean(records, steps, "throughput/train_tflops"),
        mfu=_mean(records, steps, "throughput/mfu"),
        staleness=staleness(records),
        waited_for=longest_waited_for(steps, count=NUM_WAITS),
        in_queue=longest_in_queue(records, steps, count=NUM_WAITS),
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


def _trainer(records: Records, steps: Sequence[StepDivision]) -> Seconds:
    """Seconds of the first trainer rank by kind."""
    found: Seconds = {}
    for span in records.rank_spans:
        found[span.kind] = found.get(span.kind, 0.0) + span.overlap(steps[0].start, steps[-1].end)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
