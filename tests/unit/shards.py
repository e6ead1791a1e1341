"""A queue with shards on disks in memory, whose processes die together between any two messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from message_queue.client import QueueClient, QueueClientConfig
from message_queue.journal import JournalConfig
from message_queue.restart import JournalPlace
from message_queue.shards.bookkeeper import Bookkeeper
from message_queue.shards.handle import ShardedHandle
from message_queue.shards.holder import ContentHolder
from message_queue.staleness import StalenessConfig
from tests.unit.groups import group_for
from tests.unit.journal_disk import FakeDisk
from tests.unit.test_queue_client import Handle, Method

CONFIG = JournalConfig(fsync="interval", interval_s=1e6, max_file_bytes=4096)  # synced where that is asked for


class Dead(RuntimeError):
    """What a call on a process that was killed raises."""


@dataclass
class Fuse:
    """left: messages until all processes are dead."""

    left: float = float("inf")

    def burn(self):
        self.left -= 1
        return Dead("killed") if self.left < 0 else None


class Mortal(Handle):
    """A Handle whose process dies as its fuse says."""

    def __init__(self, service, fuse):
        super().__init__(service)
        self.fuse = fuse

    def __getattr__(self, name):
        return MortalMethod(self, name)


class MortalMethod(Method):
    def remote(self, *args, **kwargs):
        self.handle.dead = self.handle.fuse.burn()
        return super().remote(*args, **kwargs)


@dataclass
class Disks:
    """books: of them. holders: by shard."""

    books: FakeDisk
    holders: list[FakeDisk]

    @classmethod
    def of(cls, shards):
        return cls(FakeDisk(), [FakeDisk() for _ in range(shards)])

    def after(self, change):
        return Disks(change(self.books), [change(disk) for disk in self.holders])


@dataclass
class Opened:
    service: Bookkeeper
    holders: list[ContentHolder]
    client: QueueClient
    restored: Any
    fuse: Fuse

    async def close(self):
        for part in (self.service, *self.holders):
            await part.close_journal()


async def opened(disks, *, s=2, b=2, step=0, checkpoint=None, policy="wait", routing=None, fuse=None, **changes):
    shards, fuse = len(disks.holders), fuse or Fuse()
    options = {
        "directory": Path("journal"), "run": "run", "config": CONFIG, "checkpoint": checkpoint, "train_step": step,
        "trajectories": 1, "busy_s": 0.0, "routing": routing,
    }  # fmt: skip
    place = JournalPlace(**options | changes)
    staleness = StalenessConfig(max_staleness=s, policy=policy)
    service = Bookkeeper(
        batch_groups=b, staleness=staleness, journal=replace(place.of_books(shards=shards), disk=disks.books)
    )
    holders = [
        ContentHolder(replace(place.of_shard(shard, shards=shards), disk=disk))
        for shard, disk in enumerate(disks.holders)
    ]
    handle = ShardedHandle(Mortal(service, fuse), [Mortal(holder, fuse) for holder in holders])
    client = QueueClient(handle, name="driver", routing=routing, config=QueueClientConfig(slice_s=0.01))
    return Opened(service, holders, client, await client.open(timeout_s=5), fuse)


def group_of(admission):
    """`group_for`, whose tokens say which prompt it is of."""
    made = group_for(admission)
    (trajectory,) = made.trajectories
    (turn,) = trajectory.turns
    turn.observation[:] = np.array([admission.prompt, 1], np.int32)
    return made
