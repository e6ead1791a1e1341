"""Cost of a group as a run goes on: the queue's own work and the journal's, without processes and without a disk.

A fixed number of groups is under way; each is admitted, recorded, put, taken, trained and settled, and every batch is
published. What is not small is in benchmarks/queue_throughput.py, and the disk in benchmarks/journal.py. Flat means
that the last groups cost what the first did, and that what is held, and what a snapshot and a Summary take, stay as
they are.

    python benchmarks/queue_groups.py [--groups 1000000] [--policy wait|drop]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from message_queue.contract import Admission, QueuedGroup
from message_queue.journal.checks import checked
from message_queue.journal.format import NO_GROUP, Entry
from message_queue.journal.groups import Span, Step
from message_queue.journal.records import (
    Admitted,
    Body,
    Checkpointed,
    Closed,
    Dropped,
    Observed,
    Published,
    Ready,
    Taken,
    Trained,
)
from message_queue.journal.state import JournalStart, JournalState
from message_queue.log import WRITTEN, NoLog
from message_queue.queue import TrajectoryQueue
from message_queue.staleness import StalenessConfig
from message_queue.tokens import StopReason

BATCH = 64
SAVE_EVERY = 4  # batches between two checkpoints
PROMPT_TOKENS, TOKENS = 16, 64
NOWHERE = Span(0, 0, 0)


@dataclass(frozen=True, slots=True)
class SmallGroup:
    """A group without content; see QueuedGroup."""

    group: int
    prompt: int
    admitted_version: int
    admitted_update: int
    num_segments: int = 1
    num_tokens: int = TOKENS
    closed: bool = True

    def tokens_per_version(self) -> dict[int, int]:
        return {self.admitted_version: TOKENS}


class StateLog(NoLog):
    """Follows what a journal would write, as its thread does between two writes."""

    def __init__(self) -> None:
        self.state = JournalState(JournalStart())

    def admitted(self, admission: Admission) -> Awaitable[None]:
        version, update = admission.admitted_version, admission.admitted_update
        self._apply(Admitted(admission.prompt, version, update, 1, "append"), group=admission.group)
        self._extend(admission.group, Observed(0, PROMPT_TOKENS), Step(0, length=PROMPT_TOKENS))
        return WRITTEN

    def ready(self, group: QueuedGroup) -> Awaitable[None]:
        self.state.extend(group.group, 0, Step(PROMPT_TOKENS, length=TOKENS, segments=1, sampled=TOKENS), NOWHERE)
        at = PROMPT_TOKENS + TOKENS
        self._extend(group.group, Closed(at, StopReason.STOP, 1.0, {}), Step(at, closed=True))
        return self._apply(Ready(), group=group.group)

    def dropped(self, group: int, *, reason: str, tokens: int = 0, again: bool = False) -> Awaitable[None]:
        return self._apply(Dropped(reason, tokens=tokens, again=again), group=group)

    def taken(self, groups: Sequence[int], *, update: int) -> Awaitable[None]:
        return self._apply(Taken(tuple(groups), update))

    def trained(self, groups: Sequence[int], *, train_step: int, masked: Sequence[int]) -> Awaitable[None]:
        return self._apply(Trained(tuple(groups), train_step, masked=tuple(masked)))

    def published(self, version: int, *, update: int) -> Awaitable[None]:
        return self._apply(Published(version, update))

    def checkpointed(self, train_step: int) -> Awaitable[None]:
        return self._apply(Checkpointed(train_step))

    def _apply(self, body: Body, *, group: int = NO_GROUP) -> Awaitable[None]:
        self.state.apply(checked(self.state, Entry(body, group=group)).body, group=group)
        return WRITTEN

    def _extend(self, group: int, body: Observed | Closed, step: Step) -> None:
        checked(self.state, Entry(body, group=group))
        self.state.extend(group, 0, step, NOWHERE)


@dataclass(frozen=True, slots=True)
class Point:
    """After so many groups. us: CPU of one group. Bytes of the process, of a snapshot and of a Summary; live groups."""

    groups: int
    us: float
    process_bytes: int
    snapshot_bytes: int
    summary_bytes: int
    live: int


def process_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Driver:
    """A run that only keeps count."""

    def __init__(self, *, policy: Any) -> None:
        self._log = StateLog()
        self._queue: TrajectoryQueue[SmallGroup] = TrajectoryQueue(
            batch_groups=BATCH, staleness=StalenessConfig(max_staleness=2, policy=policy), log=self._log
        )
        self._open: list[Admission] = []
        self._step = 0
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
            await self._queue.put(SmallGroup(a.group, a.prompt, a.admitted_version, a.admitted_update))
        taken = await self._queue.take()
        self._step += 1
        await self._queue.trained([group.group for group in taken.groups], train_step=self._step)
        await self._queue.publish(self._step, update=self._step)
        await self._queue.loaded(self._step)
        self._queue.drain_records()
        if self._step % SAVE_EVERY == 0:
            await self._queue.checkpointed(self._step)

    async def run_to(self, groups: int) -> Point:
        """Go on to so many groups; the cost is of the last tenth of them, and of 20 000 at most."""
        window, begun, begun_at = min(groups // 2, 20_000), 0.0, -1
        while self.groups < groups:
            if begun_at < 0 and self.groups >= groups - window:
                begun, begun_at = time.process_time(), self.groups
            await self.batch()
        seconds = time.process_time() - begun
        snapshot = self._queue.snapshot()
        if snapshot.ledger.error:
            raise RuntimeError(f"ledger/error is {snapshot.ledger.error}: {snapshot.ledger}")
        return Point(
            groups=self.groups,
            us=1e6 * seconds / (self.groups - begun_at),
            process_bytes=process_bytes(),
            snapshot_bytes=len(msgspec.json.encode(snapshot)),
            summary_bytes=len(msgspec.msgpack.encode(self._log.state.summary())),
            live=len(self._log.state.live),
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
            f"{p.summary_bytes / 1e3:.1f}",
            f"{p.process_bytes / 1e6:.0f}",
        ]
        for p in found
    ]
    header = ["groups so far", "CPU us/group", "of the first", "live", "snapshot kB", "Summary kB", "process MB"]
    show(markdown_table(header, rows))


if __name__ == "__main__":
    main()
