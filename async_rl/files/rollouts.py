"""Rollouts on disk: `rollouts/step-NNNNNN.parquet` in the run directory, one file per batch and one row per trajectory.

A file appears complete or not at all. The batch of a step that is trained again after a restart replaces its file.
`async_rl.trainer.recording` documents the columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.files.atomic_dir import PARTIAL, make_folder, sync_path

FOLDER = "rollouts"
"""Name of the folder in the run directory."""
_NAME = re.compile(r"step-(\d{6,})\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig:
    """Rollouts that a run keeps on disk."""

    steps: int = 500
    """Batches, the newest ones; 0 writes none."""
    trajectories: int = 64
    """Trajectories of each batch, at least one group. Groups are whole and chosen at random."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"rollout.record.steps is {self.steps}; must be >= 0 (0: no rollouts on disk)")
        if self.trajectories < 1:
            raise ValueError(
                f"rollout.record.trajectories is {self.trajectories}; must be >= 1, or use rollout.record.steps=0"
            )


def recorded_steps(directory: Path) -> dict[int, Path]:
    """Train step -> file, ascending.

    Args:
        directory: folder of the files; it may be missing.
    """
    if not directory.is_dir():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
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
    final = directory / f"step-{train_step:06d}.parquet"
    partial = final.with_name(final.name + PARTIAL)
    # Dictionaries and statistics cost a third of the time, and the files are larger with them.
    pq.write_table(table, partial, compression="zstd", use_dictionary=False, write_statistics=False)
    sync_path(partial)
    partial.replace(final)
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    for step, path in recorded_steps(directory).items():
        try:
            yield step, pq.read_table(path, columns=columns)
        except (OSError, pa.ArrowException) as error:
            yield step, f"{path} is damaged and left out ({str(error).splitlines()[0]})"
