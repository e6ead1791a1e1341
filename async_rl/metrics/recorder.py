"""Records of a run: the `.jsonl` files of its directory, TensorBoard, and the console."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from async_rl.files.atomic_dir import make_folder, sync_path
from async_rl.metrics.lengths import Lengths
from async_rl.metrics.registry import METRICS, metric_of
from async_rl.metrics.truncation import ENDED_UNRECORDED, missing_records, truncate_records, unrecorded_groups

_USER_LINE = re.compile(r"\(([^()]+:\d+ in [^()]+)\)")
_NUMBER = re.compile(r"\d+")

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """One round over the held-out prompts.

    Rewards 1, 0 and a reward that raised, of 3 prompts: success_rate 0.5, prompts 3, failed 1.
    """

    success_rate: float
    """Mean reward of the finished rollouts; NaN if none finished."""
    prompts: int
    """Number of prompts."""
    samples: int = 1
    """Rollouts of each prompt."""
    failed: int
    """Rollouts that raised an error; excluded from `success_rate`."""
    cut_off: int
    """Finished rollouts whose last turn hit a token limit."""
    mean_tokens: float
    """Tokens per finished rollout, including prompt and tool replies; NaN if none finished."""
    min_version: int
    """Oldest weights that sampled a token; -1 if none was sampled."""
    max_version: int
    """Newest weights that sampled a token; -1 if none was sampled."""
    pass_at: Mapping[int, float] = field(default_factory=dict[int, float])
    """k -> mean pass@k of the prompts with at least k finished rollouts, NaN if there are none. k is a power of two up
    to `samples`; empty if that is 1. A rollout is right if its reward is above 0."""
    sets: Mapping[str, ValidationResult] = field(default_factory=dict[str, "ValidationResult"])
    """Name -> result over the prompts of the set; empty if the sets of the task have no names."""
    first_error: str | None = None
    """Error of the first prompt with a failed rollout."""

    @property
    def rollouts(self) -> int:
        """Number of rollouts, including failed ones."""
        return self.prompts * self.samples

    def metrics(self, prefix: str = "validation/") -> dict[str, float]:
        """Key -> value, as in validation.jsonl: of the round, then of each set below `prefix` and its name."""
        return {
            f"{prefix}success": self.success_rate,
            **{f"{prefix}pass_at_{k}": value for k, value in self.pass_at.items()},
            f"{prefix}prompts": self.prompts,
            f"{prefix}samples": self.samples,
            f"{prefix}failed": self.failed,
            f"{prefix}cut_off": self.cut_off,
            f"{prefix}mean_tokens": self.mean_tokens,
            f"{prefix}min_version": self.min_version,
            f"{prefix}max_version": self.max_version,
            **{
                key: value
                for name, each in self.sets.items()
                for key, value in each.metrics(f"{prefix}{name}/").items()
            },
        }


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

    def close(self) -> None:
        """Flush the output and restore the terminal."""
        ...


class Recorder:
    """Writes every record immediately, one line each.

    If the process is killed, all records so far are on file as complete lines. After a power loss, all records before
    the last `sync` are.

    Args:
        directory: of the run; created if it does not exist.
        console: gets every record except those of the ledger; None shows nothing.
        scalars: TensorBoard writer for the finite metrics; None for no TensorBoard.

    Attributes:
        lengths: lengths of trajectories, updated by the caller; each step records their quantiles.
    """

    def __init__(self, directory: Path, *, console: Console | None, scalars: SummaryWriter | None) -> None:
        make_folder(directory)
        self._directory = directory
        self._open()
        self._console = console
        self._scalars = scalars
        self.lengths = Lengths()
        self._warned: dict[str, int] = {}

    def resume_after(
        self, train_step: int, *, next_group: int, live: Collection[int], trained: int | None = None
    ) -> None:
        """Prepare the records for resuming after `train_step`.

        Removes records of later steps, adds ledger records of groups whose end was not recorded because the run was
        killed, and warns if records are missing.

        Args:
            train_step: of the checkpoint.
            next_group: first group id that was not admitted before the checkpoint.
            live: ids of groups that are still in flight; their end is not recorded yet.
            trained: number of groups trained up to `train_step`. The ledger must have all these groups, and the step
                files all steps. None skips this check, for a checkpoint of another run.
        """
        self._close_files()
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
        step = int(metrics["train_step"])
        listed = [key for key in METRICS if key in metrics]
        line: dict[str, Any] = {key: metrics[key] for key in (*listed, *(key for key in metrics if key not in METRICS))}
        line["staleness/tokens"] = {str(lag): n for lag, n in record.staleness_tokens.items()}
        self._metrics.write(_json_line(line))
        if record.schedule is not None:
            made = int(metrics.get("optimizer_steps", 1))
            self._schedule.write(_json_line({"train_step": step, "optimizer_steps": made, "groups": record.schedule}))
        for key, value in metrics.items():
            if math.isfinite(value):
                self._scalar(key, value, step)
        if self._console is not None:
            self._console.step(StepRecord(metrics=metrics, staleness_tokens=record.staleness_tokens))

    def validation(self, train_step: int, result: ValidationResult) -> None:
        """Record one round over the held-out prompts, requested after `train_step`."""
        metrics = result.metrics()
        self._validation.write(_json_line({"train_step": train_step, **metrics}))
        for key, value in metrics.items():
            if math.isfinite(value):
                self._scalar(key, value, train_step)
        if self._console is not None:
            self._console.validation(train_step, result)

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

    def warn_once(self, text: str) -> None:
        """Show a warning that may come again and again: the first, the 10th, the 100th and so on, with their number.

        Two texts are the same if they differ in numbers only, or name the same line of the user.
        """
        kind = _kind_of(text)
        self._warned[kind] = count = self._warned.get(kind, 0) + 1
        if count == 10 ** (len(str(count)) - 1):
            self.warn(text if count == 1 else f"{count} times so far: {text}")

    def close(self) -> None:
        """Flush and close every sink."""
        self._close_files()
        if self._scalars is not None:
            self._scalars.close()
        if self._console is not None:
            self._console.close()

    def _scalar(self, key: str, value: float, train_step: int) -> None:
        if self._scalars is not None:
            self._scalars.add_scalar(key, value, train_step)

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


def _kind_of(text: str) -> str:
    """A text without its numbers; if it names a line of a user, its start and this line.

    `rollout g3-t1 failed: ValueError: no number in 'x' (/a/b.py:12 in exact)` gives
    `rollout g#-t# failed/a/b.py:12 in exact`.
    """
    line = _USER_LINE.search(text)
    start = text if line is None else text.partition(":")[0]
    return _NUMBER.sub("#", start) + ("" if line is None else line[1])


def _json_line(record: Mapping[str, Any]) -> str:
    """Strict JSON: NaN and infinities become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean, allow_nan=False) + "\n"
