"""Console and log file of a run: Python's logging, and a live table on a terminal."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.metrics.recorder import StepRecord, ValidationResult

NOTES = logging.getLogger("async_rl")
STEPS = logging.getLogger("async_rl.steps")
_COLUMNS = (
    ("step", "train_step", "{:.0f}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("no grad", "reward/groups_without_signal", "{:.0%}"),
    ("cut off", "rollout/cut_off_fraction", "{:.0%}"),
    ("loss", "loss", "{:+.2f}"),
    ("stale mean", "staleness/mean", "{:.2f}"),
    ("k3", "mismatch/k3", "{:.0e}"),
    ("partial", "partial/resumed_fraction", "{:.0%}"),
    ("ready", "queue/ready", "{:.0f}"),
    ("idle train", "idle/trainer", "{:.0%}"),
    ("idle roll", "idle/rollout", "{:.0%}"),
    ("tok/s", "throughput/tokens_per_s", "{:.0f}"),
)
_SHOWN_STEPS = 12


class RunConsole:
    """Writes steps, validations and notes with Python's logging, and shows steps in a table on a terminal.

    Loggers are `async_rl` for notes and `async_rl.steps` for the rest. Each line goes to the log file, with its time
    and level, and to standard output; on a terminal the lines of `async_rl.steps` are replaced by the table.

    Args:
        total_train_steps: of the run, for the time left.
        log: file to append to.
    """

    def __init__(self, *, total_train_steps: int, log: Path) -> None:
        self._total = total_train_steps
        self._first: tuple[int, float] | None = None  # first step that was shown, and its time
        self._table = LiveTable(total=total_train_steps) if sys.stdout.isatty() else None
        file = logging.FileHandler(log, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        shown, warnings = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stdout)  # above the table
        shown.addFilter(lambda record: record.levelno < logging.WARNING)
        warnings.setLevel(logging.WARNING)
        warnings.setFormatter(logging.Formatter("warning: %(message)s"))
        if self._table is not None:
            shown.addFilter(lambda record: record.name != STEPS.name)
        self._handlers = (file, shown, warnings)
        NOTES.setLevel(logging.INFO)
        for handler in self._handlers:
            NOTES.addHandler(handler)

    def step(self, record: StepRecord) -> None:
        left = self._time_left(record)
        cells = [(title, _cell(record.metrics, key, form)) for title, key, form in _COLUMNS]
        STEPS.info("%s  left %s", "  ".join(f"{title} {cell}" for title, cell in cells), left)
        if self._table is not None:
            self._table.add([cell for _, cell in cells], step=int(record.metrics["train_step"]), left=left)

    def validation(self, train_step: int, result: ValidationResult) -> None:
        text = _validation_text(train_step, result)
        STEPS.info("%s", text)
        if self._table is not None:
            self._table.set_footer(text)

    def note(self, text: str, *, level: int = logging.INFO) -> None:
        NOTES.log(level, "%s", text)

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
        for handler in self._handlers:
            NOTES.removeHandler(handler)
            handler.close()

    def _time_left(self, record: StepRecord) -> str:
        """Minutes:seconds; `--:--` for the first step and when a step is repeated after a restart.

        Step 2 at 0 s and step 4 at 60 s with a total of 10: 30 s per step, 6 steps left, 03:00.
        """
        step, now = int(record.metrics["train_step"]), time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return "--:--"
        seconds = (now - self._first[1]) / (step - self._first[0]) * (self._total - step)
        return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


class LiveTable:
    """Table of the last steps, newest validation and progress bar. Standard output appears above it until `close`.

    Args:
        total: train steps of the run.
    """

    def __init__(self, *, total: int) -> None:
        self._total = total
        self._rows: list[list[str]] = []
        self._footer = ""
        self._done = 0
        self._left = "--:--"
        self._live = Live(self._render(), refresh_per_second=4)
        self._live.start()

    def add(self, cells: list[str], *, step: int, left: str) -> None:
        """Show a step. cells: of `_COLUMNS`; left: time left."""
        self._rows = [*self._rows[1 - _SHOWN_STEPS :], cells]
        self._done, self._left = step, left
        self._live.update(self._render())

    def set_footer(self, text: str) -> None:
        """Show a line below the table."""
        self._footer = text
        self._live.update(self._render())

    def close(self) -> None:
        """Restore the terminal."""
        self._live.stop()

    def _render(self) -> Group:
        table = Table(expand=True, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        for title, _, _ in _COLUMNS:
            table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        bar = ProgressBar(total=self._total, completed=self._done)
        return Group(table, Text(self._footer), Columns([bar, Text(f"time left {self._left}")]))


def _cell(metrics: Mapping[str, float], key: str, form: str) -> str:
    value = metrics.get(key, math.nan)
    return form.format(value) if math.isfinite(value) else "-"


def _validation_text(train_step: int, result: ValidationResult) -> str:
    success = f"{result.success_rate:.3f}" if math.isfinite(result.success_rate) else "-"
    return (
        f"validation at step {train_step}: success {success} on {result.prompts - result.failed} held-out prompts, "
        f"{result.failed} failed, {result.cut_off} cut off, weights {result.min_version}..{result.max_version}"
    )
