"""Where a run's numbers go: the `.jsonl` files of its directory, TensorBoard, and the console."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from async_rl.folders import make_folder, sync_path
from async_rl.observe.lengths import Lengths
from async_rl.observe.metrics import METRICS, metric_of
from async_rl.observe.rewind import ENDED_UNSEEN, missing_records, rewind, unseen_groups
from async_rl.rollout.validator import ValidationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One batch, and the train steps that were made on it.

    staleness_tokens: sampled tokens of the batch by staleness. schedule: see `async_rl.rollout.schedule`.
    """

    metrics: Mapping[str, float]
    staleness_tokens: Mapping[int, int]
    schedule: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        unknown = sorted(key for key in self.metrics if metric_of(key) is None)
        if unknown:
            raise ValueError(f"metrics {unknown} are not in observe.metrics.METRICS; add them with their reduction")


class Console(Protocol):
    """What a person sees while the run goes on."""

    def step(self, record: StepRecord) -> None: ...
    def validation(self, train_step: int, result: ValidationResult) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class Scalars(Protocol):
    """The part of TensorBoard's SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Writes every record as it comes; a run that is cut short leaves whole lines, a loss of power what was synced.

    lengths: of trajectories, to be told of; their quantiles go with each step.
    """

    def __init__(self, directory: Path, *, console: Console, scalars: Scalars) -> None:
        make_folder(directory)
        self._directory = directory
        self._open()
        self._console = console
        self._scalars = scalars
        self.lengths = Lengths()

    def go_on_after(
        self, train_step: int, *, next_group: int, live: Collection[int], trained: int | None = None
    ) -> None:
        """Take back what was recorded after `train_step`, and add groups whose end a kill kept from the record.

        Args:
            next_group: groups with smaller ids were admitted. live: of them, those whose end is yet to be recorded.
            trained: groups trained up to `train_step`, all of which are to be recorded, as are the steps: what is
                missing is told. None where the records need not have them, as those of another run.
        """
        self._close_files()
        lost = [] if trained is None else missing_records(self._directory, train_step=train_step, trained=trained)
        rewind(self._directory, train_step=train_step, next_group=next_group, live=live)
        self._open()
        unseen = unseen_groups(self._directory, next_group=next_group, live=live, lost=bool(lost))
        self.ledger(unseen)
        for text in lost:
            self.warn(text)
        if unseen and not lost:
            self.note(f"ledger.jsonl has {len(unseen)} groups more: {ENDED_UNSEEN}, and why they ended is not known")

    def sync(self) -> None:
        """Return once all that was recorded so far survives a loss of power. Blocks; may be called in a thread.

        What was recorded has left Python's buffers: the files are line-buffered, and a record is a line.
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
                self._scalars.add_scalar(key, value, step)
        self._console.step(StepRecord(metrics=metrics, staleness_tokens=record.staleness_tokens))

    def validation(self, train_step: int, result: ValidationResult) -> None:
        """Record one round over the held-out prompts, asked for after `train_step`."""
        self._validation.write(
            _json_line(
                {
                    "train_step": train_step,
                    "validation/success": result.success_rate,
                    "validation/prompts": result.prompts,
                    "validation/failed": result.failed,
                    "validation/cut_off": result.cut_off,
                    "validation/mean_tokens": result.mean_tokens,
                    "validation/min_version": result.min_version,
                    "validation/max_version": result.max_version,
                }
            )
        )
        if math.isfinite(result.success_rate):
            self._scalars.add_scalar("validation/success", result.success_rate, train_step)
        self._console.validation(train_step, result)

    def ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append what became of groups."""
        for record in records:
            self._ledger.write(_json_line(record))

    def note(self, text: str) -> None:
        """Tell the person at the console."""
        self._console.note(text)

    def warn(self, text: str) -> None:
        """Tell the person at the console that something is off, though the run goes on."""
        self._console.note(f"warning: {text}")

    def close(self) -> None:
        """Flush and close every sink."""
        self._close_files()
        self._scalars.close()
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


def _json_line(record: Mapping[str, Any]) -> str:
    """Strict JSON: NaN and infinities become null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean, allow_nan=False) + "\n"
