"""Opens the journal of a run for its queue, and says what the run goes on from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from message_queue.contract import QueueSnapshot
from message_queue.journal import Journal, JournalBusy, JournalConfig, JournalStart, Recovered
from message_queue.journal.disk import Disk
from message_queue.journal.writer import StartsWriter, Writer
from message_queue.log import JournaledLog
from message_queue.policies import StalenessPolicy
from message_queue.shards.inventory import books_run, shard_name, shard_run
from message_queue.start import QueueStart, ended_counts, start_of_journal, with_ready
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import PromptGroup, ResumeRouting
from message_queue.wire import EncodedGroup, decode_group, encode_group

P = TypeVar("P")
BUSY_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPlace:
    """Where the journal of a run is and what it is of.

    directory: seen by the queue's process. run: the same at every restart, and no other run's, at most 64 bytes.
    checkpoint: the queue's part of the one the run goes on from; None without one. train_step: of that checkpoint.
    prompt_cursor: its first prompt that was never handed out. waiting: those before it to be admitted again.
    trajectories: of a group. routing: what a row means.
    busy_s: how long to wait for another process to let go of it; one that was killed needs a moment to end.
    disk: in place of the directory. start_writer: see Journal.open.
    """

    directory: Path
    run: str
    config: JournalConfig = field(default_factory=JournalConfig)
    checkpoint: QueueSnapshot | None = None
    train_step: int = 0
    prompt_cursor: int = 0
    waiting: Sequence[int] = ()
    trajectories: int
    resume_routing: ResumeRouting = "append"
    routing: RoutingSpec | None = None
    busy_s: float = 30.0
    disk: Disk | None = None
    start_writer: StartsWriter = Writer

    def start(self) -> JournalStart:
        """Where a journal has to agree with the checkpoint. Groups that were in flight then count as dropped."""
        snapshot = self.checkpoint
        if snapshot is None:
            return JournalStart()
        return JournalStart(
            train_step=self.train_step,
            next_group=snapshot.next_group,
            prompt_cursor=self.prompt_cursor,
            waiting=self.waiting,
            version=snapshot.version,
            update=snapshot.update,
            recycles=snapshot.recycles,
            ledger=ended_counts(snapshot),
            unfinished=frozenset(admission.group for admission in snapshot.unfinished),
        )

    def of_books(self, *, shards: int) -> JournalPlace:
        """That of the queue, where the content is in `shards` others."""
        return replace(self, run=books_run(self.run, shards=shards))

    def of_shard(self, shard: int, *, shards: int) -> JournalPlace:
        """That of a holder of content."""
        run, directory = shard_run(self.run, shard, shards=shards), self.directory / shard_name(shard)
        return replace(self, directory=directory, run=run, checkpoint=None, waiting=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Generic[P]):
    """What a run goes on from, beside its queue.

    began: there was no journal. open: groups that were in flight, as far as they are recorded. replay: batches that are
    trained again. prompt_cursor: first prompt that was never handed out. waiting: those before it to be admitted again.
    version: newest that was published. diverged: its weights are not those that are made again. version_updates:
    `param_version` -> optimizer updates. live: ids of all groups in flight. given_up: of those that ended as it was
    opened, and whose records are to come. next_group: of the next admission. notes: what a person should read. calls:
    group -> trajectory -> what was begun outside for it, and may have happened or not.
    """

    began: bool
    open: tuple[P, ...]
    replay: int
    prompt_cursor: int
    waiting: tuple[int, ...]
    version: int
    diverged: bool
    version_updates: Mapping[int, int]
    live: frozenset[int]
    given_up: frozenset[int]
    next_group: int
    notes: tuple[str, ...]
    calls: Mapping[int, Mapping[int, str]]


async def open_journal(
    place: JournalPlace, *, policy: StalenessPolicy
) -> tuple[Journal, JournaledLog, QueueStart[EncodedGroup], Restored[bytes]]:
    """Open it, or begin it.

    Raises:
        JournalError: of the kind that says why it cannot be used; the message has the way out.
    """
    journal, recovered = await open_patiently(place, place.start())
    try:
        groups = {
            g.admission.group: await journal.read(g.admission.group, routing=place.routing)
            for g in (*recovered.open, *recovered.ready)
        }
        next_update = 0 if place.checkpoint is None else place.checkpoint.next_update
        start = start_of_journal(recovered, groups, next_update=next_update, policy=policy)
        for ended in start.given_up:
            await journal.dropped(ended.admission.group, reason=ended.reason, again=ended.again)
    except BaseException:
        await journal.close()
        raise
    log = JournaledLog(journal, trajectories=place.trajectories, resume_routing=place.resume_routing)
    restored = restored_of(recovered, start, groups)
    encoded = with_ready(start, (EncodedGroup(encode_group(group)) for group in start.ready))
    return journal, log, encoded, with_open(restored, map(encode_group, restored.open))


async def open_patiently(place: JournalPlace, start: JournalStart) -> tuple[Journal, Recovered]:
    """Open the journal of a place, or begin it; wait while another process has it."""
    clock = asyncio.get_running_loop().time
    until = clock() + place.busy_s
    while True:
        try:
            return await Journal.open(
                place.directory,
                run=place.run,
                config=place.config,
                start=start,
                disk=place.disk,
                start_writer=place.start_writer,
            )
        except JournalBusy:
            if clock() >= until:
                raise
            await asyncio.sleep(BUSY_AGAIN_S)  # there is nothing to wait on but the other process


def with_open(restored: Restored[Any], groups: Iterable[P]) -> Restored[P]:
    """The same with its groups in another form."""
    return replace(restored, open=tuple(groups))


def restored_of(recovered: Recovered, start: QueueStart[Any], groups: Mapping[int, P]) -> Restored[P]:
    """What is told of a journal. groups: those that go on, and maybe others."""
    notes: list[str] = [] if recovered.began else list(recovered.report.lines())
    notes += _given_up(start)
    if left := len(recovered.trained) - sum(map(len, start.replay)):
        notes.append(
            f"{left} groups that were trained after the checkpoint are not trained again in the batches they were in: "
            "their batches are not whole, or the bound, the policy or the size of a batch is another one now"
        )
    return Restored(
        began=recovered.began,
        open=tuple(groups[admission.group] for admission in start.open),
        replay=len(start.replay),
        prompt_cursor=recovered.prompt_cursor,
        waiting=(*recovered.waiting, *(ended.admission.prompt for ended in start.given_up if ended.again)),
        version=start.served,
        diverged=start.diverged,
        version_updates=start.versions,
        given_up=frozenset(ended.admission.group for ended in start.given_up),
        live=frozenset({*(a.group for a in start.open), *(g.group for g in start.ready)}),
        next_group=recovered.next_group,
        notes=tuple(notes),
        calls={g.admission.group: dict(g.calls) for g in recovered.open if g.calls},
    )


def _given_up(start: QueueStart[PromptGroup]) -> list[str]:
    """A sentence for groups that are given up, one for those whose prompt is admitted again."""
    told: list[str] = []
    for again, what in ((False, "are given up"), (True, "are given up, and their prompts admitted again")):
        reasons = [ended.reason for ended in start.given_up if ended.again == again]
        if reasons:
            told.append(f"{len(reasons)} groups {what}: {reasons[0]}")
    return told


def decode_restored(restored: Restored[bytes], *, routing: RoutingSpec | None) -> Restored[PromptGroup]:
    """The same with its groups."""
    groups = tuple(decode_group(data, routing=routing) for data in restored.open)
    for group in groups:
        for number, call in restored.calls.get(group.group, {}).items():
            group.trajectories[number].unsure_call = call
    return with_open(restored, groups)
