"""Runs of the flow harness that are killed at a write of journal or content, and continue from the files."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from async_rl.controller import checkpoints
from async_rl.rollout.content.writer import ContentWriter
from message_queue.errors import JournalBroken
from message_queue.journal import EventJournal
from tests.flow.harness import FakeTrainer, Harness

STEPS = 7


class Kill:
    """Stops the disk of a run after a number of writes, and copies the run directory at that moment.

    Args:
        writes: transactions of events and of content that are stored before.
    """

    def __init__(self, directory: Path, left: Path, *, writes: int) -> None:
        self.directory, self.left = directory, left
        self.dead = threading.Event()
        self._writes_left = writes
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def armed(self, copy: Callable[[Callable[[], object]], object]) -> Generator[None, None, None]:
        """Count the writes of all journals and content files.

        Args:
            copy: runs its argument in the thread of the event loop, so that nothing else changes the directory.
        """
        with contextlib.ExitStack() as stack:
            for owner, name in ((EventJournal, "_write"), (ContentWriter, "_append"), (ContentWriter, "_forget")):
                stack.enter_context(patch.object(owner, name, self._counted(getattr(owner, name), copy)))
            for name in ("publish_folder", "recover_folders", "remove_folder"):
                stack.enter_context(patch.object(checkpoints, name, self._locked(getattr(checkpoints, name))))
            yield

    def _counted(self, write, copy):
        def counted(*args):
            with self._lock:
                if not self.dead.is_set() and not self._writes_left:
                    copied = threading.Event()
                    copy(lambda: self._die(copied))
                    copied.wait(10)
                if self.dead.is_set():
                    raise JournalBroken("killed")
                self._writes_left -= 1
                return write(*args)

        return counted

    def _locked(self, change):
        """`change` of the folders; it waits while the directory is copied."""

        def locked(*args):
            with self._lock:
                return change(*args)

        return locked

    def _die(self, copied: threading.Event) -> None:
        try:
            shutil.copytree(self.directory, self.left)
        finally:
            self.dead.set()
            copied.set()


class Life:
    """One run from its start to its end or death.

    rolled: group -> (prompt, length of each existing trajectory, existing sampled tokens). delivered: group -> its
    trajectories. batches: groups of each train step. num_sampled: tokens that engines sampled, also unreceived ones.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        self.per_batch = options.get("updates_per_batch", 1)
        defaults = {
            "steps": STEPS * self.per_batch,
            "token_s": 0.0005,
            "trainer": FakeTrainer(step_s=0.004),
            "replica_options": [{}, {}],
        }
        self.harness = Harness(directory, journal=True, **{**defaults, **options})
        self.start = self.harness.start
        self.rolled, self.delivered, self.batches = {}, {}, []
        self.num_sampled = 0
        self._watch()

    def _watch(self) -> None:
        harness, outcomes = self.harness, {}
        put, take = harness.queue.put, harness.queue.take

        def watched(roll):
            async def rolled(prompt, admission, *, existing, handout):
                self.rolled[admission.group] = (
                    prompt.index,
                    [len(t) for t in existing],
                    sum(t.num_sampled for t in existing),
                )
                outcomes[admission.group] = await roll(prompt, admission, existing=existing, handout=handout)
                return outcomes[admission.group]

            return rolled

        async def delivered(head):
            self.delivered[head.group] = outcomes[head.group]
            return await put(head)

        async def taken():
            batch = await take()
            self.batches.append([g.group for g in batch.groups])
            return batch

        harness.wrap_roll, harness.queue.put, harness.queue.take = watched, delivered, taken
        for replica in harness.replicas:
            replica._script = self._counted(replica._script)

    def _counted(self, script):
        def counted(ids):
            self.num_sampled += 1
            return script(ids)

        return counted

    async def run_until_dead(self, kill: Kill) -> bool:
        """Whether it died before its end."""
        with kill.armed(asyncio.get_running_loop().call_soon_threadsafe):
            run = asyncio.create_task(self.harness.run())
            dead = asyncio.create_task(asyncio.to_thread(kill.dead.wait))
            await asyncio.wait((run, dead), return_when=asyncio.FIRST_COMPLETED)
            died = kill.dead.is_set()
            kill.dead.set()
            await dead
            if died:
                run.cancel()
                with contextlib.suppress(BaseException):
                    await run
            else:
                await run
        return died
