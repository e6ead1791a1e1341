"""State of the trainer on disk, exact on the same layout: one file per rank in a folder that appears whole or not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


class TrainerCheckpointError(ValueError):
    """A folder that cannot be restored from; names it and the way out."""


def save_rank_state(
    directory: Path, state: dict[str, Any], *, rank: int, layout: dict[str, int], barrier: Callable[[], None]
) -> None:
    """Write this rank's part; the folder is renamed into place when every rank is done. Collective.

    Args:
        layout: names and sizes that a restart must repeat.

    Raises:
        OSError: no room or no permission.
    """
    partial = directory.with_name(directory.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    path = partial / f"rank-{rank:05d}.pt"
    with path.open("wb") as file:
        torch.save({"format": FORMAT, "layout": layout, "state": state}, file)
        file.flush()
        os.fsync(file.fileno())
    barrier()
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    barrier()


def load_rank_state(directory: Path, *, rank: int, layout: dict[str, int]) -> dict[str, Any]:
    """This rank's part.

    Raises:
        TrainerCheckpointError: no such file, another format, or written by another layout.
    """
    path = directory / f"rank-{rank:05d}.pt"
    if not path.is_file():
        raise TrainerCheckpointError(f"{directory} has no {path.name}; give a folder that a trainer has saved")
    held = torch.load(path, map_location="cpu", weights_only=False)
    if held.get("format") != FORMAT:
        raise TrainerCheckpointError(f"{path} has format {held.get('format')}; this version reads format {FORMAT}")
    if held["layout"] != layout:
        raise TrainerCheckpointError(
            f"{directory} was saved with trainer layout {held['layout']}, and this run has {layout}; "
            "restore with the same trainer.ranks and trainer.parallel"
        )
    return held["state"]
