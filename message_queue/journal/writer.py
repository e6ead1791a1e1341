"""The one thread that touches the journal's files, so that no event loop ever waits for the disk."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from message_queue.journal.errors import JournalBroken, JournalClosed, JournalError
from message_queue.journal.format import Entry
from message_queue.journal.log import JournalConfig, JournalLog

MAX_WRITE_BYTES = 16 << 20  # what one write takes along; the first of it waits for the last
CLEAN_BYTES = 1 << 20  # what is cleaned between two writes at least; twice what was written where that is more


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """An entry to record, or something else to do in the thread. durable: answer once it is on the disk."""

    work: Entry | Callable[[JournalLog], Any]
    durable: bool
    answer: asyncio.Future[Any]

    @property
    def num_bytes(self) -> int:
        return self.work.num_bytes if isinstance(self.work, Entry) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What became of a job: its result, or why there is none."""

    job: Job
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """Now, and since the journal was opened.

    disk_bytes: of its files. live_bytes: of them, content of live groups. cleaned_bytes: written again so that files
    could be removed. cleaning_error: why the last attempt at that stopped, if it did; the
    next records bring another. waiting_bytes: not written yet.
    """

    files: int
    disk_bytes: int
    live_bytes: int
    live_groups: int
    syncs: int
    cleaned_bytes: int
    waiting_bytes: int
    cleaning_error: str | None


class Writer:
    """Runs jobs in the order in which they are submitted, those that wait in one go.

    Args:
        deliver: is given the answers, in the thread of the writer.
    """

    def __init__(self, log: JournalLog, *, config: JournalConfig, deliver: Callable[[Sequence[Answer]], None]) -> None:
        self._cleaning_error: JournalError | None = None
        self._log = log
        self._config = config
        self._deliver = deliver
        self._wake = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._under_way: set[Job] = set()
        self._closed: JournalError | None = None
        self._cleaning = True
        self._dirty_since: float | None = None
        self._begin()

    def submit(self, job: Job) -> None:
        """Do it as soon as all before it is done.

        Raises:
            JournalClosed, JournalBroken: nothing is done any more.
        """
        with self._wake:
            if self._closed is not None:
                raise self._closed
            self._jobs.append(job)
            self._wake.notify()

    def stats(self, *, waiting_bytes: int) -> JournalStats:
        """In the thread, or while nothing runs in it."""
        files = self._log.files
        return JournalStats(
            files=len(files.all),
            disk_bytes=files.num_bytes,
            live_bytes=files.live_bytes,
            live_groups=len(self._log.state.live),
            syncs=files.num_syncs,
            cleaned_bytes=self._log.cleaned_bytes,
            waiting_bytes=waiting_bytes,
            cleaning_error=None if self._cleaning_error is None else str(self._cleaning_error),
        )

    def close(self) -> None:
        """Do what was submitted, sync, and close the files. Blocks; idempotent.

        Raises:
            JournalBroken: the last records may not be on the disk.
        """
        with self._wake:
            if self._closed is None:
                self._closed = JournalClosed("the journal is closed")
            self._wake.notify()
        self._wait_ended()
        if isinstance(self._closed, JournalBroken):
            raise self._closed

    # ---- the thread; where there is none, these are what takes its place

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def _wait_ended(self) -> None:
        self._thread.join()

    def _now(self) -> float:
        return time.monotonic()

    # ---- in the thread

    def _run(self) -> None:
        try:
            while (jobs := self._next()) is not None:
                self._under_way.update(jobs)
                self._do(jobs)
            self._log.files.sync()
        except BaseException as error:  # noqa: BLE001 - whoever waits for a job is told, whatever happened
            self._fail(error)
        finally:
            self._log.files.close()

    def _next(self) -> list[Job] | None:
        """Wait for jobs to do; None after the last."""
        with self._wake:
            while (jobs := self._due()) is None and self._closed is None:
                self._wake.wait(self._seconds_to_sync())
            return jobs

    def _due(self) -> list[Job] | None:
        """Jobs to do now, none where there is cleaning or a sync to do; None where there is nothing to do."""
        if not self._jobs:
            wait_s = self._seconds_to_sync()
            due = self._cleaning or (wait_s is not None and wait_s <= 0)
            return [] if due and self._closed is None else None
        jobs = [self._jobs.popleft()]
        size = jobs[0].num_bytes
        while self._jobs and (size := size + self._jobs[0].num_bytes) <= MAX_WRITE_BYTES:
            jobs.append(self._jobs.popleft())
        return jobs

    def _do(self, jobs: Sequence[Job]) -> None:
        answers: list[Answer] = []
        entries: list[Job] = []
        for job in jobs:
            if isinstance(job.work, Entry):
                entries.append(job)
            else:
                answers += self._record(entries)
                answers.append(self._call(job, job.work))
                entries = []
        answers += self._record(entries)
        self._answer(answers)
        self._clean(written=sum(job.num_bytes for job in jobs))

    def _record(self, jobs: Sequence[Job]) -> list[Answer]:
        results = self._log.append([job.work for job in jobs if isinstance(job.work, Entry)])
        self._cleaning = self._cleaning or None in results
        return [Answer(job, error=error) for job, error in zip(jobs, results, strict=True)]

    def _call(self, job: Job, work: Callable[[JournalLog], Any]) -> Answer:
        try:
            return Answer(job, result=work(self._log))
        except (JournalError, OSError) as error:
            return Answer(job, error=error)

    def _answer(self, answers: Sequence[Answer]) -> None:
        """Sync where that is due, and answer: those that do not wait for it first."""
        durable: list[Answer] = []
        at_once: list[Answer] = []
        for answer in answers:
            waits = answer.error is None and (answer.job.durable or self._config.fsync == "always")
            (durable if waits else at_once).append(answer)
        self._give(at_once)
        if self._dirty_since is None and self._log.files.dirty:
            self._dirty_since = self._now()
        wait_s = self._seconds_to_sync()
        if durable or (wait_s is not None and wait_s <= 0):
            error = self._sync()
            self._give(durable if error is None else [Answer(answer.job, error=error) for answer in durable])

    def _sync(self) -> JournalError | None:
        try:
            self._log.files.sync()
        except JournalError as error:
            return error
        finally:
            self._dirty_since = None
        return None

    def _seconds_to_sync(self) -> float | None:
        """None where no sync is due at any time."""
        if self._dirty_since is None or self._config.fsync != "interval" or self._log.files.broken is not None:
            return None
        return self._dirty_since + self._config.interval_s - self._now()

    def _clean(self, *, written: int) -> None:
        if not self._cleaning:
            return
        try:
            self._cleaning = self._log.clean(max(CLEAN_BYTES, 2 * written))
            self._cleaning_error = None
        except JournalError as error:
            self._cleaning, self._cleaning_error = False, error

    def _give(self, answers: Sequence[Answer]) -> None:
        if answers:
            self._under_way.difference_update(answer.job for answer in answers)
            self._deliver(answers)

    def _fail(self, error: BaseException) -> None:
        broken = error if isinstance(error, JournalBroken) else JournalBroken(f"the journal's thread failed: {error!r}")
        broken.__cause__ = None if broken is error else error
        with self._wake:
            self._closed = broken
            jobs = [*self._under_way, *self._jobs]
            self._jobs.clear()
        self._give([Answer(job, error=broken) for job in jobs])


class StartsWriter(Protocol):
    """`Writer`, or what does the same work elsewhere than in a thread."""

    def __call__(
        self, log: JournalLog, /, *, config: JournalConfig, deliver: Callable[[Sequence[Answer]], None]
    ) -> Writer: ...
