"""Records of a run: the `.jsonl` files of its directory, trackers, and the console."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from agent_loop.user_errors import Failure
from async_rl.files.atomic_dir import make_folder, sync_path
from async_rl.files.rollouts import FOLDER, FailedRollout, FailedRollouts, RecordConfig
from async_rl.metrics.callbacks import Kind
from async_rl.metrics.lengths import Lengths
from async_rl.metrics.registry import METRICS, metric_of
from async_rl.metrics.trackers import Trackers
from async_rl.metrics.truncation import ENDED_UNRECORDED, missing_records, truncate_records, unrecorded_groups
from async_rl.metrics.validation import ValidationResult, write_rollouts

_NUMBER = re.compile(r"\d+")
WITHOUT_SIGNAL = 5
"""Batches in a row without any advantage until the run warns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Record of one batch and its train steps.

    Raises:
        ValueError: a metric is not in `async_rl.metrics.registry.METRICS`.
    """

    metrics: Mapping[str, float]
    """Key -> value; `train_step` is required."""
    staleness_tokens: Mapping[int, int]
    """Staleness in optimizer steps -> tokens in the loss."""
    schedule: Sequence[Mapping[str, Any]] | None = None
    """A record per group, see `async_rl.rollout.schedule`; None writes no line to schedule.jsonl."""

    def __post_init__(self) -> None:
        unknown = sorted(key for key in self.metrics if metric_of(key) is None)
        if unknown:
            raise ValueError(f"metrics {unknown} are not in metrics.registry.METRICS; add them with their reduction")


class Console(Protocol):
    """Output for the user during a run."""

    def step(self, record: StepRecord) -> None:
        """Show the metrics of a batch."""
        ...

    def validation(self, train_step: int, result: ValidationResult) -> None:
        """Show the result of a validation that was requested after `train_step`."""
        ...

    def note(self, text: str, *, level: int = logging.INFO) -> None:
        """Show a message. level: of Python's logging."""
        ...

    def phase(self, process: str, text: str) -> None:
        """Show what a process does."""
        ...

    def close(self) -> None:
        """Flush the output and restore the terminal."""
        ...


class Recorder:
    """Writes every record immediately, one line each.

    If the process is killed, all records so far are on file as complete lines. After a power loss, all records before
    the last `sync` are.

    Args:
        directory: run directory; created if it does not exist.
        console: gets every record except those of the ledger; None shows nothing.
        trackers: get metrics and held-out rollouts; None for no trackers.
        rollouts: bounds on the failed rollouts that are kept; None keeps none.
        tell: called with the kind of an event, its train step and metrics; see `async_rl.metrics.callbacks`.

    Attributes:
        lengths: lengths of trajectories, updated by the caller; each step records their quantiles.
        checkpointed: set by the caller after each checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        *,
        console: Console | None,
        trackers: Trackers | None = None,
        rollouts: RecordConfig | None = None,
        tell: Callable[[Kind, int, Mapping[str, float]], None] = lambda _kind, _step, _metrics: None,
    ) -> None:
        make_folder(directory)
        self._tell = tell
        self._last: Mapping[str, float] = {}
        self._directory = directory
        self._open()
        self._console = console
        self._trackers = trackers
        self.lengths = Lengths()
        self.checkpointed = asyncio.Event()
        self._warned: dict[tuple[str, str], int] = {}
        self._without_signal = 0  # batches in a row
        self._failed = FailedRollouts(directory / FOLDER, config=rollouts or RecordConfig(steps=0))
        self._train_step = 0

    def resume_after(
        self, train_step: int, *, next_group: int, live: Collection[int], trained: int | None = None
    ) -> None:
        """Prepare the records for resuming after `train_step`.

        Removes records of later steps, adds ledger records of groups whose end was not recorded because the run was
        killed, and warns if records are missing.

        Args:
            train_step: step of the checkpoint.
            next_group: first group id that was not admitted before the checkpoint.
            live: ids of groups that are still in flight; their end is not recorded yet.
            trained: number of groups trained up to `train_step`. The ledger must have all these groups, and the step
                files all steps. None skips this check, for a checkpoint of another run.
        """
        self._close_files()
        self._train_step = train_step
        lost = [] if trained is None else missing_records(self._directory, train_step=train_step, trained=trained)
        truncate_records(self._directory, train_step=train_step, next_group=next_group, live=live)
        self._open()
        unrecorded = unrecorded_groups(self._directory, next_group=next_group, live=live, lost=bool(lost))
        self.ledger(unrecorded)
        for text in lost:
            self.warn(text)
        if unrecorded and not lost:
            self.note(f"added {len(unrecorded)} groups to ledger.jsonl as dropped: each {ENDED_UNRECORDED}")

    def sync(self) -> None:
        """Return when all records so far survive a power loss. Blocks; may be called in a thread.

        No flush is needed: the files are line-buffered, and a record is a line.
        """
        for file in self._files():
            os.fsync(file.fileno())
        sync_path(self._directory)

    def step(self, record: StepRecord) -> None:
        """Record the train steps of one batch."""
        metrics = {**record.metrics, **self.lengths.metrics()}
        step = self._train_step = int(metrics["train_step"])
        listed = [key for key in METRICS if key in metrics]
        line: dict[str, Any] = {key: metrics[key] for key in (*listed, *(key for key in metrics if key not in METRICS))}
        line["staleness/tokens"] = {str(lag): n for lag, n in record.staleness_tokens.items()}
        self._metrics.write(_json_line(line))
        if record.schedule is not None:
            made = int(metrics.get("optimizer_steps", 1))
            self._schedule.write(_json_line({"train_step": step, "optimizer_steps": made, "groups": record.schedule}))
        if self._trackers is not None:
            self._trackers.log(metrics, step)
        self._last = metrics
        self._tell("step", step, metrics)
        if self._console is not None:
            self._console.step(StepRecord(metrics=metrics, staleness_tokens=record.staleness_tokens))
        self._without_signal += 1
        if metrics.get("reward/groups_without_signal", 0) < 1:
            self._without_signal = 0
        elif self._without_signal == WITHOUT_SIGNAL:
            self.warn(
                f"in {WITHOUT_SIGNAL} batches in a row all rewards of each group were equal, so that no advantage is "
                "left; look at the newest rollouts, then change the prompts, the reward or rollout.sampling.temperature"
            )

    def validation(self, train_step: int, result: ValidationResult) -> None:
        """Record one round over the held-out prompts, requested after `train_step`."""
        metrics = result.metrics()
        self._validation.write(_json_line({"train_step": train_step, **metrics}))
        if self._trackers is not None:
            self._trackers.log(metrics, train_step)
            self._trackers.table(result.rows(train_step), train_step)
        self._tell("validation", train_step, metrics)
        if self._console is not None:
            self._console.validation(train_step, result)

    def published(self, train_step: int, metrics: Mapping[str, float]) -> None:
        """Tell that the replicas serve the weights of a train step."""
        self._tell("publish", train_step, metrics)

    def ended(self) -> None:
        """Tell that the run has ended."""
        self._tell("end", self._train_step, self._last)

    def validation_rollouts(self, train_step: int, result: ValidationResult) -> None:
        """Write the rollouts of the newest round to validation_rollouts.jsonl. Blocks; may be called in a thread."""
        write_rollouts(self._directory / "validation_rollouts.jsonl", result, train_step=train_step)

    def failed_rollout(self, rollout: FailedRollout) -> None:
        """Write a failed rollout to `rollouts/`, within the bounds."""
        self._failed.add(rollout, train_step=self._train_step)

    def ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the outcomes of groups."""
        for record in records:
            self._ledger.write(_json_line(record))

    def note(self, text: str, *, level: int = logging.INFO) -> None:
        """Show a message on the console. level: of Python's logging."""
        if self._console is not None:
            self._console.note(text, level=level)

    def warn(self, text: str) -> None:
        """Show a warning on the console about a fault that does not stop the run."""
        self.note(text, level=logging.WARNING)

    def warn_once(self, failure: Failure) -> None:
        """Show a warning that may repeat: the first, the 10th, the 100th and so on, with their number.

        Two failures are the same if kind and line of the user are; without a line, if their texts differ in numbers
        only.
        """
        text = failure.text
        kind = (failure.kind, failure.line or _NUMBER.sub("#", text))
        self._warned[kind] = count = self._warned.get(kind, 0) + 1
        if count == 10 ** (len(str(count)) - 1):
            self.warn(text if count == 1 else f"{count} times so far: {text}")

    def close(self) -> None:
        """Flush and close every sink."""
        self._close_files()
        if self._trackers is not None:
            self._trackers.close()
        if self._console is not None:
            self._console.close()

    def _open(self) -> None:
        self._metrics = (self._directory / "metrics.jsonl").open("a", buffering=1)
        self._validation = (self._directory / "validation.jsonl").open("a", buffering=1)
        self._schedule = (self._directory / "schedule.jsonl").open("a", buffering=1)
        self._ledger = (self._directory / "ledger.jsonl").open("a", buffering=1)

    def _files(self) -> Sequence[TextIO]:
        return self._metrics, self._validation, self._schedule, self._ledger

    def _close_files(self) -> None:
        for file in self._files():
            file.close()


def strict_json(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON with null for NaN and infinities."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean, allow_nan=False, indent=indent)


def _json_line(record: Mapping[str, Any]) -> str:
    return strict_json(record) + "\n"
