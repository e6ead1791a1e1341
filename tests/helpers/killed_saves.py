"""Saves that are killed before every touch of the disk in turn; run as a module, so that each may be a fork.

    python -m tests.helpers.killed_saves DIRECTORY STEP

DIRECTORY/0, DIRECTORY/1, ... are the remains of `first_saves` and a save of STEP after so many touches.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from async_rl.config import CheckpointConfig
from async_rl.controller.checkpoints import Checkpoints, RunState

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"}
REMOVALS = {"os.remove", "os.rmdir"}
BEFORE = (2, 4)


class Saver:
    """A trainer whose state is one word in two files."""

    def __init__(self, word):
        self._word = word

    async def save(self, directory):
        self._directory = directory

    async def saved(self):
        self._directory.mkdir()
        for name in ("model", "optimizer"):
            (self._directory / name).write_text(self._word)


class NoRecords:
    """A run that wrote nothing down."""

    def sync(self):
        return


async def save_whole(checkpoints, state, *, trainer, records):
    """Begin and finish a checkpoint."""
    await checkpoints.begin(state.train_step, trainer=trainer)
    return await checkpoints.finish(state, trainer=trainer, records=records)


async def save(directory, step, word):
    state = RunState(train_step=step, param_version=len(word))
    checkpoints = Checkpoints(directory, config=CheckpointConfig(keep=2))
    await save_whole(checkpoints, state, trainer=Saver(word), records=NoRecords())


def first_saves(directory):
    """The checkpoints before the save that is killed."""
    for step in BEFORE:
        asyncio.run(save(directory, step, "old"))


def touches(event, arguments, directory):
    """Whether an audit event is of this directory; a tree is removed file by file, named relative to its folder."""
    name = str(arguments[0]) if event in TOUCHES else ""
    return name.startswith(str(directory)) or (event in REMOVALS and not name.startswith("/"))


def kill_before_touch(number, directory):
    """Kill this process when it touches `directory` for the given time, counted from 0."""
    touched = 0

    def look(event, arguments):
        nonlocal touched
        if touches(event, arguments, directory):
            if touched == number:
                os.kill(os.getpid(), signal.SIGKILL)
            touched += 1

    sys.addaudithook(look)


def main(directory, step):
    number, killed = 0, True
    while killed:
        first_saves(directory / str(number))
        child = os.fork()
        if child == 0:
            kill_before_touch(number, directory / str(number))
            asyncio.run(save(directory / str(number), step, "newer"))
            os._exit(0)
        killed = os.waitpid(child, 0)[1] == signal.SIGKILL
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
