"""Processes that own a run directory, for tests of second starts.

    python -m tests.helpers.owners hold DIRECTORY         holds the lock, with children, until it is killed
    python -m tests.helpers.owners save DIRECTORY SAVES   saves a checkpoint for each line of its input, then ends

Each prints a line when the directory is owned; `save` prints the train steps of all saves that were harmed as well.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from async_rl.config import CheckpointConfig
from async_rl.controller.checkpoints import Checkpoints, RunState, read_run_state
from async_rl.files.owner import owned
from tests.helpers.killed_saves import NoRecords, save_whole

SHARDS = 20


class ShardSaver:
    """A trainer whose checkpoints have many files."""

    async def save(self, directory):
        self._directory = directory
        directory.mkdir()

    async def saved(self):
        for number in range(SHARDS):
            (self._directory / f"shard-{number}").write_bytes(b"x" * 2000)
            await asyncio.sleep(0)


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def save_and_read(checkpoints, step):
    """Whether a checkpoint of `step` is saved and has all its files."""
    try:
        path = await save_whole(checkpoints, RunState(train_step=step), trainer=ShardSaver(), records=NoRecords())
        read_run_state(path)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error!r}\n")
        return False
    return len(list((path / "trainer").iterdir())) == SHARDS


def hold(directory):
    with owned(directory):
        forked = os.fork()
        if forked == 0:
            signal.pause()
        executed = subprocess.Popen(["sleep", "1000"], close_fds=False)
        say(forked, executed.pid)
        signal.pause()


def save(directory, saves):
    checkpoints = Checkpoints(directory / "checkpoints", config=CheckpointConfig(keep=2))
    with owned(directory):
        say("owned")
        step, stop = 0, False
        os.set_blocking(0, False)
        while not stop or step < saves:  # until both the saves are done and the input has ended
            step += 1
            if not asyncio.run(save_and_read(checkpoints, step)):
                say("harmed", step)
            stop = stop or sys.stdin.buffer.raw.read(1) == b""
        say("saved", step)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["hold", directory]:
            hold(Path(directory))
        case ["save", directory, saves]:
            save(Path(directory), int(saves))
