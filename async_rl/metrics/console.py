"""Console and log file of a run: Python's logging, and a live view on a terminal."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from async_rl.files.masking import mask_text
from async_rl.metrics.registry import StepRecord
from async_rl.metrics.validation import ValidationResult

NOTES, STEPS = logging.getLogger("async_rl"), logging.getLogger("async_rl.steps")
LIBRARIES = logging.getLogger("py.warnings")  # Python's warnings
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
    ("mfu", "throughput/mfu", "{:.0%}"),
)
_OPTIONAL = ("throughput/mfu",)  # their column is only there if they are
_SHOWN_STEPS = 12
AVERAGED = ("idle/trainer", "idle/rollout", "throughput/tokens_per_s")
WINDOW = 10  # batches in the means of AVERAGED, because single batches swing
WARNING_CHARS = 240  # of the last warning, about three lines of 80 characters


class RunConsole:
    """Writes steps, validations and notes with Python's logging, and shows them in a live view on a terminal.

    Loggers are `async_rl` for notes and `async_rl.steps` for the rest. Each line goes to the log file, with its time
    and level, and to standard output. On a terminal the view replaces the lines of steps and warnings. The warnings of
    Python (those of libraries) go to the log file only.

    Args:
        total_train_steps: number of train steps of the run, for the time left.
        log: file to append to.
    """

    def __init__(self, *, total_train_steps: int, log: Path) -> None:
        self._total = total_train_steps
        self._first: tuple[int, float] | None = None  # first step that was shown, and its time
        self._recent: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=WINDOW)
        self._phases: dict[str, str] = {}
        self._view = LiveView(total=total_train_steps, log=log) if sys.stdout.isatty() else None
        file = logging.FileHandler(log, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        shown, warnings = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stdout)  # above the view
        shown.addFilter(lambda record: record.levelno < logging.WARNING)
        warnings.setLevel(logging.WARNING)
        warnings.setFormatter(logging.Formatter("warning: %(message)s"))
        if self._view is not None:
            shown.addFilter(lambda record: record.name != STEPS.name)
            warnings.addFilter(lambda record: "\n" in record.getMessage())  # the end of a log, for instance
        self._handlers = (file, shown, warnings)
        logging.captureWarnings(True)
        LIBRARIES.addHandler(file)
        LIBRARIES.propagate = False
        NOTES.setLevel(logging.INFO)
        for handler in self._handlers:
            NOTES.addHandler(handler)

    def step(self, record: StepRecord) -> None:
        """Show the metrics of a batch."""
        self._end_phases()
        left, metrics = self._time_left(record), self._averaged(record)
        shown = [column for column in _COLUMNS if column[1] not in _OPTIONAL or column[1] in metrics]
        cells = {title: _cell(metrics, key, form) for title, key, form in shown}
        STEPS.info("%s  left %s", "  ".join(f"{title} {cell}" for title, cell in cells.items()), left)
        if self._view is not None:
            self._view.add(cells, step=int(record.metrics["train_step"]), left=left)

    def validation(self, train_step: int, result: ValidationResult) -> None:
        """Show the result of a validation that was requested after `train_step`."""
        self._end_phases()
        of = "held-out prompts" if result.samples == 1 else f"rollouts of {result.prompts} held-out prompts"
        sets = "".join(f"; {name}: {_success(each)}" for name, each in result.sets.items())
        text = (
            f"validation at step {train_step}: {_success(result)} on {result.num_rollouts - result.failed} {of}, "
            f"{result.failed} failed, {result.cut_off} cut off, "
            f"weights {result.min_version}..{result.max_version}{sets}"
        )
        STEPS.info("%s", text)
        if self._view is not None:
            self._view.footer = text

    def note(self, text: str, *, level: int = logging.INFO) -> None:
        """Show a message. level: of Python's logging."""
        text = mask_text(text)
        NOTES.log(level, "%s", text)
        if self._view is not None and level >= logging.WARNING:
            self._view.warn(text)

    def warn(self, text: str) -> None:
        """Show a warning."""
        self.note(text, level=logging.WARNING)

    def phase(self, process: str, text: str) -> None:
        """Show what a process, or several of a kind, does. All are shown until the next step or validation.

        On a terminal they are one line that lives, elsewhere a line for each change.
        """
        if self._phases.get(process) == text:
            return
        self._phases[process] = text
        STEPS.info("%s: %s", process, text)
        if self._view is not None:
            self._view.set_status("  ".join(f"{name}: {each}" for name, each in self._phases.items()))

    def close(self) -> None:
        """Flush the output and restore the terminal."""
        if self._view is not None:
            self._view.close()
        logging.captureWarnings(False)
        LIBRARIES.removeHandler(self._handlers[0])
        LIBRARIES.propagate = True
        for handler in self._handlers:
            NOTES.removeHandler(handler)
            handler.close()

    def _end_phases(self) -> None:
        self._phases.clear()
        if self._view is not None:
            self._view.set_status("")

    def _averaged(self, record: StepRecord) -> dict[str, float]:
        """The metrics, with means of AVERAGED over the time of the last batches.

        100 tokens in 1 s and 100 tokens in 3 s: 50 tokens per second.
        """
        metrics = dict(record.metrics)
        tokens, rate = sum(record.staleness_tokens.values()), metrics.get("throughput/tokens_per_s", 0.0)
        if not (tokens and rate > 0):
            return metrics
        self._recent.append((tokens / rate, metrics))
        seconds = sum(each for each, _ in self._recent)
        means = {key: sum(each * m.get(key, math.nan) for each, m in self._recent) / seconds for key in AVERAGED}
        return metrics | means

    def _time_left(self, record: StepRecord) -> str:
        """Minutes:seconds; `--:--` for the first step and when a step is repeated after a restart.

        Step 2 at 0 s and step 4 at 60 s with a total of 10: 30 s per step, 6 steps left, 03:00.
        """
        step, now = int(record.metrics["train_step"]), time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return "--:--"
        return _clock((now - self._first[1]) / (step - self._first[0]) * (self._total - step))


class LiveView:
    """Last steps, newest validation, last warning, status and progress. Other output appears above it until `close`.

    Args:
        total: train steps of the run.
        log: file that has all warnings.

    Attributes:
        footer: line below the table.
    """

    def __init__(self, *, total: int, log: Path) -> None:
        self._total = total
        self._log = log
        self._rows: deque[dict[str, str]] = deque(maxlen=_SHOWN_STEPS)
        self.footer = self._warning = self._status = ""
        self._num_warnings = self._done = 0
        self._spinner = Spinner("dots")
        self._left = "--:--"
        self._started = self._since = time.monotonic()
        self._live = Live(get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def add(self, cells: dict[str, str], *, step: int, left: str) -> None:
        """Show a step. cells: title of a column -> its cell; left: time left."""
        self._rows.append(cells)
        self._done, self._left = step, left

    def set_status(self, text: str) -> None:
        """Show what the run waits for, with the seconds; "" for nothing."""
        self._status, self._since = text, time.monotonic()

    def warn(self, text: str) -> None:
        """Show the first line of a warning until the next one."""
        self._warning = shorten(text.partition("\n")[0], WARNING_CHARS, placeholder=" ...")
        self._num_warnings += 1

    def close(self) -> None:
        """Restore the terminal; the last state of the view stays."""
        self._status = ""
        self._live.stop()

    def _render(self) -> Group:
        parts: list[RenderableType] = []
        if self._rows:
            # Without padding all columns fit into 80 characters; the box puts a space between two columns.
            table = Table(expand=True, box=SIMPLE_HEAD, padding=0, pad_edge=False)
            titles = dict.fromkeys(title for row in self._rows for title in row)
            for title in titles:
                table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
            for row in self._rows:
                table.add_row(*(row.get(title, "-") for title in titles))
            parts.append(table)
        if self.footer:
            parts.append(Text(self.footer))
        if self._warning:
            count = "1 warning" if self._num_warnings == 1 else f"last of {self._num_warnings} warnings"
            parts.append(Text(f"{count} (all in {self._log}): {self._warning}", style="yellow"))
        if self._status:
            self._spinner.update(text=Text(f"{self._status}  {time.monotonic() - self._since:.0f} s"))
            parts.append(self._spinner)
        bar = ProgressBar(total=self._total, completed=self._done, width=30)
        passed = _clock(time.monotonic() - self._started)
        parts.append(Columns([bar, Text(f"step {self._done}/{self._total}  passed {passed}  left {self._left}")]))
        return Group(*parts)


def _clock(seconds: float) -> str:
    """Minutes:seconds: 75.2 is 01:15."""
    return "{:02d}:{:02d}".format(*divmod(int(seconds), 60))


def _cell(metrics: Mapping[str, float], key: str, form: str) -> str:
    value = metrics.get(key, math.nan)
    return form.format(value) if math.isfinite(value) else "-"


def _success(result: ValidationResult) -> str:
    values = {"success": result.success_rate, **{f"pass@{k}": value for k, value in result.pass_at.items()}}
    return " ".join(f"{name} {_cell(values, name, '{:.3f}')}" for name in values)
