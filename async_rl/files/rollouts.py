"""Rollouts on disk, in `rollouts/` of the run directory.

step-NNNNNN.parquet   one file per batch and one row per path of a trajectory; `async_rl.trainer.recording` documents
                      the columns. A file appears complete or not at all. The batch of a step that is repeated
                      after a restart replaces its file.
failed-NNNNNN.jsonl   rollouts that failed or started over when NNNNNN train steps were done, one line each, with the
                      fields of FailedRollout
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from agent_loop.bounds import Count, bounded
from agent_loop.text import safe_text
from agent_loop.tools.tool import ToolCall, opened_reasoning, parse_tool_calls
from async_rl.files.atomic_dir import PARTIAL, make_folder, sync_path, whole_file
from async_rl.files.jsonl import read_lines

FOLDER = "rollouts"
"""Name of the folder in the run directory."""
_NAME = re.compile(r"step-(\d{6,})\.parquet")
_FAILED_NAME = re.compile(r"failed-(\d{6,})\.jsonl")


@bounded("rollout.record")
class RecordConfig:
    """Rollouts that a run keeps on disk."""

    steps: Annotated[int, Ge(0)] = 500
    """Batches, the newest ones; 0 writes none."""
    trajectories: Count = 64
    """Trajectories of each batch, at least one group. Groups are whole and chosen at random. Also the most failed
    rollouts that are kept between two train steps."""
    routing_bytes: Annotated[int, Ge(0)] = 1_000_000
    """Largest size of the routing rows of a batch, at two bytes for each expert and before compression; 0 for none.
    Trajectories whose rows do not fit have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRollout:
    """A rollout that failed at its last try, or lost its state and started over, with its text up to the error."""

    group: int
    """Id of the group."""
    trajectory: int
    """Number in the group."""
    prompt_index: int
    """Index of the prompt."""
    admitted_version: int
    """`param_version` of the weights when the group was admitted."""
    error: str
    """Kind and text of the error, with the user's file and line."""
    error_kind: str
    """Name of the error's class."""
    error_line: str
    """`file:line in function` of the user; empty without one."""
    tokens: int
    """Tokens of the root path up to the error, including prompt and tool replies."""
    prompt: str
    """Text of the prompt with control tokens; empty if the rollout failed before it was rendered."""
    turns: Sequence[dict[str, Any]]
    """For each turn of the root path its `text`, `tool_calls` and `reply`, as in the parquet files."""

    @property
    def title(self) -> str:
        """Kind and place of the error, `ValueError, task.py:9 in score`; without a line of the user only its kind."""
        return self.error_kind + (f", {Path(self.error_line).name}" if self.error_line else "")


class FailedRollouts:
    """Writes failed rollouts; those above the bounds are left out.

    Args:
        directory: folder of the files.
        config: bounds; `steps` is the number of files that stay.
    """

    def __init__(self, directory: Path, *, config: RecordConfig) -> None:
        self._directory = directory
        self._config = config
        self._path: Path | None = None
        self._count = 0  # lines of this file

    def add(self, rollout: FailedRollout, *, train_step: int) -> None:
        """Append a rollout to the file of the step.

        Args:
            train_step: train steps done.

        Raises:
            OSError: the disk has no free space or is not writable.
        """
        if not self._config.steps:
            return
        path = self._directory / f"failed-{train_step:06d}.jsonl"
        if path != self._path:
            make_folder(self._directory)
            self._path, self._count = path, len(read_lines(path)) if path.is_file() else 0
            older = [found for found in _numbered(self._directory, _FAILED_NAME).values() if found != path]
            for found in older[: max(0, len(older) + 1 - self._config.steps)]:
                found.unlink(missing_ok=True)
        if self._count < self._config.trajectories:
            with path.open("a", encoding="utf-8") as file:
                file.write(safe_text(json.dumps(asdict(rollout), ensure_ascii=False)) + "\n")
            self._count += 1


def read_failed(directory: Path) -> Iterator[tuple[int, FailedRollout | str]]:
    """Train steps done and rollout, ascending; a text instead of the rollout if a line is damaged.

    Args:
        directory: folder of the files; it may be missing.
    """
    names = {field.name for field in fields(FailedRollout)}
    for step, path in _numbered(directory, _FAILED_NAME).items():
        for number, line in enumerate(read_lines(path), start=1):
            try:
                values = json.loads(line)
                yield step, FailedRollout(**{name: values[name] for name in names})
            except (ValueError, KeyError, TypeError) as error:
                yield step, f"{path} line {number} is damaged and left out ({error})"


def tool_calls_of(text: str, *, before: str = "") -> list[dict[str, Any]]:
    """Tool calls in the text of a turn: `name` and `arguments` (JSON), or `error` for a malformed call.

    Args:
        before: text before the turn; it may open the turn's reasoning.
    """
    return [
        {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False), "error": None}
        if isinstance(call, ToolCall)
        else {"name": None, "arguments": None, "error": call.cause}
        for call in parse_tool_calls(opened_reasoning(before) + text)
    ]


def recorded_steps(directory: Path) -> dict[int, Path]:
    """Train step -> file, ascending.

    Args:
        directory: folder of the files; it may be missing.
    """
    return _numbered(directory, _NAME)


def _numbered(directory: Path, name: re.Pattern[str]) -> dict[int, Path]:
    """Number in the name -> file, ascending."""
    if not directory.is_dir():
        return {}
    found = ((name.fullmatch(path.name), path) for path in directory.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


def write_step(directory: Path, table: Any, *, train_step: int, keep: int) -> None:
    """Write the file of a step, in place of an earlier one, and remove all but the `keep` newest files.

    Args:
        directory: folder of the files.
        table: pyarrow table of the rows.
        train_step: last step of the batch.
        keep: number of files that stay.

    Raises:
        OSError: the disk has no free space or is not writable; an existing file is unchanged.
    """
    import pyarrow.parquet as pq

    make_folder(directory)
    with whole_file(directory / f"step-{train_step:06d}.parquet") as partial:
        # Dictionaries and statistics cost a third of the time, and the files are larger with them.
        pq.write_table(table, partial, compression="zstd", use_dictionary=False, write_statistics=False)
        sync_path(partial)
    for path in list(recorded_steps(directory).values())[:-keep]:
        path.unlink(missing_ok=True)
    sync_path(directory)


def truncate_steps(directory: Path, *, train_step: int) -> None:
    """Remove the files of steps after `train_step`, and files that a kill left incomplete."""
    later = [path for step, path in recorded_steps(directory).items() if step > train_step]
    for path in [*later, *directory.glob(f"*{PARTIAL}")]:
        path.unlink()


def read_steps(directory: Path, *, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Train step and pyarrow table, ascending; a text instead of the table if the file cannot be read.

    Args:
        directory: folder of the files.
        columns: names of the columns to read; None for all.
    """
    for step, path in recorded_steps(directory).items():
        yield step, read_step(path, columns=columns)


def read_step(path: Path, *, columns: list[str] | None = None) -> Any:
    """The pyarrow table of a file; a text if the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        return f"{path} is damaged and left out ({str(error).splitlines()[0]})"
