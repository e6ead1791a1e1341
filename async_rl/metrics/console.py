"""Console output: a live table on a terminal, otherwise one plain line per step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.metrics.recorder import Console, StepRecord, ValidationResult

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


def open_console(*, total_train_steps: int, log: Path) -> Console:
    """A live table on a terminal, otherwise plain lines. Plain lines are also appended to the file `log`."""
    clock = _Clock(total=total_train_steps)
    shown = LiveConsole(clock) if sys.stdout.isatty() else PlainConsole(clock)
    return LoggedConsole(shown, log=PlainConsole(_Clock(total=total_train_steps), out=log.open("a")))


class LoggedConsole:
    """Writes every event to the console and to its log file."""

    def __init__(self, shown: Console, *, log: Console) -> None:
        self._both = (shown, log)

    def step(self, record: StepRecord) -> None:
        for console in self._both:
            console.step(record)

    def validation(self, train_step: int, result: ValidationResult) -> None:
        for console in self._both:
            console.validation(train_step, result)

    def note(self, text: str) -> None:
        for console in self._both:
            console.note(text)

    def close(self) -> None:
        for console in self._both:
            console.close()


class PlainConsole:
    """One line per event, for files and pipes.

    Args:
        clock: for the time left.
        out: file, which `close` closes; None for standard output.
    """

    def __init__(self, clock: _Clock, *, out: TextIO | None = None) -> None:
        self._clock = clock
        self._file = out
        self._out = RichConsole(file=out, highlight=False, markup=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        cells = "  ".join(f"{title} {_cell(record.metrics, key, form)}" for title, key, form in _COLUMNS)
        self._out.print(f"{cells}  left {self._clock.left(record)}")

    def validation(self, train_step: int, result: ValidationResult) -> None:
        self._out.print(_validation_text(train_step, result))

    def note(self, text: str) -> None:
        self._out.print(text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class LiveConsole:
    """Table of the last steps, newest validation and progress bar."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._rows: list[list[str]] = []
        self._footer = ""
        self._done = 0
        self._left = "--:--"
        self._live = Live(self._render(self._left), refresh_per_second=4)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        self._rows = [*self._rows[1 - _SHOWN_STEPS :], [_cell(record.metrics, key, form) for _, key, form in _COLUMNS]]
        self._done = int(record.metrics["train_step"])
        self._left = self._clock.left(record)
        self._live.update(self._render(self._left))

    def validation(self, train_step: int, result: ValidationResult) -> None:
        self._footer = _validation_text(train_step, result)
        self._live.update(self._render(self._left))

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def close(self) -> None:
        self._live.stop()

    def _render(self, left: str) -> Group:
        table = Table(expand=True, box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
        for title, _, _ in _COLUMNS:
            table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        bar = ProgressBar(total=self._clock.total, completed=self._done)
        return Group(table, Text(self._footer), Columns([bar, Text(f"time left {left}")]))


class _Clock:
    """Estimates the time left from the mean time between recorded steps."""

    def __init__(self, *, total: int) -> None:
        self.total = total
        self._first: tuple[int, float] | None = None

    def left(self, record: StepRecord) -> str:
        """Time left as minutes:seconds; `--:--` for the first step and when a step is repeated after a restart.

        Step 2 at 0 s and step 4 at 60 s with total=10: 30 s per step, 6 steps left, 03:00.
        """
        step, now = int(record.metrics["train_step"]), time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return "--:--"
        seconds = (now - self._first[1]) / (step - self._first[0]) * (self.total - step)
        return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _cell(metrics: Mapping[str, float], key: str, form: str) -> str:
    value = metrics.get(key, math.nan)
    return form.format(value) if math.isfinite(value) else "-"


def _validation_text(train_step: int, result: ValidationResult) -> str:
    success = f"{result.success_rate:.3f}" if math.isfinite(result.success_rate) else "-"
    return (
        f"validation at step {train_step}: success {success} on {result.prompts - result.failed} held-out prompts, "
        f"{result.failed} failed, {result.cut_off} cut off, weights {result.min_version}..{result.max_version}"
    )
