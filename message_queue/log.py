"""What the queue writes down of its state changes. Each call is made in one piece with the change it is of.

So the records are in the order of the changes, whoever waits for them. A caller of the queue is answered once the
record of its change is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from typing import Any, Protocol

from message_queue.contract import Admission, QueuedGroup
from message_queue.journal import Journal
from message_queue.progress import CallBegun, RolloutRecord, Sampled, TrajectoryClosed
from message_queue.trajectory import ResumeRouting
from message_queue.wire import EncodedGroup
from message_queue.wire.packed import Shared


class QueueLog(Protocol):
    """A record is on its way when a call returns, and written when what it returned has been awaited.

    tokens: that were sampled for a group which is dropped, as far as the caller knows.
    """

    def admitted(self, admission: Admission) -> Awaitable[None]: ...
    def appended(self, record: RolloutRecord) -> Awaitable[None]: ...
    def ready(self, group: QueuedGroup) -> Awaitable[None]: ...
    def dropped(self, group: int, *, reason: str, tokens: int = 0, again: bool = False) -> Awaitable[None]: ...
    def taken(self, groups: Sequence[int], *, update: int) -> Awaitable[None]: ...
    def trained(self, groups: Sequence[int], *, train_step: int, masked: Sequence[int]) -> Awaitable[None]: ...
    def published(self, version: int, *, update: int) -> Awaitable[None]: ...
    def checkpointed(self, train_step: int) -> Awaitable[None]: ...
    def synced(self) -> Awaitable[None]: ...


class Written:
    """Done; awaiting it gives way to nobody."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


WRITTEN = Written()


class NoLog:
    """Writes nothing: a restart goes back to the last checkpoint."""

    def admitted(self, admission: Admission) -> Awaitable[None]:
        return WRITTEN

    def appended(self, record: RolloutRecord) -> Awaitable[None]:
        return WRITTEN

    def ready(self, group: QueuedGroup) -> Awaitable[None]:
        return WRITTEN

    def dropped(self, group: int, *, reason: str, tokens: int = 0, again: bool = False) -> Awaitable[None]:
        return WRITTEN

    def taken(self, groups: Sequence[int], *, update: int) -> Awaitable[None]:
        return WRITTEN

    def trained(self, groups: Sequence[int], *, train_step: int, masked: Sequence[int]) -> Awaitable[None]:
        return WRITTEN

    def published(self, version: int, *, update: int) -> Awaitable[None]:
        return WRITTEN

    def checkpointed(self, train_step: int) -> Awaitable[None]:
        return WRITTEN

    def synced(self) -> Awaitable[None]:
        return WRITTEN


class _Writing(Written):
    """A record on its way. Who waits for it may be cancelled; it is written all the same."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.ensure_future(work)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody has to wait for it

    def __await__(self) -> Generator[Any, None, None]:
        yield from asyncio.shield(self._task).__await__()


class JournaledLog:
    """Writes to a journal.

    Awaiting raises what the journal raises; the queue is then ahead of it, and the run is to be restarted.

    Args:
        trajectories: of each group that is admitted. resume_routing: of each of them.
    """

    def __init__(self, journal: Journal, *, trajectories: int, resume_routing: ResumeRouting) -> None:
        self._journal = journal
        self._trajectories = trajectories
        self._resume_routing: ResumeRouting = resume_routing

    def admitted(self, admission: Admission) -> Awaitable[None]:
        return _Writing(
            self._journal.admitted(admission, trajectories=self._trajectories, resume_routing=self._resume_routing)
        )

    def appended(self, record: RolloutRecord) -> Awaitable[None]:
        group, trajectory, at, what = record.group, record.trajectory, record.at, record.what
        match what:
            case Sampled():
                assert not isinstance(what.segment, Shared), "the queue fetches what is shared before it records it"
                work = self._journal.sampled(group, what.segment, trajectory=trajectory, at=at)
            case CallBegun():
                work = self._journal.called(group, what.call, trajectory=trajectory, at=at)
            case TrajectoryClosed():
                work = self._journal.closed(
                    group,
                    trajectory=trajectory,
                    at=at,
                    stop_reason=what.stop_reason,
                    reward=what.reward,
                    info=what.info,
                )
            case _:
                work = self._journal.observed(group, what, trajectory=trajectory, at=at)
        return _Writing(work)

    def ready(self, group: QueuedGroup) -> Awaitable[None]:
        return _Writing(self._journal.ready(group.group))

    def dropped(self, group: int, *, reason: str, tokens: int = 0, again: bool = False) -> Awaitable[None]:
        return _Writing(self._journal.dropped(group, reason=reason, again=again))

    def taken(self, groups: Sequence[int], *, update: int) -> Awaitable[None]:
        return _Writing(self._journal.taken(groups, update=update))

    def trained(self, groups: Sequence[int], *, train_step: int, masked: Sequence[int]) -> Awaitable[None]:
        return _Writing(self._journal.trained(groups, train_step=train_step, masked=masked))

    def published(self, version: int, *, update: int) -> Awaitable[None]:
        return _Writing(self._journal.published(version, update=update))

    def checkpointed(self, train_step: int) -> Awaitable[None]:
        return _Writing(self._journal.checkpointed(train_step))

    def synced(self) -> Awaitable[None]:
        return _Writing(self._journal.sync())


class BooksLog(JournaledLog):
    """Writes to a journal whose groups have their content in others. Each that is put brings a mark of that one."""

    def ready(self, group: QueuedGroup) -> Awaitable[None]:
        assert isinstance(group, EncodedGroup), "the queue of the books holds heads"
        if group.content is None:
            return super().ready(group)  # which the journal refuses: nothing of it is closed there
        return _Writing(self._journal.marked(group.group, group.content))

    def dropped(self, group: int, *, reason: str, tokens: int = 0, again: bool = False) -> Awaitable[None]:
        return _Writing(self._journal.dropped(group, reason=reason, tokens=tokens, again=again))
