"""Records of a run: the `.jsonl` files of its directory, trackers, and the console.

A resumed run truncates the files to its checkpoint, so that no step or group appears twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from agent_loop.user_errors import Failure
from async_rl.files.atomic_dir import make_folder, sync_path, whole_file
from async_rl.files.jsonl import read_lines
from async_rl.files.rollouts import FOLDER, FailedRollout, FailedRollouts, RecordConfig
from async_rl.metrics.callbacks import Kind
from async_rl.metrics.console import RunConsole
from async_rl.metrics.lengths import Lengths
from async_rl.metrics.registry import METRICS, StepRecord
from async_rl.metrics.trackers import Trackers
from async_rl.metrics.validation import ValidationResult, write_rollouts
from message_queue.ledger import Drop, DropKind

WITHOUT_SIGNAL = 5
"""Batches in a row without any advantage until the run warns."""
ENDED_UNRECORDED = Drop(DropKind.UNRECORDED, "the run was killed")
RECORD_LOST = Drop(
    DropKind.RECORD_LOST, "the group was trained before the checkpoint or dropped; the file is incomplete"
)
_OF_STEPS = ("metrics", "validation", "schedule")
"""Names of the files whose lines have a train step."""


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
        console: RunConsole | None,
        trackers: Trackers | None = None,
        rollouts: RecordConfig | None = None,
        tell: Callable[[Kind, int, Mapping[str, float]], None] = lambda _kind, _step, _metrics: None,
    ) -> None:
        make_folder(directory)
        self._directory, self._console, self._tell = directory, console, tell
        self._trackers = trackers or Trackers({}, warn=self.warn)
        self._files = self._open()
        self._last: Mapping[str, float] = {}
        self.lengths = Lengths()
        self.checkpointed = asyncio.Event()
        self._warned = Counter[tuple[str, str]]()
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
        self._train_step = train_step
        lost = [] if trained is None else missing_records(self._directory, train_step=train_step, trained=trained)
        truncate_records(self._directory, train_step=train_step, next_group=next_group, live=live)
        for file in self._files.values():
            file.close()
        self._files = self._open()
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
        for file in self._files.values():
            os.fsync(file.fileno())
        sync_path(self._directory)

    def step(self, record: StepRecord) -> None:
        """Record the train steps of one batch."""
        metrics = {**record.metrics, **self.lengths.metrics()}
        step = self._train_step = int(metrics["train_step"])
        listed = {key: metrics[key] for key in METRICS if key in metrics}
        self._write("metrics", {**listed, **metrics, "staleness/tokens": dict(record.staleness_tokens)})
        if record.schedule is not None:
            made = int(metrics.get("optimizer_steps", 1))
            self._write("schedule", {"train_step": step, "optimizer_steps": made, "groups": record.schedule})
        self._trackers.log(metrics, step)
        self._last = metrics
        self._tell("step", step, metrics)
        if self._console is not None:
            self._console.step(replace(record, metrics=metrics))
        is_without = metrics.get("reward/groups_without_signal", 0) >= 1
        self._without_signal = self._without_signal + 1 if is_without else 0
        if self._without_signal == WITHOUT_SIGNAL:
            self.warn(
                f"in {WITHOUT_SIGNAL} batches in a row all rewards of each group were equal, so that no advantage is "
                "left; look at the newest rollouts, then change the prompts, the reward or rollout.sampling.temperature"
            )

    def validation(self, train_step: int, result: ValidationResult) -> None:
        """Record one round over the held-out prompts, requested after `train_step`."""
        metrics = result.metrics()
        self._write("validation", {"train_step": train_step, **metrics})
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
            self._write("ledger", record)

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
        kind = (failure.kind, failure.line or re.sub(r"\d+", "#", text))
        self._warned[kind] += 1
        count = self._warned[kind]
        if count == 10 ** (len(str(count)) - 1):
            self.warn(text if count == 1 else f"{count} times so far: {text}")

    def close(self) -> None:
        """Flush and close every sink."""
        for sink in (*self._files.values(), self._trackers, self._console):
            if sink is not None:
                sink.close()

    def _open(self) -> dict[str, TextIO]:
        return {name: (self._directory / f"{name}.jsonl").open("a", buffering=1) for name in (*_OF_STEPS, "ledger")}

    def _write(self, name: str, record: Mapping[str, Any]) -> None:
        self._files[name].write(strict_json(record) + "\n")


def strict_json(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON with null for NaN and infinities."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean, allow_nan=False, indent=indent)


# ---- truncation to a checkpoint


def truncate_records(
    directory: Path, *, train_step: int, next_group: int | None = None, live: Collection[int] = ()
) -> None:
    """Remove records that do not belong to the checkpoint of `train_step`; each file is replaced atomically.

    metrics.jsonl, validation.jsonl and schedule.jsonl keep lines up to `train_step`. ledger.jsonl keeps groups that
    were trained up to `train_step` or dropped, without those of `live` and those from `next_group` on, because new
    groups get these ids. Damaged lines are removed. The arguments are as in `Recorder.resume_after`.
    """

    def is_kept(line: Mapping[str, Any]) -> bool:
        if "outcome" not in line:
            return line["train_step"] <= train_step
        group, outcome = line.get("group", 0), line["outcome"]
        ended = outcome == "dropped" or (outcome == "trained" and line["train_step"] <= train_step)
        return ended and group not in live and (next_group is None or group < next_group)

    for path in (directory / f"{name}.jsonl" for name in (*_OF_STEPS, "ledger")):
        if path.is_file():
            with whole_file(path) as partial:
                with partial.open("w") as file:
                    file.writelines(json.dumps(line) + "\n" for line in _lines(path) if is_kept(line))
                sync_path(partial)


def missing_records(directory: Path, *, train_step: int, trained: int) -> list[str]:
    """Describe records that are missing although the checkpoint includes them, one sentence per file.

    Call this before `truncate_records`. Records are synced before the checkpoint is written: they are missing only if a
    file was changed or the disk failed. A line of metrics.jsonl covers the `optimizer_steps` steps up to its
    `train_step`; with the lines (train_step=2, optimizer_steps=2) and (6, 2) and a checkpoint of step 6 the steps 3 and
    4 are missing. Steps before the first line are not expected, because they may be in the directory of another run.
    """
    found = {
        name: {
            step
            for line in _lines(directory / name)
            for step in range(line["train_step"] - line.get("optimizer_steps", 1) + 1, line["train_step"] + 1)
        }
        for name in ("metrics.jsonl", "schedule.jsonl")
    }
    lost: list[str] = []
    for name, steps in found.items():
        missing = sorted(set(range(min(steps, default=1), train_step + 1)) - steps)
        if missing and (steps or name == "metrics.jsonl"):
            lost.append(f"{name} lacks {len(missing)} train steps, {missing[0]} to {missing[-1]}")
    if min(found["metrics.jsonl"], default=1) == 1:  # else earlier groups are in the records of another run
        lines = _lines(directory / "ledger.jsonl")
        recorded = sum(line["outcome"] == "trained" and line["train_step"] <= train_step for line in lines)
        if recorded < trained:
            lost.append(f"ledger.jsonl has {recorded} of {trained} groups that were trained")
    why = f"though the checkpoint of train step {train_step} is newer; the file was changed or cut by a power loss"
    return [f"{text}, {why}. The run continues without these records" for text in lost]


def unrecorded_groups(
    directory: Path, *, next_group: int, live: Collection[int], lost: bool = False
) -> list[dict[str, Any]]:
    """Ledger records for groups that ended without one because the run was killed; their outcome is `dropped`.

    Args:
        lost: whether records of trained groups are missing too, so that the groups may have been trained; the reason
            is then `RECORD_LOST`.
    """
    reason = RECORD_LOST if lost else ENDED_UNRECORDED
    seen = {line.get("group") for line in _lines(directory / "ledger.jsonl")}
    unknown = dict.fromkeys(("train_step", "segments", "tokens", "masked_tokens"))
    known = {"admitted_version": None, "outcome": "dropped", "kind": reason.kind, "reason": str(reason)}
    ended = (group for group in range(next_group) if group not in seen and group not in live)
    return [{"group": group, **known, **unknown} for group in ended]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file without damaged lines; none if the file does not exist."""
    for line in read_lines(path, errors="replace") if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
