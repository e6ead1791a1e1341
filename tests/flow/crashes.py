"""Runs of the flow harness that are killed after a record of their journal, and go on from what is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import threading
from pathlib import Path

from async_rl.checkpoints import RunState, read_run_state
from message_queue.journal import JournalConfig
from message_queue.restart import JournalPlace
from tests.fakes import SPEC
from tests.flow.harness import FakeTrainer, Harness
from tests.unit.journal_disk import FakeDisk

STEPS = 7


class MortalDisk(FakeDisk):
    """Dies after a number of writes; `seen` is a copy of the run directory as it was then."""

    def __init__(self, directory: Path, seen: Path, *, before: FakeDisk | None = None) -> None:
        super().__init__()
        if before is not None:
            left = before.after_kill()
            self.files = {name: file.copy(self) for name, file in left.files.items()}
        self.directory, self.seen = directory, seen
        self.writes_left: int | None = None
        self.dead = threading.Event()

    def step(self, operation, size=0):
        if self.dead.is_set():
            raise OSError(errno.EIO, "killed")
        if operation == "write" and self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                self.die()
                raise OSError(errno.EIO, "killed")
        return super().step(operation, size)

    def die(self):
        shutil.copytree(self.directory, self.seen)
        self.dead.set()


class Life:
    """One run from its start to its end or death.

    rolled: group -> (prompt, tokens held when it was rolled). delivered: group -> what was put. batches: groups of each
    train step. num_sampled: tokens that engines sampled, whether anybody got them or not.
    """

    def __init__(self, directory: Path, disk: FakeDisk, **options) -> None:
        latest = sorted((directory / "checkpoints").glob("step-??????"))
        self.start = read_run_state(latest[-1]) if latest else RunState()
        place = JournalPlace(
            directory=directory / "journal",
            run="flow",
            config=JournalConfig(fsync="never"),
            checkpoint=self.start.queue if latest else None,
            train_step=self.start.train_step,
            prompt_cursor=self.start.prompt_cursor,
            trajectories=3,
            routing=SPEC,
            busy_s=1.0,
            disk=disk,
        )
        self.per_batch = options.get("updates_per_batch", 1)
        defaults = {
            "steps": STEPS * self.per_batch,
            "token_s": 0.0005,
            "trainer": FakeTrainer(step_s=0.004),
            "replica_options": [{}, {}],
        }
        self.harness = Harness(directory, start=self.start, journal=place, **{**defaults, **options})
        self.rolled, self.delivered, self.batches = {}, {}, []
        self.num_sampled = 0
        self._watch()

    def _watch(self) -> None:
        harness = self.harness
        roll, put, take = harness.rollouter.roll, harness.queue.put, harness.queue.take

        async def rolled(prompt, admission, *, held=()):
            self.rolled[admission.group] = (prompt.index, [len(t) for t in held], sum(t.num_sampled for t in held))
            return await roll(prompt, admission, held=held)

        async def delivered(group):
            self.delivered[group.group] = group
            return await put(group)

        async def taken():
            batch = await take()
            self.batches.append([g.group for g in batch.groups])
            return batch

        harness.rollouter.roll, harness.queue.put, harness.queue.take = rolled, delivered, taken
        for replica in harness.replicas:
            replica._script = self._counted(replica._script)

    def _counted(self, script):
        def counted(ids):
            self.num_sampled += 1
            return script(ids)

        return counted

    async def run_until_dead(self, disk: MortalDisk) -> bool:
        """Whether it died before its end."""
        run = asyncio.create_task(self.harness.run())
        dead = asyncio.create_task(asyncio.to_thread(disk.dead.wait))
        await asyncio.wait((run, dead), return_when=asyncio.FIRST_COMPLETED)
        died = disk.dead.is_set()
        disk.dead.set()
        await dead
        if not died:
            await run
            return False
        run.cancel()
        with contextlib.suppress(BaseException):
            await run
        return True
