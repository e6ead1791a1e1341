"""Cost of a group as a run continues: the queue's own work and its events, without processes and without a disk.

A fixed number of groups is in flight; each is admitted, put, taken and trained, and every batch is published. Content
is in benchmarks/queue_throughput.py, the disk in benchmarks/journal.py. Flat means that the last groups cost the same
as the first ones, and that the sizes of a snapshot and of the state that a checkpoint stores stay the same.

    python benchmarks/queue_groups.py [--groups 1000000] [--policy wait|drop]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from message_queue.contract import Admission
from message_queue.events import Event
from message_queue.heads import GroupHead, SequenceHead, TrajectoryHead
from message_queue.journal import EventJournal
from message_queue.policies import StalenessConfig, build_policy
from message_queue.queue import TrajectoryQueue
from message_queue.state import StoredState
from message_queue.tokens import StopReason

BATCH = 64
SAVE_EVERY = 4  # batches between two checkpoints
PROMPT_TOKENS, TOKENS = 16, 64


def head_of(admission: Admission) -> GroupHead:
    """A finished group of one trajectory."""
    length = PROMPT_TOKENS + TOKENS
    trajectory = TrajectoryHead(
        length=length,
        sequences=(SequenceHead(length, ((admission.admitted_version, TOKENS),)),),
        num_segments=1,
        num_aborts=0,
        row_bytes=0,
        missing_rows=0,
        reward=1.0,
        stop_reason=StopReason.STOP,
    )
    return GroupHead(
        group=admission.group,
        prompt=admission.prompt,
        admitted_version=admission.admitted_version,
        admitted_update=admission.admitted_update,
        trajectories=(trajectory,),
    )


class MemoryJournal(EventJournal):
    """Encodes events and states as the journal does, and stores nothing."""

    def __init__(self) -> None:
        self.base_bytes = self.base_groups = 0
        self._written: asyncio.Future[None] | None = None

    def record(self, events: Iterable[Event]) -> Awaitable[None]:
        for event in events:
            msgspec.msgpack.encode(event)
        return self._done()

    def rebase(self, state: StoredState) -> Awaitable[None]:
        self.base_groups = len(state.groups)
        self.base_bytes = len(msgspec.msgpack.encode(state))
        return self._done()

    def _done(self) -> Awaitable[None]:
        if self._written is None:
            self._written = asyncio.get_running_loop().create_future()
            self._written.set_result(None)
        return self._written


@dataclass(frozen=True, slots=True)
class Point:
    """After a number of groups."""

    groups: int
    """How many."""
    us: float
    """CPU of one group."""
    process_bytes: int
    """Memory of the process."""
    snapshot_bytes: int
    """Size of a snapshot."""
    state_bytes: int
    """Size of the state that the last checkpoint stored."""
    live: int
    """Groups of that state."""


def process_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Driver:
    """A run that only keeps count."""

    def __init__(self, *, policy: Any) -> None:
        self._journal = MemoryJournal()
        self._queue = TrajectoryQueue(
            build_policy(StalenessConfig(max_staleness=2, policy=policy), batch_groups=BATCH), journal=self._journal
        )
        self._open: list[Admission] = []
        self._step = self._records = 0
        self.groups = 0

    async def fill(self) -> None:
        """Two batches are open."""
        while len(self._open) < 2 * BATCH:
            self._open.append(await self._queue.admit(self.groups))
            self.groups += 1

    async def batch(self) -> None:
        """The oldest batch goes all the way."""
        await self.fill()
        finished, self._open = self._open[:BATCH], self._open[BATCH:]
        for a in finished:
            await self._queue.put(head_of(a))
        taken = await self._queue.take()
        self._step += 1
        await self._queue.trained([group.group for group in taken.groups], train_step=self._step)
        await self._queue.publish(self._step, update=self._step)
        await self._queue.loaded(self._step)
        self._records += len(await self._queue.records_after(self._records))
        if self._step % SAVE_EVERY == 0:
            await self._queue.checkpointed(self._step)

    async def run_to(self, groups: int) -> Point:
        """Go on to so many groups; the cost is of the last tenth of them, and of 20 000 at most."""
        window, started, started_at = min(groups // 2, 20_000), 0.0, -1
        while self.groups < groups:
            if started_at < 0 and self.groups >= groups - window:
                started, started_at = time.process_time(), self.groups
            await self.batch()
        seconds = time.process_time() - started
        snapshot = await self._queue.snapshot()
        if snapshot.ledger.error:
            raise RuntimeError(f"ledger/error is {snapshot.ledger.error}: {snapshot.ledger}")
        return Point(
            groups=self.groups,
            us=1e6 * seconds / (self.groups - started_at),
            process_bytes=process_bytes(),
            snapshot_bytes=len(msgspec.json.encode(snapshot)),
            state_bytes=self._journal.base_bytes,
            live=self._journal.base_groups,
        )


async def points(*, groups: int, policy: str) -> list[Point]:
    """At 1e3, 1e4, ... groups."""
    driver, at, found = Driver(policy=policy), 1000, list[Point]()
    while at <= groups:
        found.append(await driver.run_to(at))
        at *= 10
    return found


def main() -> None:
    from benchmarks.support import markdown_table, show

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--policy", choices=["wait", "drop"], default="wait")
    args = parser.parse_args()
    found = asyncio.run(points(groups=args.groups, policy=args.policy))
    rows = [
        [
            f"{p.groups}",
            f"{p.us:.1f}",
            f"{p.us / found[0].us:.2f}",
            f"{p.live}",
            f"{p.snapshot_bytes / 1e3:.1f}",
            f"{p.state_bytes / 1e3:.1f}",
            f"{p.process_bytes / 1e6:.0f}",
        ]
        for p in found
    ]
    header = ["groups so far", "CPU us/group", "of the first", "live", "snapshot kB", "state kB", "process MB"]
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
