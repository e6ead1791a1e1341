"""What a simulated run replaces in the modules of the real one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from async_rl.cluster import queue_host, rollout_workers
from async_rl.controller import recovery as controller_recovery
from async_rl.rollout import dispatcher, group_contents, worker
from async_rl.rollout.group_contents import ContentPlace, StoredContent
from async_rl.simulator import model
from async_rl.simulator.disk import connect, pwritev
from async_rl.simulator.processes import Observed
from message_queue import content, content_format, journal, recovery
from message_queue.content import ContentWriter
from message_queue.contract import Admission
from message_queue.journal import EventJournal
from message_queue.progress import RolloutRecord
from message_queue.recovery import JournalPlace, Restored

if TYPE_CHECKING:
    from async_rl.simulator.world import World


@contextmanager
def installed(world: World) -> Generator[None]:
    """Within it, connections and writes are those of the world's disk, and workers use the simulated model."""
    disk = world.disk
    changed: list[tuple[Any, str, object]] = [
        (journal, "sqlite3", _Module(sqlite3, connect=partial(connect, disk, "disk/queue"))),
        (content_format, "sqlite3", _Module(sqlite3, connect=partial(connect, disk, "disk/content"))),
        (content, "os", _Module(os, pwritev=partial(pwritev, disk))),
        (content, "FILE_BYTES", world.scenario.file_bytes),
        (controller_recovery, "read_content", partial(_read_content, world)),
        (dispatcher, "read_stored", partial(_read_stored, world)),
        (queue_host, "open_queue", partial(_open_queue, world)),
        (worker, "ContentWriter", SimpleNamespace(open=partial(_open_writer, world))),
        (rollout_workers, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _path: model.SimulatedTokenizer())),
        (rollout_workers, "read_model_info", lambda _path: SimpleNamespace(routing=model.ROUTING)),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    try:
        for module, name, value in changed:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class _Module:
    """A module with some functions replaced."""

    def __init__(self, module: object, **replaced: object) -> None:
        vars(self).update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


async def _open_queue(world: World, place: JournalPlace, **options: Any) -> tuple[Any, EventJournal, Restored]:
    """A queue that the world observes."""
    world.queue_starts(place)
    queue, journal, restored = await recovery.open_queue(place, **options)
    world.queue_opened(queue._state)  # pyright: ignore[reportPrivateUsage]
    return Observed(queue), journal, restored


async def _read_content(world: World, place: ContentPlace, restored: Restored) -> StoredContent:
    """Content that a restart continues, which the world sees when it is complete."""
    stored = await group_contents.read_content(place, restored)
    if not stored.incomplete:
        world.reopened(restored, stored)
    return stored


async def _read_stored(world: World, place: ContentPlace, admissions: Collection[Admission]) -> StoredContent:
    """Content of the groups of a lost worker, which the world sees."""
    stored = await group_contents.read_stored(place, admissions)
    world.moved([admission.group for admission in admissions], stored)
    return stored


async def _open_writer(world: World, *args: Any, **options: Any) -> ContentWriter:
    """A writer that reports each stored record to the world."""
    writer = await ContentWriter.open(*args, **options)
    append = writer.append

    async def told(records: Sequence[RolloutRecord]) -> None:
        await append(records)
        world.judge(world.oracle.groups.stored, records)

    writer.append = told
    return writer
