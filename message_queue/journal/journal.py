"""Append-only durable record of open and ready groups, from which a restart continues every one of them.

    journal, recovered = await Journal.open(directory, run=..., config=JournalConfig(), start=JournalStart())

    admitted -> observed | sampled | called | closed, of each trajectory -> ready -> taken -> trained
    admitted ... -> dropped         published        checkpointed

A call returns once its record is written, so that a kill of the process loses nothing that a caller was told of; with
`durable` once it survives a loss of power. It raises where the record is not written, and can be made again. After a
call that was cancelled the record is there or not: one that does not follow on what is there is refused.

All disk work happens in one thread. It writes what waits in one piece and syncs once for all of it, while the next
records gather, so records that arrive together share a write and an fsync. At most `journal.buffer_bytes` wait; then
callers do, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from message_queue.contract import Admission
from message_queue.journal.buffer import Buffer
from message_queue.journal.disk import Disk, OsDisk
from message_queue.journal.errors import JournalBroken, JournalError
from message_queue.journal.format import Entry, observation_entry, segment_entry
from message_queue.journal.log import JournalConfig, JournalLog
from message_queue.journal.open import GroupReader, Recovered, make_reader, mark_of, open_log
from message_queue.journal.records import (
    Admitted,
    Called,
    Checkpointed,
    Closed,
    Dropped,
    Marked,
    Published,
    Ready,
    Taken,
    Trained,
)
from message_queue.journal.state import JournalStart
from message_queue.journal.writer import Answer, Job, JournalStats, StartsWriter, Writer
from message_queue.tokens import Int32Array, RoutingSpec, StopReason, TokenOutput
from message_queue.trajectory import PromptGroup, ResumeRouting
from message_queue.wire.packed import Packed


class Journal:
    """The journal of one run. Made by `open`; belongs to one event loop.

    Every call raises:
        JournalFull: no room; nothing was recorded by this call, and it can be made again.
        JournalError: it does not follow on what is recorded; the message says what is expected.
        JournalBroken: the disk failed; every later call raises it too.
        JournalClosed: the journal was closed.
    """

    def __init__(self, log: JournalLog, *, config: JournalConfig, start_writer: StartsWriter = Writer) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = Buffer(config.buffer_bytes)
        self._writer = start_writer(log, config=config, deliver=self._deliver)

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        run: str,
        config: JournalConfig,
        start: JournalStart,
        disk: Disk | None = None,
        start_writer: StartsWriter = Writer,
    ) -> tuple[Journal, Recovered]:
        """Open the journal of a run, or begin it.

        Args:
            directory: made where it does not exist. Given `disk`, it is not used.
            run: name of the run, at most 64 bytes; the same at every restart, and no other run's.
            start: where the checkpoint stands that the run goes on from. What was trained after it is ready again.
            start_writer: makes what touches the files from then on.

        Raises:
            JournalBusy: another process has it open. JournalRunError, JournalFormatError: it is not this run's, or not
                of this format. JournalStepError: it does not go with the checkpoint. JournalUnwritable, JournalFull.
        """
        log, recovered = await asyncio.to_thread(
            open_log, disk or OsDisk(directory), run=run, config=config, start=start
        )
        return cls(log, config=config, start_writer=start_writer), recovered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- the rollout side

    async def admitted(
        self,
        admission: Admission,
        *,
        trajectories: int,
        resume_routing: ResumeRouting = "append",
        durable: bool = False,
    ) -> None:
        """A group of `trajectories` trajectories starts."""
        body = Admitted(
            prompt=admission.prompt,
            version=admission.admitted_version,
            update=admission.admitted_update,
            trajectories=trajectories,
            resume_routing=resume_routing,
        )
        await self._record(Entry(body, group=admission.group), durable=durable)

    async def observed(
        self, group: int, token_ids: Int32Array, *, trajectory: int, at: int, durable: bool = False
    ) -> None:
        """int32 [n] tokens that no policy sampled, the prompt or a tool reply, were appended at position `at`.

        Make it durable for a tool reply, before the next request goes out: then the tool is not called again.

        Raises:
            ContractError: wrong dtype or shape.
        """
        await self._record(observation_entry(group, trajectory, token_ids, at=at), durable=durable)

    async def sampled(
        self,
        group: int,
        segment: TokenOutput | Packed | bytes | memoryview,
        *,
        trajectory: int,
        at: int,
        rows_held: int = 0,
        durable: bool = False,
    ) -> None:
        """A segment was appended at position `at`. Its arrays are not copied: leave them alone until this returns.

        Args:
            segment: as it is, as `pack_segment` gives it, or as the bytes of `encode_segment`.
            rows_held: rows of the trajectory before it; with resume_routing append or force those of a TokenOutput
                before that position are left out, as the merge rule leaves them out.

        Raises:
            WireError: bytes that are damaged, or no segment.
        """
        entry = segment_entry(group, trajectory, segment, at=at, rows_held=rows_held)
        await self._record(entry, durable=durable)

    async def called(self, group: int, call: str, *, trajectory: int, at: int) -> None:
        """Something outside is about to be called that is to happen once; durable.

        Where nothing of the trajectory is recorded after it, a restart gives it back: it may have happened.
        """
        await self._record(Entry(Called(at, call), group=group, trajectory=trajectory), durable=True)

    async def closed(
        self,
        group: int,
        *,
        trajectory: int,
        at: int,
        stop_reason: StopReason,
        reward: float,
        info: Mapping[str, float] | None = None,
        durable: bool = False,
    ) -> None:
        """A trajectory of `at` tokens ended."""
        body = Closed(at, stop_reason, float(reward), dict(info or {}))
        await self._record(Entry(body, group=group, trajectory=trajectory), durable=durable)

    async def ready(self, group: int, *, durable: bool = False) -> None:
        """A group whose trajectories are all closed waits for the trainer."""
        await self._record(Entry(Ready(), group=group), durable=durable)

    async def marked(self, group: int, mark: Marked) -> None:
        """`ready`, of a group whose content is in another journal, as `mark` of that one says."""
        await self._record(Entry(mark, group=group), durable=False)

    async def dropped(
        self, group: int, *, reason: str, again: bool = False, tokens: int = 0, durable: bool = False
    ) -> None:
        """A group was given up; `again`: its prompt is to be admitted again.

        Args:
            tokens: that were sampled for it, where its content is in another journal.
        """
        await self._record(Entry(Dropped(reason, tokens=tokens, again=again), group=group), durable=durable)

    # ---- the training side

    async def taken(self, groups: Sequence[int], *, update: int, durable: bool = False) -> None:
        """A batch was taken, to be trained from weights that hold `update` optimizer updates."""
        await self._record(Entry(Taken(tuple(groups), update)), durable=durable)

    async def trained(
        self, groups: Sequence[int], *, train_step: int, masked: Sequence[int] = (), durable: bool = False
    ) -> None:
        """Groups took part in optimizer step `train_step`. They stay until a checkpoint holds it.

        Args:
            masked: sampled tokens of each that took no gradient; none: all took.
        """
        body = Trained(tuple(groups), train_step, masked=tuple(masked))
        await self._record(Entry(body), durable=durable)

    async def published(self, version: int, *, update: int, durable: bool = False) -> None:
        """The trainer published `version`, which holds `update` optimizer updates."""
        await self._record(Entry(Published(version, update)), durable=durable)

    async def checkpointed(self, train_step: int) -> None:
        """No restart goes back before the checkpoint of `train_step`: what was trained up to it can go. Durable.

        Before that checkpoint is made, `sync`: it must not hold steps that the journal does not know.
        """
        await self._record(Entry(Checkpointed(train_step)), durable=True)

    # ---- both

    async def sync(self) -> None:
        """Return once all that was recorded before survives a loss of power, where `journal.fsync` is not never."""
        await self._submit(self._job(lambda log: None, durable=True))

    async def read(self, group: int, *, routing: RoutingSpec | None) -> PromptGroup:
        """A live group, its trajectories as far as they are recorded; reads in a thread of its own.

        Raises:
            ContractError: rows that do not fit `routing`.
        """
        reader: GroupReader = await self._submit(self._job(lambda log: make_reader(log, group)))
        try:
            return await asyncio.to_thread(reader.read, routing)
        except OSError as error:
            raise JournalBroken(
                f"could not read group {group} from the journal ({error.strerror or error}); restart the run once the "
                "disk works again"
            ) from error

    async def mark(self, group: int) -> Marked:
        """How much there is of a group whose trajectories are all closed, once that is durable.

        Raises:
            JournalError: it is not live, or some are open.
        """
        return await self._submit(self._job(lambda log: mark_of(log, group), durable=True))

    async def live(self) -> tuple[int, frozenset[int]]:
        """(id of the next group, those of all live ones), once that is durable."""
        work = self._job(lambda log: (log.state.next_group, frozenset(log.state.live)), durable=True)
        return await self._submit(work)

    async def stats(self) -> JournalStats:
        """How large it is, and what it did."""
        waiting = self._buffer.held
        return await self._submit(self._job(lambda log: self._writer.stats(waiting_bytes=waiting)))

    async def close(self) -> None:
        """Write and sync what was submitted, and let others open the journal. Idempotent.

        Raises:
            JournalBroken: the last records may not be on the disk.
        """
        await asyncio.to_thread(self._writer.close)

    # ---- inside

    async def _record(self, entry: Entry, *, durable: bool) -> None:
        await self._buffer.enter(entry.num_bytes)
        await self._submit(self._job(entry, durable=durable))

    def _job(self, work: Entry | Callable[[JournalLog], Any], *, durable: bool = False) -> Job:
        return Job(work, durable, self._loop.create_future())

    async def _submit(self, job: Job) -> Any:
        try:
            self._writer.submit(job)
        except JournalError:
            self._buffer.leave(job.num_bytes)
            raise
        return await job.answer

    def _deliver(self, answers: Sequence[Answer]) -> None:
        """In the writer's thread."""
        try:
            self._loop.call_soon_threadsafe(self._settle, answers)
        except RuntimeError:  # the event loop is closed: nobody waits
            return

    def _settle(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._buffer.leave(answer.job.num_bytes)
            future = answer.job.answer
            if future.done():  # its caller was cancelled
                if isinstance(answer.result, GroupReader):
                    answer.result.close()
            elif answer.error is None:
                future.set_result(answer.result)
            else:
                future.set_exception(answer.error)
