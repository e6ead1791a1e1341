"""Checkpoints of a run: the trainer's state and the driver's, in one folder that appears whole or not at all.

checkpoints/step-000020/
    trainer/    model, optimizer, schedule, random state; its format: async_rl/trainer/state/checkpoint.py
    run.json    RunState, and the size of every other file
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from async_rl.controller.parts import Trainer
from async_rl.files.atomic_dir import make_folder, partial_folder, publish_folder, recover_folders, remove_folder
from async_rl.metrics.recorder import Recorder
from async_rl.trainer.batch.advantage import PromptValue
from message_queue.state import QueueSnapshot

if TYPE_CHECKING:
    from async_rl.config import CheckpointConfig

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run between two train steps."""

    train_step: int = 0
    """Last finished optimizer step."""
    param_version: int = 0
    """Last published version."""
    version_updates: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    """`param_version` -> optimizer updates in these weights."""
    prompt_cursor: int = 0
    """First prompt index never handed out."""
    unfinished_prompts: Sequence[int] = ()
    """Indices of prompts handed out, but neither trained nor dropped."""
    prompt_values: Mapping[str, PromptValue] = field(default_factory=dict[str, PromptValue])
    """Prompt and agent -> expected reward; see `PromptValues`."""
    queue: QueueSnapshot = field(default_factory=QueueSnapshot)
    """State of the queue; its unfinished groups end as dropped when it is restored."""


class Checkpoints:
    """Saves and finds the checkpoints of one run directory. A save that is cut short leaves the earlier ones usable."""

    def __init__(self, directory: Path, *, config: CheckpointConfig) -> None:
        self._directory = directory
        self._config = config

    @property
    def every(self) -> int:
        """Train steps between checkpoints; 0 for only at the end or on a stop."""
        return self._config.every

    async def begin(self, train_step: int, *, trainer: Trainer) -> None:
        """Begin a checkpoint of `trainer`; it may continue to train when this returns. `finish` comes next."""
        partial = partial_folder(self._folder(train_step))

        def prepare() -> None:
            self.recover()
            make_folder(self._directory)
            partial.mkdir()

        await asyncio.to_thread(prepare)
        async with self._removed_on_error():
            await trainer.save(partial / "trainer")

    async def finish(self, state: RunState, *, trainer: Trainer, records: Recorder) -> Path:
        """Complete the checkpoint that was begun, with `state` of its train step.

        Before it appears, `records` are on the disk. When this returns, it survives a loss of power.
        """
        final = self._folder(state.train_step)

        def publish() -> None:
            partial = partial_folder(final)
            files = _sizes(partial)
            document = msgspec.json.encode({"format": FORMAT, "state": state, "files": files})
            (partial / "run.json").write_bytes(document)
            records.sync()
            if missing := _missing(partial, files):
                raise FileNotFoundError(errno.ENOENT, f"{missing} vanished while it was saved", f"{partial}")
            publish_folder(final)

        async with self._removed_on_error():
            await trainer.saved()
            await asyncio.to_thread(publish)
        for old in list(self.steps().values())[: -self._config.keep]:
            await asyncio.to_thread(_remove_unless_held, old)
        return final

    def recover(self) -> None:
        """Put the directory in order after a run that was killed while it saved; no other run may use it."""
        recover_folders(self._directory)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, if there is one."""
        return next(reversed(self.steps().values()), None)

    def steps(self) -> dict[int, Path]:
        """Train step -> folder of every whole checkpoint, ascending."""
        whole = sorted(p for p in self._directory.glob("step-*") if p.suffix == "" and (p / "run.json").is_file())
        return {int(path.name.removeprefix("step-")): path for path in whole}

    def _folder(self, train_step: int) -> Path:
        return self._directory / f"step-{train_step:06d}"

    @asynccontextmanager
    async def _removed_on_error(self) -> AsyncGenerator[None]:
        """Context that removes an unfinished checkpoint on an OSError, to free its space on a full disk."""
        try:
            yield
        except OSError:
            await asyncio.to_thread(self.recover)
            raise


def read_run_state(checkpoint: Path) -> RunState:
    """Read the driver's part of a checkpoint.

    Raises:
        ValueError: not a checkpoint, one of another format, or one that lacks a file; names the path.
    """
    path = checkpoint / "run.json"
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if (found := document.get("format")) == FORMAT:
            if missing := _missing(checkpoint, document.get("files", {})):
                raise ValueError(
                    f"resume: {checkpoint} lacks {missing}, or not all its bytes; copy it from where it was saved, or "
                    "remove that folder, which resumes from the checkpoint before"
                )
            return msgspec.convert(document.get("state"), RunState, str_keys=True)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"resume: {checkpoint} is not a checkpoint of format {FORMAT} ({error}); "
            "give a folder checkpoints/step-NNNNNN, or resume=never"
        ) from error
    raise ValueError(f"resume: {checkpoint} has format {found}; this version reads format {FORMAT}")


def hold(checkpoint: Path) -> IO[bytes]:
    """An open file of a checkpoint; until it is closed, the run that made the checkpoint does not remove it.

    Raises:
        OSError: it is removed, or not there.
    """
    path = checkpoint / "run.json"
    file = path.open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks
    path.stat()  # it was not removed before the lock
    return file


def _remove_unless_held(checkpoint: Path) -> None:
    with (checkpoint / "run.json").open("rb+") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_folder(checkpoint)


def _missing(checkpoint: Path, files: Mapping[str, int]) -> str:
    """Names of the files of a checkpoint that are not there with their size in bytes."""
    there = _sizes(checkpoint)
    return ", ".join(name for name, size in files.items() if there.get(name) != size)


def _sizes(folder: Path) -> dict[str, int]:
    """Name of each file at any depth -> its bytes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
