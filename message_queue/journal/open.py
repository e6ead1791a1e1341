"""Opens a journal, after whatever stopped the run before, and gives back what was in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from message_queue.contract import Admission
from message_queue.journal.disk import Disk, DiskFile
from message_queue.journal.errors import JournalBroken, JournalBusy, JournalError, disk_error
from message_queue.journal.files import JournalFiles, read_record
from message_queue.journal.format import FILE_BYTES, MAX_RUN_BYTES, read_file_header
from message_queue.journal.groups import GroupState, LiveGroup, Span
from message_queue.journal.log import JournalConfig, JournalLog
from message_queue.journal.records import Called, Closed, Marked, Observed, Sampled
from message_queue.journal.recovery import LostContent, RecoveryReport, Replay
from message_queue.journal.state import JournalStart, JournalState
from message_queue.ledger import LedgerCounts
from message_queue.tokens import RoutingSpec
from message_queue.trajectory import PromptGroup, ResumeRouting, Trajectory
from message_queue.wire.arrays import MessageReader

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredGroup:
    """A group that was in flight; `Journal.read` gives its content.

    lengths: tokens of each of its trajectories. records: that its content is. num_segments, num_tokens: sampled.
    complete: every trajectory is closed. calls: trajectory -> what was begun outside for it and not recorded as done:
    it may have happened.
    """

    admission: Admission
    resume_routing: ResumeRouting
    lengths: tuple[int, ...]
    records: int
    num_segments: int
    num_tokens: int
    complete: bool
    calls: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Where a run goes on.

    began: there was no journal yet. open: by id. ready: in the order to take them, those of `trained` first, then those
    that were taken. trained: of the groups among `ready` that were trained after the checkpoint, the optimizer updates
    of the weights that were trained; in the order of their batch. masked_tokens: of these, sampled tokens that took no
    gradient; none where not named. next_group: no smaller id is free, and what is
    smaller and not in `open` or `ready` is settled. prompt_cursor: first prompt that was never handed out; those handed
    out before are in groups, settled, or in `waiting`, to be admitted again, in that order. recycles: prompt -> times
    that it was to be. version: newest that was published. version_updates: `param_version` -> optimizer updates, of it
    and of all that may have sampled a token of these groups. ledger: its `open` are these groups.
    """

    began: bool
    open: tuple[RecoveredGroup, ...]
    ready: tuple[RecoveredGroup, ...]
    trained: Mapping[int, int]
    masked_tokens: Mapping[int, int]
    next_group: int
    prompt_cursor: int
    version: int
    version_updates: Mapping[int, int]
    train_step: int
    waiting: tuple[int, ...]
    recycles: Mapping[int, int]
    ledger: LedgerCounts
    report: RecoveryReport

    def is_settled(self, group: int) -> bool:
        """Whether a group was admitted and has ended: trained, or dropped."""
        live = {g.admission.group for g in (*self.open, *self.ready)}
        return 0 <= group < self.next_group and group not in live


@dataclass(frozen=True, slots=True, eq=False)
class GroupReader:
    """The content of a group as it was when this was made, to be read once, in any thread.

    records: (file, place, checksum seed) in order.
    """

    admission: Admission
    resume_routing: ResumeRouting
    num_trajectories: int
    records: Sequence[tuple[DiskFile, Span, int]]

    def read(self, routing: RoutingSpec | None) -> PromptGroup:
        """The group, its trajectories as far as they are recorded.

        Raises:
            JournalBroken: a record cannot be read any more. ContractError: rows that do not fit `routing`.
            OSError: the disk failed.
        """
        trajectories = [
            Trajectory(routing=routing, resume_routing=self.resume_routing) for _ in range(self.num_trajectories)
        ]
        try:
            for handle, span, seed in self.records:
                _append(trajectories, handle.read(span.offset, span.size), seed=seed, routing=routing)
        finally:
            self.close()
        return PromptGroup(
            group=self.admission.group,
            prompt=self.admission.prompt,
            admitted_version=self.admission.admitted_version,
            admitted_update=self.admission.admitted_update,
            trajectories=trajectories,
        )

    def close(self) -> None:
        """Let go of the files."""
        for handle in {id(handle): handle for handle, _, _ in self.records}.values():
            handle.close()


def check_owner(directory: Path, *, run: str) -> None:
    """Refuse a directory that holds what this run cannot go on from, by its files' headers; without opening it.

    Raises:
        JournalFormatError, JournalRunError: it is of another format or run. JournalUnwritable: it cannot be read.
    """
    for path in sorted(directory.glob("*.journal")):
        try:
            with path.open("rb") as file:
                head = memoryview(file.read(FILE_BYTES))
        except OSError as error:
            raise disk_error(error, what="read", path=str(path)) from error
        read_file_header(head, run=run, path=str(path))


def make_reader(log: JournalLog, group: int) -> GroupReader:
    """Of a live group as it is now.

    Raises:
        JournalError: it is not live.
    """
    live = _live(log, group)
    return GroupReader(live.admission, live.resume_routing, len(live.progress), log.records(live))


def mark_of(log: JournalLog, group: int) -> Marked:
    """How much there is of a live group.

    Raises:
        JournalError: it is not live, or not complete.
    """
    live = _live(log, group)
    if not live.complete:
        left = [number for number, progress in enumerate(live.progress) if not progress.closed]
        raise JournalError(f"group {group} cannot become ready: trajectories {left} are open")
    return Marked(len(live.spans), live.num_segments, live.num_tokens)


def _live(log: JournalLog, group: int) -> LiveGroup:
    live = log.state.live.get(group)
    if live is None:
        raise JournalError(f"group {group} is not live: it was never admitted, or has ended")
    return live


def open_log(disk: Disk, *, run: str, config: JournalConfig, start: JournalStart) -> tuple[JournalLog, Recovered]:
    """Open the journal of a directory, or begin one, at the checkpoint that `start` is of.

    Raises:
        ValueError: `run` is empty or too long.
        JournalBusy, JournalFormatError, JournalRunError, JournalStepError, JournalUnwritable, JournalFull: as named.
        JournalBroken: the disk failed.
    """
    if not 0 < len(run.encode()) <= MAX_RUN_BYTES:
        raise ValueError(f"journal run is {run!r}; give it 1 to {MAX_RUN_BYTES} bytes")
    _on_disk(disk, "lock", disk.lock)
    replay = Replay(disk, run=run)
    try:
        return _recover(disk, replay, run=run, config=config, start=start)
    except BaseException:
        for file in replay.files.values():
            file.handle.close()
        disk.unlock()
        raise


def _recover(
    disk: Disk, replay: Replay, *, run: str, config: JournalConfig, start: JournalStart
) -> tuple[JournalLog, Recovered]:
    durable = config.fsync != "never"
    _on_disk(disk, "read", replay.read)
    if replay.empty:
        replay.state = JournalState(start)
    report = replay.finish()
    state = replay.state
    settled = state.end_by(start)
    less = [] if start.held is None else state.compare(start.held)
    settled += state.restart(start)
    if durable:  # what a killed process wrote may not be on the disk yet, and the new file builds on it
        for file in replay.files.values():
            _on_disk(disk, "sync", file.handle.sync)
    files = JournalFiles(
        disk,
        run=run,
        durable=durable,
        existing=replay.files,
        next_number=replay.next_number,
        next_seq=replay.next_seq,
    )
    log = JournalLog(files, state=state, config=config)
    _on_disk(disk, "cut the end of", replay.cut)
    log.release(settled)
    lost_content = (*report.lost_content, *(LostContent(*lost) for lost in less))
    report = replace(
        report,
        lost_content=tuple(lost for lost in lost_content if lost.group in state.live),
        set_aside=tuple(log.set_aside_damaged()),
    )
    return log, _recovered(state, began=replay.empty, report=report)


def _recovered(state: JournalState, *, began: bool, report: RecoveryReport) -> Recovered:
    ready = sorted((g for g in state.live.values() if g.state is GroupState.READY), key=lambda g: g.turn)
    return Recovered(
        began=began,
        open=tuple(_group(g) for g in state.live.values() if g.state is GroupState.OPEN),
        ready=tuple(map(_group, ready)),
        trained={g.group: g.trained_update for g in ready if g.trained_update is not None},
        masked_tokens={g.group: g.masked_tokens for g in ready if g.masked_tokens},
        next_group=state.next_group,
        prompt_cursor=state.prompt_cursor,
        version=state.version,
        version_updates=dict(state.versions),
        train_step=state.train_step,
        waiting=tuple(state.waiting),
        recycles=dict(state.recycles),
        ledger=state.ledger(),
        report=report,
    )


def _group(live: LiveGroup) -> RecoveredGroup:
    return RecoveredGroup(
        admission=live.admission,
        resume_routing=live.resume_routing,
        lengths=tuple(p.length for p in live.progress),
        records=len(live.spans),
        num_segments=live.num_segments,
        num_tokens=live.num_tokens,
        complete=live.complete,
        calls={i: p.call for i, p in enumerate(live.progress) if p.call is not None},
    )


def _append(trajectories: Sequence[Trajectory], data: memoryview, *, seed: int, routing: RoutingSpec | None) -> None:
    """Append what a record holds to the trajectory it is of."""
    entry = read_record(data, seed=seed)
    if entry is None:
        raise JournalBroken("a record of the journal cannot be read any more; restart the run, which recovers the rest")
    trajectory, body, payload = trajectories[entry.trajectory], entry.body, entry.payload[0]
    match body:
        case Observed():
            trajectory.observe(np.frombuffer(payload, "<i4"))
        case Sampled():
            segment = MessageReader(body.message, payload, routing).segment(next(body.message.segments()))
            trajectory.extend(segment)
        case Called():
            pass
        case Closed():
            trajectory.close(stop_reason=body.stop_reason, reward=body.reward, info=body.info)
        case _:
            raise JournalError(f"{type(body).__name__} is no content of a group")


def _on_disk(disk: Disk, what: str, work: Callable[[], S]) -> S:
    """`work()`, its errors as the journal's."""
    directory = disk.path("")
    try:
        return work()
    except BlockingIOError as error:
        raise JournalBusy(
            f"another process has the journal {directory} open; stop that run, or give output_dir another directory"
        ) from error
    except OSError as error:
        raise disk_error(error, what=what, path=directory) from error
